"""A micro-batched step, measured: what the peers of `brimful-bench micro` share.

A step is forward and backward over the mini-batch and the reading of its loss, with gradients that
start as none and without an optimizer. Samples are in page-locked host memory, where a loader with
pin_memory=True leaves them. cuDNN may benchmark its kernels, as it may in brimful's runs.
"""

import torch

import contest
import models


def works(rows):
    """Those of the speed rows: others count memory alone."""
    return contest.each_once([row for row in rows if "micro_batches" not in row])


def measure_with(make_step):
    """Measures what `make_step(work, network, settings)` gives: whether gradients stay, and a step of (x, y)."""

    def measure(work, settings, repeats):
        models.allow(work["dtype"])
        device, cuda = work["device"], work["device"].startswith("cuda")
        network, (x, y) = models.network(work), models.samples(work, pinned=cuda)
        keep, step = make_step(work, network, settings)
        losses = []
        warm_up, seconds = contest.timed(
            lambda: losses.append(float(step(x, y).detach())),
            lambda: network.zero_grad(set_to_none=not keep),
            lambda: contest.synchronize(device),
            repeats,
        )
        figures = contest.speed(work, warm_up, seconds)
        # A CPU's memory is counted by nobody here.
        peaks = {"peak_bytes": None}
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            network.zero_grad(set_to_none=not keep)
            step(x, y)
            peaks = {"peak_bytes": torch.cuda.max_memory_allocated()}
            peaks["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return {**figures, **peaks, "loss": losses[-1]}

    return measure

"""Measurement of a micro-batched step, shared by the peers of `brimful-bench micro`.

A step is forward and backward over the mini-batch and the reading of its loss, starting without
gradients and without an optimizer. Samples are in pinned host memory, where a loader with
pin_memory=True leaves them. cuDNN may benchmark its kernels, as in brimful's runs.
"""

import torch

import contest
import models


def works(rows):
    """Returns the works of the speed rows; other rows measure only memory."""
    return contest.each_once([row for row in rows if "micro_batches" not in row])


def measure_with(make_step):
    """Measures the step of (x, y) from `make_step(work, network, settings)`, which also returns whether gradients stay."""

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
        # A CPU's memory is not accounted here.
        peaks = {"peak_bytes": None}
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            network.zero_grad(set_to_none=not keep)
            step(x, y)
            peaks = {"peak_bytes": torch.cuda.max_memory_allocated()}
            peaks["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return {**figures, **peaks, "loss": losses[-1]}

    return measure

"""Pipelines by torchgpipe 0.0.7: one process, a Python thread per stage.

    pipeline_torchgpipe.py --like OURS.jsonl [--repeats 3]

Runs our GPipe rows on the same devices, with recomputation if they have it (its `checkpoint`).
"""

import torch
from torch import nn

import contest
import models

WARM_UP = 1
CHECKPOINT = {"never": "never", "except-last": "except_last", "always": "always"}


def works(rows):
    return contest.each_once([row for row in rows if row["schedule"] == "gpipe"])


def measure(row, settings, repeats):
    from torchgpipe import GPipe

    models.allow(row["dtype"])
    # cuDNN's benchmark results belong to a thread, and its threads live only for a step.
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
    device, cuda = row["device"], row["device"].startswith("cuda")
    network = GPipe(
        nn.Sequential(*(make() for make in models.layers(row))).train(),
        balance=row["balance"],
        devices=[device] * row["stages"],
        chunks=row["micro_batches"],
        checkpoint=CHECKPOINT[row["recompute"]],
    )
    x, y = models.samples(row, pinned=cuda)

    def step():
        out = network(x.to(device, non_blocking=True))
        loss = models.loss_of(out, y.to(device, non_blocking=True))
        loss.backward()
        return float(loss.detach())

    clear = lambda: network.zero_grad(set_to_none=True)  # noqa: E731
    wait = lambda: contest.synchronize(device)  # noqa: E731
    figures = contest.speed(row, *contest.timed(step, clear, wait, repeats, WARM_UP))
    if not cuda:
        return {**figures, "peak_bytes": None}
    clear()
    torch.cuda.reset_peak_memory_stats()
    step()
    return {**figures, "peak_bytes": torch.cuda.max_memory_allocated()}


if __name__ == "__main__":
    named = lambda row, flags: [("torchgpipe", {})]  # noqa: E731
    contest.run("pipeline", named, measure, works, "torchgpipe")

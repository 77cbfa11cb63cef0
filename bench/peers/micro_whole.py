"""The step without micro-batches: forward and backward over the whole mini-batch at once, until memory runs out.

    micro_whole.py --like OURS.jsonl

It runs the mini-batches of our memory rows (`brimful-bench micro --memory`).
"""

import torch

import contest
import micro
import models


def works(rows):
    return contest.each_once([row for row in rows if "micro_batches" in row])


def contestants(_work, _flags):
    yield "PyTorch, whole batch", {}


def measure(work, _settings, _repeats):
    models.allow(work["dtype"])
    device = work["device"]
    network, (x, y) = models.network(work), models.samples(work, pinned=device.startswith("cuda"))
    # The first step also chooses kernels, which takes memory of its own.
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        network.zero_grad(set_to_none=True)
        loss = models.loss_of(network(x.to(device)), y.to(device))
        loss.backward()
        float(loss.detach())
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "ratio": None}


if __name__ == "__main__":
    contest.run("micro", contestants, measure, works)

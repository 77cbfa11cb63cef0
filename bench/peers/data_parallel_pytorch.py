"""Data parallelism by torch DistributedDataParallel: Gloo, one thread per process, CUDA devices assigned round-robin.

    data_parallel_pytorch.py --like OURS.jsonl [--repeats 5]

Runs our ranks' work: the same model, mini-batch, micro-batches and number of ranks; and the model alone on one
thread, as a loop over the same micro-batches. Gradients are summed once per step, in buckets, while the backward of
the last micro-batch runs (`no_sync` before it), and stay in the buckets.
"""

import contextlib

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import contest
import models

WARM_UP = 1
ALONE, PARALLEL = "PyTorch, one rank", "DistributedDataParallel"


def trained(row, repeats, rank):
    """Returns the seconds of steps on this rank's part of the mini-batch."""
    torch.manual_seed(0)
    device, ranks = device_of(row, rank), row["ranks"]
    network = nn.Sequential(*(make() for make in models.layers(row))).train().to(device)
    each = row["batch"] // ranks
    x, y = (whole[rank * each : (rank + 1) * each] for whole in models.samples(row))
    parts = list(zip(x.split(row["micro_batch"]), y.split(row["micro_batch"])))
    parts = [(micro_x.to(device), micro_y.to(device)) for micro_x, micro_y in parts]
    model = network if ranks == 1 else DistributedDataParallel(network, gradient_as_bucket_view=True)

    def step():
        total = torch.zeros((), device=device)
        for i, (micro_x, micro_y) in enumerate(parts):
            sums_up = ranks == 1 or i + 1 == len(parts)
            with contextlib.nullcontext() if sums_up else model.no_sync():
                loss = models.loss_of(model(micro_x), micro_y) * (len(micro_x) / each)
                loss.backward()
            total += loss.detach()
        if ranks > 1:
            distributed.all_reduce(total)
        return float(total) / ranks

    def wait():
        contest.synchronize(device)
        if ranks > 1:
            distributed.barrier()

    return contest.timed(step, lambda: model.zero_grad(set_to_none=True), wait, repeats, WARM_UP)


def device_of(row, rank):
    if row["device"] == "cpu":
        return "cpu"
    return f"cuda:{rank % torch.cuda.device_count()}"


def measure(row, settings, repeats):
    if row["ranks"] == 1:
        torch.set_num_threads(1)
        return contest.speed(row, *trained(row, repeats, 0))
    return contest.speed(row, *contest.in_ranks(row["ranks"], trained, row, repeats))


if __name__ == "__main__":
    named = lambda row, flags: [(ALONE if row["ranks"] == 1 else PARALLEL, {})]  # noqa: E731
    contest.run("ranks", named, measure)

"""Pipelines by torch.distributed.pipelining: Gloo, one process per device, one thread per process.

    pipeline_pytorch.py --like OURS.jsonl [--repeats 3]

Runs our pipelines without recomputation, in one process or over ranks: the same layers, balance, schedule and
micro-batches. Before the pipelines of each model it runs the model on one thread, as a loop over the same
micro-batches.
"""

import torch
from torch import distributed, nn

import contest
import models

WARM_UP = 1
ALONE, PIPELINE = "PyTorch, one thread", "torch.distributed.pipelining"


def works(rows):
    """Yields each model alone, then its pipelines."""
    alone = set()
    for row in contest.each_once(rows):
        if row["model"] not in alone:
            alone.add(row["model"])
            yield {**row, "stages": 1, "schedule": None, "recompute": None, "balance": None}
        if row["stages"] > 1 and row["recompute"] == "never" and kind_of(row):
            yield row


def stages_of(row, rank):
    """Yields the stages of one device by number: one per round (interleaved), or down and up again (V)."""
    balance, makers = row["balance"], models.layers(row)
    assert sum(balance) == len(makers), f"{len(makers)} layers for {balance}"
    numbers = range(rank, len(balance), row["stages"])
    if row["schedule"] == "zero-bubble-v":
        numbers = [rank, len(balance) - 1 - rank]
    for number in numbers:
        start = sum(balance[:number])
        part = makers[start : start + balance[number]]
        yield number, nn.Sequential(*(make() for make in part)).train()


def alone(row, repeats):
    models.allow(row["dtype"])
    network = nn.Sequential(*(make() for make in models.layers(row))).train().to(row["device"])
    x, y = (tensor.to(row["device"]) for tensor in models.samples(row))

    def step():
        total = 0.0
        for micro_x, micro_y in zip(x.split(row["micro_batch"]), y.split(row["micro_batch"])):
            loss = models.loss_of(network(micro_x), micro_y) * (len(micro_x) / row["batch"])
            loss.backward()
            total += loss.detach()
        return float(total)

    wait = lambda: contest.synchronize(row["device"])  # noqa: E731
    return contest.timed(step, lambda: network.zero_grad(set_to_none=True), wait, repeats, WARM_UP)


def kind_of(row):
    """Returns the peers' schedule of that name, or None: they have no automatic schedules."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        # With one stage per device it is H1.
        "zero-bubble-h1": schedules.ScheduleInterleavedZeroBubble,
        "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zero-bubble-v": schedules.ScheduleZBVZeroBubble,
    }
    name = row["schedule"] or ""
    return kinds.get(name) or kinds.get(name.rpartition("-")[0])


def schedule_of(row, stages):
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    kind = kind_of(row)
    given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(given, row["micro_batches"], loss_fn=models.loss_of)


def pipelined(row, repeats, rank):
    from torch.distributed.pipelining import PipelineStage

    parts, (x, y) = dict(stages_of(row, rank)), models.samples(row)
    device, count = torch.device("cpu"), len(row["balance"])
    stages = [PipelineStage(part, number, count, device) for number, part in parts.items()]
    for stage in stages:
        # The initial exchange between neighbours is for NCCL. Gloo has no self-connection, which a V's turn would need.
        stage._get_init_p2p_neighbors_ops = list
    schedule = schedule_of(row, stages)
    first, last = 0 in parts, count - 1 in parts

    def step():
        inputs = (x,) if first else ()
        if last:
            losses = []
            schedule.step(*inputs, target=y, losses=losses)
            return float(torch.stack(losses).detach().mean())
        schedule.step(*inputs)

    def clear():
        for part in parts.values():
            part.zero_grad(set_to_none=True)

    return contest.timed(step, clear, distributed.barrier, repeats, WARM_UP)


def measure(row, settings, repeats):
    if row["schedule"] is None:
        torch.set_num_threads(1)
        return contest.speed(row, *alone(row, repeats))
    seconds = contest.in_ranks(row["stages"], pipelined, row, repeats)
    return {**contest.speed(row, *seconds), "peak_bytes": None}


if __name__ == "__main__":
    named = lambda row, flags: [(PIPELINE if row["schedule"] else ALONE, {})]  # noqa: E731
    contest.run("pipeline world", named, measure, works)

"""Pipelines by torch.distributed.pipelining: Gloo, one process a stage, one thread a process.

    pipeline_pytorch.py --like OURS.jsonl [--repeats 3]

Runs what the rows of `brimful bench pipeline --json` in the file say: model, balance, schedule, number and
size of micro-batches; and the same model on one thread, as a loop over the same micro-batches. Schedules that
split a device, and recomputation, are left out. Prints the same JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torchvision
from torch import distributed, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from micro_common import CLASSES, Block

VOCABULARY = 256
WARM_UP = 1
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
ALONE, PIPELINE = "PyTorch, one thread", "torch.distributed.pipelining"


class Positions(nn.Module):
    """Adds to each token what stands for its place."""

    def __init__(self, sequence, width):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(sequence, width))

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


def layers(row):
    """The model as the same list of layers as ours, not yet built: a balance counts them."""
    numbers = [int(number) for number in row["shape"].split("×")]
    if row["model"] == "gpt":
        depth, width, sequence = numbers
        ends = [lambda: nn.LayerNorm(width), lambda: nn.Linear(width, VOCABULARY, bias=False)]
        starts = [lambda: nn.Embedding(VOCABULARY, width), lambda: Positions(sequence, width), nn.Identity]
        return [*starts, *([lambda: Block(width)] * depth), *ends]
    network = getattr(torchvision.models, row["model"])(num_classes=CLASSES)
    blocks = [block for group in range(1, 5) for block in getattr(network, f"layer{group}")]
    stem = [network.conv1, nn.Sequential(network.bn1, network.relu), network.maxpool]
    head = [network.avgpool, nn.Flatten(), network.fc]
    return [lambda layer=layer: layer for layer in (*stem, *blocks, *head)]


def part(row, stage):
    """One stage's layers, or the whole model."""
    makers = layers(row)
    if stage is not None:
        assert sum(row["balance"]) == len(makers), f"{len(makers)} layers for {row['balance']}"
        start = sum(row["balance"][:stage])
        makers = makers[start : start + row["balance"][stage]]
    return nn.Sequential(*(make() for make in makers)).train()


def samples(row):
    """Random ones: some kernels are faster on zeros."""
    if row["model"] == "gpt":
        sequence = int(row["shape"].split("×")[2])
        return torch.randint(VOCABULARY, (2, row["batch"], sequence)).unbind()
    size = int(row["shape"].split("×")[0])
    return torch.randn(row["batch"], 3, size, size), torch.randint(CLASSES, (row["batch"],))


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def timed(step, network, wait, repeats):
    """The seconds of the steps that count, each from a moment when all are ready to one when all are done."""
    seconds = []
    for turn in range(WARM_UP + repeats):
        network.zero_grad(set_to_none=True)
        wait()
        start = time.perf_counter()
        step()
        wait()
        if turn >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return seconds


def alone(row, repeats):
    network, (x, y) = part(row, None), samples(row)

    def step():
        total = 0.0
        for micro_x, micro_y in zip(x.split(row["micro_batch"]), y.split(row["micro_batch"])):
            loss = loss_of(network(micro_x), micro_y) * (len(micro_x) / row["batch"])
            loss.backward()
            total += loss.detach()
        return float(total)

    return timed(step, network, lambda: None, repeats)


def pipelined(row, repeats, rank):
    stages = row["stages"]
    network, (x, y) = part(row, rank), samples(row)
    stage = PipelineStage(network, rank, stages, torch.device("cpu"))
    schedule = SCHEDULES[row["schedule"]](stage, row["micro_batches"], loss_fn=loss_of)

    def step():
        if rank == stages - 1:
            losses = []
            schedule.step(*((x,) if rank == 0 else ()), target=y, losses=losses)
            return float(torch.stack(losses).detach().mean())
        schedule.step(*((x,) if rank == 0 else ()))

    return timed(step, network, distributed.barrier, repeats)


def process(rank, row, repeats, store, answers):
    """A forked child: the libraries are loaded already, and no thread has been started."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    if row["schedule"] is None:
        answers.put(alone(row, repeats))
        return
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=row["stages"])
    seconds = pipelined(row, repeats, rank)
    if rank == 0:
        answers.put(seconds)
    distributed.barrier()
    distributed.destroy_process_group()


def measure(row, repeats):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (row, repeats, os.path.join(folder, "store"), answers)
        children = [context.Process(target=process, args=(rank, *arguments)) for rank in range(row["stages"])]
        for child in children:
            child.start()
        for child in children:
            child.join()
    if any(child.exitcode for child in children):
        sys.exit(f"{PIPELINE} failed: {[child.exitcode for child in children]}")
    return answers.get()


def rows_like(path):
    """What to run: each pipeline that both sides know, after its model on one thread."""
    ours = [json.loads(line) for line in open(path, encoding="utf-8") if line.startswith("{")]
    alone_before = set()
    for row in ours:
        known = row.get("schedule") in SCHEDULES and row["recompute"] == "never" and row["stages"] > 1
        if row.get("done") or not known:
            continue
        if row["model"] not in alone_before:
            alone_before.add(row["model"])
            yield {**row, "stages": 1, "schedule": None, "recompute": None, "balance": None}
        yield row


def answer(row, seconds, one):
    median = statistics.median(seconds)
    kept = ["model", "shape", "device", "dtype", "batch", "micro_batch", "micro_batches"]
    kept += ["stages", "schedule", "recompute", "balance"]
    return {
        "contestant": PIPELINE if row["schedule"] else ALONE, **{key: row[key] for key in kept},
        "samples_per_s": row["batch"] / median, "ratio": one / median,
        "spread": (max(seconds) - min(seconds)) / median, "seconds": seconds, "peak_bytes": None,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--like", required=True, help="JSON lines of `brimful bench pipeline`")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    answers, one = [], None
    for row in rows_like(args.like):
        print(f"{row['model']} {row['stages']} {row['schedule']}", file=sys.stderr, flush=True)
        seconds = measure(row, args.repeats)
        one = one if row["schedule"] else statistics.median(seconds)
        answers.append(answer(row, seconds, one))
        print(json.dumps(answers[-1], ensure_ascii=False), flush=True)
    environment = {
        "program": PIPELINE, "python": sys.version.split()[0], "torch": torch.__version__,
        "torchvision": torchvision.__version__, "backend": "gloo", "threads_per_stage": 1,
        "cores": os.cpu_count(), "optimizer": "none", "batch_norm": "per micro-batch",
    }  # fmt: skip
    print(json.dumps({"done": True, "environment": environment, "rows": answers}, ensure_ascii=False))


if __name__ == "__main__":
    main()

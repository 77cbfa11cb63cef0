"""Split backward of torch.distributed.pipelining's zero-bubble schedules, beside the whole one.

    split_backward_pytorch.py --like OURS.jsonl [--repeats 25]

Runs the works of `brimful-bench split-backward`: the same stage, all layers but the first, whose output is the input; on a
CPU on one thread. `stage_backward_input` and `stage_backward_weight` alternate with `torch.autograd.backward`.
"""

import statistics
import time

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import contest
import models

WARM_UP = 2


def works(rows):
    """Returns the works whose layers the peers have."""
    has = lambda model: model == "gpt" or model.startswith("resnet")  # noqa: E731
    return [row for row in contest.each_once(rows) if has(row["model"])]


class MiddleStage:
    """All layers of a model but the first, their input, and the gradient of their output."""

    def __init__(self, work):
        self.device = work["device"]
        kind = {"f64": torch.float64, "bf16": torch.bfloat16}.get(work["dtype"], torch.float32)
        first, *others = (make() for make in models.layers(work))
        self.network = nn.Sequential(*others).train().to(self.device, kind)
        x = models.samples(work)[0].to(self.device)
        with torch.no_grad():
            self.input = first.to(self.device, kind)(x.to(kind) if x.is_floating_point() else x)
            self.gradient = torch.randn_like(self.network(self.input))

    def weights(self):
        return iter(self.network.parameters())

    def timed(self, work):
        """Returns the result of some work, and its seconds from an idle device to an idle device."""
        contest.synchronize(self.device)
        start = time.perf_counter()
        given = work()
        contest.synchronize(self.device)
        return given, time.perf_counter() - start

    def forward(self):
        self.network.zero_grad(set_to_none=True)
        leaf = self.input.detach().requires_grad_()
        return leaf, *self.timed(lambda: self.network(leaf))

    def whole(self):
        """Returns the seconds of the forward and the backward, and all gradients."""
        leaf, output, forward = self.forward()
        _, backward = self.timed(lambda: torch.autograd.backward([output], [self.gradient]))
        return {"forward": forward, "whole": backward}, self.gradients(leaf)

    def split(self):
        leaf, output, forward = self.forward()
        roots = [output], [self.gradient], [leaf]
        (_, groups), first = self.timed(lambda: stage_backward_input(*roots, self.weights()))
        del output, roots
        _, second = self.timed(lambda: stage_backward_weight(self.weights(), groups))
        return {"forward": forward, "input": first, "weight": second}, self.gradients(leaf)

    def gradients(self, leaf):
        return [leaf.grad, *(weight.grad for weight in self.weights())]


def apart(expected, found):
    """Returns the norm of the difference of all gradients over that of the expected ones."""
    square = lambda gradient: float(gradient.double().square().sum())  # noqa: E731
    difference = sum(square(a - b) for a, b in zip(expected, found))
    return (difference / sum(map(square, expected))) ** 0.5


def measure(work, settings, repeats):
    torch.set_num_threads(1)
    models.allow(work["dtype"])
    stage, difference = MiddleStage(work), 0.0
    seconds = {key: [] for key in ["forward", "whole", "input", "weight"]}
    for turn in range(WARM_UP + repeats):
        (whole, expected), (split, found) = stage.whole(), stage.split()
        if turn < WARM_UP:
            difference = apart(expected, found)
            continue
        for times in (whole, split):
            for key, value in times.items():
                seconds[key].append(value)
    return figures(seconds, difference)


def figures(seconds, difference):
    middle = {f"{key}_seconds": statistics.median(values) for key, values in seconds.items()}
    both = [a + b for a, b in zip(seconds["input"], seconds["weight"])]
    split = statistics.median(both)
    return {
        **middle, "split_seconds": split, "ratio": split / middle["whole_seconds"], "repeats": len(both),
        "spread": (max(both) - min(both)) / split, "gradient_difference": difference,
    }  # fmt: skip


if __name__ == "__main__":
    named = lambda work, flags: [("torch.distributed.pipelining", {})]  # noqa: E731
    contest.run("split_backward", named, measure, works)

"""What the peers of `brimful bench micro` share: its models, its samples, its clock, its JSON.

A step is forward and backward over the mini-batch and the reading of its loss, with gradients that
start as none and without an optimizer. Samples are in page-locked host memory, where a loader with
pin_memory=True leaves them. cuDNN may benchmark its kernels, as it may in brimful's runs.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

CLASSES = 1000
# GPT-2's 50,257 tokens, filled up to what fast kernels like, as is usual.
VOCABULARY = 50304
HEAD_WIDTH = 64
WARM_UP = 2


class Block(nn.Module):
    """Attention and a two-layer network, each normed before and added to what came in."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.contract(F.gelu(self.expand(self.ln_2(x)), approximate="tanh"))

    def attend(self, x):
        samples, sequence, width = x.shape
        parts = self.split(x).split(width, dim=2)
        q, k, v = (p.view(samples, sequence, self.heads, -1).transpose(1, 2) for p in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.join(out.transpose(1, 2).reshape(samples, sequence, width))


class Gpt(nn.Module):
    """GPT-2 without dropout, its head tied to its embedding."""

    def __init__(self, layers, width, sequence):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["resnet18", "resnet50", "resnet101", "gpt"], default="resnet50")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["f32", "tf32", "bf16"], default="f32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--gpt", default="12x768x512", help="layers x width x sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--channels-last", action="store_true", help="for the loop on images")
    parser.add_argument("--compile", choices=["default", "reduce-overhead"], help="for the loop")
    parser.set_defaults(keep_gradients=False)
    return parser.parse_args()


def model(args):
    if args.model == "gpt":
        made = Gpt(*map(int, args.gpt.split("x")))
    else:
        made = getattr(torchvision.models, args.model)(num_classes=CLASSES)
    made = made.to(args.device).train()
    return made.bfloat16() if args.dtype == "bf16" else made


def samples(args):
    """Random ones: some kernels are faster on zeros."""
    if args.model == "gpt":
        sequence = int(args.gpt.split("x")[2])
        x, y = torch.randint(VOCABULARY, (2, args.batch, sequence)).unbind()
    else:
        x = torch.randn(args.batch, 3, args.image, args.image)
        y = torch.randint(CLASSES, (args.batch,))
        x = x.bfloat16() if args.dtype == "bf16" else x
    return (x.pin_memory(), y.pin_memory()) if args.device.startswith("cuda") else (x, y)


def loss_of(network, x, y):
    return F.cross_entropy(network(x).flatten(0, -2), y.flatten())


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def turn(args, network, step):
    """One step, timed from a quiet device to a quiet device: seconds and loss."""
    network.zero_grad(set_to_none=not args.keep_gradients)
    synchronize(args.device)
    start = time.perf_counter()
    loss = float(step().detach())
    synchronize(args.device)
    return time.perf_counter() - start, loss


def measure(contestant, make_step, **versions):
    """Runs the script of one peer: `make_step(args, network)` gives its step of (x, y).

    A contestant's name may depend on the options.
    """
    args = options()
    contestant = contestant(args) if callable(contestant) else contestant
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.dtype != "f32"
    network, (x, y) = model(args), samples(args)
    step = make_step(args, network)
    print(f"{contestant} {args.model} {args.dtype} {args.batch}/{args.micro_batch}", file=sys.stderr)
    warm_up = [turn(args, network, lambda: step(x, y))[0] for _ in range(WARM_UP)]
    cuda = args.device.startswith("cuda")
    if cuda:
        network.zero_grad(set_to_none=not args.keep_gradients)
        torch.cuda.reset_peak_memory_stats()
    turns = [turn(args, network, lambda: step(x, y)) for _ in range(args.repeats)]
    peak = torch.cuda.max_memory_allocated() if cuda else None
    row = row_of(contestant, args, [seconds for seconds, _ in turns], turns[-1][1], peak)
    row["warm_up_seconds"] = warm_up
    row["reserved_bytes"] = torch.cuda.max_memory_reserved() if cuda else None
    last = {"done": True, "environment": environment(contestant, args, versions), "rows": [row]}
    for line in (row, last):
        print(json.dumps(line, ensure_ascii=False), flush=True)


def row_of(contestant, args, seconds, loss, peak):
    median = statistics.median(seconds)
    shape = args.gpt.replace("x", "×") if args.model == "gpt" else f"{args.image}×{args.image}"
    return {
        "contestant": contestant, "model": args.model, "shape": shape, "device": args.device,
        "dtype": args.dtype, "batch": args.batch, "micro_batch": args.micro_batch,
        "stages": 1, "schedule": None, "recompute": None,
        "samples_per_s": args.batch / median, "ratio": None,
        "spread": (max(seconds) - min(seconds)) / median, "seconds": seconds,
        "peak_bytes": peak, "loss": loss,
    }  # fmt: skip


def environment(contestant, args, versions):
    cuda = args.device.startswith("cuda")
    return {
        "program": contestant, "python": sys.version.split()[0], "torch": torch.__version__,
        "torchvision": torchvision.__version__, **versions, "device": args.device,
        "device_model": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        "cudnn_benchmark": True, "optimizer": "none", "batch_norm": "per micro-batch",
        "host_batch": "page-locked" if cuda else "pageable",
    }  # fmt: skip

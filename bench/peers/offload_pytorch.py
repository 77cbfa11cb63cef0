"""PyTorch's GPT with its optimizer: all on the GPU, with FSDP2's CPU offload, and with activations saved on the host.

    offload_pytorch.py --like OURS.jsonl [--repeats 5] [--only fsdp2]

Runs the works of `brimful-bench offload`: the same GPT, micro-batches and optimizer, which is part of every step.
Each contestant has the whole GPU, even if ours had a limit: its peak shows what it took.
"""

import os
import statistics
import tempfile
import time

import torch
from torch import distributed, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import contest
import models

WARM_UP = 2
LEARNING_RATE = 1e-4
# Width of a head in rows without a number of heads: 16 heads for a width of 2,048, 28 for 3,584.
HEAD_WIDTH = 128


def contestants(work, flags):
    limit = ", no limit" if work.get("memory_limit") else ""
    yield f"PyTorch, on the GPU{limit}", {"way": "gpu"}
    yield f"PyTorch FSDP2, CPU offload{limit}", {"way": "fsdp2"}
    yield f"PyTorch save_on_cpu{limit}", {"way": "save_on_cpu"}


class Recomputed(nn.Module):
    """Block with activation recomputation: keeps its input and repeats its forward before its backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)


class OnTheCard:
    """Parameters, gradients and AdamW's state are f32 and stay on the GPU; autocast computes in bf16."""

    def __init__(self, work, recompute):
        self.device = work["device"]
        self.network = blank(work, recompute).to_empty(device=self.device)
        fill(self.network, self.device)

    def loss(self, x, y, is_last):
        with torch.autocast(self.device.split(":")[0], torch.bfloat16):
            return models.loss_of(self.network(x).float(), y)


class SavedOnTheHost(OnTheCard):
    """Activations for the backward are saved in host memory, so that nothing is recomputed."""

    def __init__(self, work):
        super().__init__(work, recompute=False)

    def loss(self, x, y, is_last):
        with save_on_cpu(pin_memory=is_cuda(self.device)):
            return super().loss(x, y, is_last)


class Sharded:
    """FSDP2 of one rank: each block's parameters come from the host for its forward and for its backward."""

    def __init__(self, work):
        self.network = blank(work, recompute=True)
        numbers = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload_policy = CPUOffloadPolicy(pin_memory=is_cuda(work["device"]))
        for block in self.network.blocks:
            fully_shard(block, mp_policy=numbers, offload_policy=offload_policy)
        fully_shard(self.network, mp_policy=numbers, offload_policy=offload_policy)
        self.network.to_empty(device="cpu")
        fill(self.network, work["device"])

    def loss(self, x, y, is_last):
        # Gradients are summed on the GPU until the last micro-batch: each is offloaded once per step.
        self.network.set_requires_gradient_sync(is_last)
        return models.loss_of(self.network(x).float(), y)


def blank(work, recompute):
    """Returns the GPT on the meta device: five billion parameters must not be allocated twice."""
    layers, width, sequence = models.shape(work)
    heads = work.get("heads") or max(1, width // HEAD_WIDTH)
    with torch.device("meta"):
        network = models.Gpt(models.VOCABULARY["offload"], layers, width, sequence, heads)
    if recompute:
        network.blocks = nn.Sequential(*map(Recomputed, network.blocks))
    return network.train()


@torch.no_grad()
def fill(network, device):
    """Initialises the parameters on the GPU: a CPU core takes a minute for five billion of them."""
    torch.manual_seed(0)
    for name, parameter in network.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if own.dim() > 1:
            own.copy_(torch.randn(own.shape, device=device).mul_(0.02))
        else:
            # Parameters of norms, and biases.
            own.fill_(1.0 if name.endswith("weight") else 0.0)


def is_cuda(device):
    return device.startswith("cuda")


def measure(work, settings, repeats):
    models.allow("bf16")
    if is_cuda(work["device"]):
        torch.cuda.set_device(work["device"])
    if settings["way"] == "fsdp2":
        return in_group(work["device"], lambda: trained(work, Sharded(work), repeats))
    saved = settings["way"] == "save_on_cpu"
    return trained(work, SavedOnTheHost(work) if saved else OnTheCard(work, recompute=True), repeats)


def in_group(device, run):
    """Runs in a process group, which FSDP2 requires, of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if is_cuda(device) else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return run()
        finally:
            distributed.destroy_process_group()


def trained(work, way, repeats):
    """Returns the figures of consecutive steps."""
    device, count = work["device"], work["micro_batches"]
    batch, sequence = count * work["sequences"], models.shape(work)[2]
    x, y = torch.randint(models.VOCABULARY["offload"], (2, batch, sequence), device=device).unbind()
    parts = list(zip(x.chunk(count), y.chunk(count)))
    parameters = list(way.network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    for _ in range(WARM_UP):
        step(way, parts, optimizer, device)
    figures, losses = steady(lambda: step(way, parts, optimizer, device), repeats, device)
    return {
        "parameters": sum(parameter.numel() for parameter in parameters), **figures,
        "tokens_per_s": batch * sequence / figures["seconds"], "loss": losses[-1],
    }  # fmt: skip


def steady(run, repeats, device):
    """Returns the times and peak memory of consecutive steps, and their losses."""
    contest.synchronize(device)
    if is_cuda(device):
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses, backward = zip(*(run() for _ in range(repeats)))
    contest.synchronize(device)
    figures = {
        "repeats": repeats, "seconds": (time.perf_counter() - start) / repeats,
        "seconds_backward": statistics.median(backward),
        # A CPU's memory is not accounted here.
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda(device) else None,
    }  # fmt: skip
    return figures, losses


def step(way, parts, optimizer, device):
    """Returns the loss of a step, and the seconds until it was read, after the last backward."""
    start = time.perf_counter()
    total = torch.zeros((), device=device)
    for number, (x, y) in enumerate(parts, start=1):
        loss = way.loss(x, y, is_last=number == len(parts)) / len(parts)
        loss.backward()
        total += loss.detach()
    total, seconds = float(total), time.perf_counter() - start
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, seconds


if __name__ == "__main__":
    contest.run("offload", contestants, measure, facts={"optimizer": "adamw", "dtype": "bf16", "batch_norm": None})

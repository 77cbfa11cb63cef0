"""A folder's Llama, fine-tuned by transformers: with PEFT's LoRA, or whole with FSDP2's CPU offload.

    finetune_transformers.py --like OURS.jsonl [--repeats 5] [--only checkpointing] [--flags compile]

Runs the works of `brimful-bench finetune`: the same folder, tokens, micro-batches, and AdamW, which is part of every
step. Each contestant has the whole GPU, even if ours had a limit: its peak shows what it took.
"""

import os
import time

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import contest
import models
import offload_pytorch as offload

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
except ImportError as error:
    raise ImportError(f"{error.msg}: put transformers and PEFT into PYTHONPATH (bench/peers/setup carry FOLDER)") from error

WARM_UP = 2
# Projections that brimful's LoRA adapts.
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def contestants(work, flags):
    limit = ", no limit" if work.get("memory_limit") else ""
    if work.get("lora"):
        yield f"transformers + PEFT, checkpointing{limit}", {"recompute": True}
        yield f"transformers + PEFT{limit}", {"recompute": False}
        if "compile" in flags:
            yield f"transformers + PEFT, compiled{limit}", {"recompute": False, "compile": True}
    else:
        yield f"transformers, FSDP2, CPU offload{limit}", {"recompute": True}


def measure(work, settings, repeats):
    models.allow("bf16")
    if offload.is_cuda(work["device"]):
        torch.cuda.set_device(work["device"])
    if not work.get("lora"):
        return offload.in_group(work["device"], lambda: trained(work, sharded(work), repeats))
    start = time.perf_counter()
    network = AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=torch.bfloat16, attn_implementation="sdpa", device_map=work["device"], local_files_only=True)
    contest.synchronize(work["device"])
    loaded = {"seconds_load": time.perf_counter() - start}
    recompute(network, settings["recompute"])
    network = adapted(network, work["lora"])
    if settings.get("compile"):
        network.compile()
    return {**trained(work, network, repeats), **loaded}


def adapted(network, lora):
    """Adds adapters in bf16 like the base weights: the fastest configuration, without autocast."""
    rank, alpha = lora.split(":")
    config = LoraConfig(r=int(rank), lora_alpha=float(alpha), target_modules=PROJECTIONS, lora_dropout=0.0)
    return get_peft_model(network, config, autocast_adapter_dtype=False)


def recompute(network, wanted):
    network.config.use_cache = False
    if wanted:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.enable_input_require_grads()
    network.train()


def sharded(work):
    """Shards by FSDP2 with one rank: each block's f32 parameters come from the host as bf16 for forward and backward."""
    config = AutoConfig.from_pretrained(work["model"], local_files_only=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    recompute(network, True)
    numbers = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy(pin_memory=offload.is_cuda(work["device"]))
    for block in network.model.layers:
        fully_shard(block, mp_policy=numbers, offload_policy=offload_policy)
    fully_shard(network, mp_policy=numbers, offload_policy=offload_policy)
    network.to_empty(device="cpu")
    # Its tables are computed, not loaded, and were lost when the meta tensors were replaced.
    network.model.rotary_emb = LlamaRotaryEmbedding(config).to(work["device"])
    offload.fill(network, work["device"])
    return network


def trained(work, network, repeats):
    """Returns the figures of consecutive steps."""
    device = work["device"]
    parts = micro_batches(work, network.config.vocab_size)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=offload.LEARNING_RATE, fused=True)
    first, _ = step(network, parts, optimizer, device)
    for _ in range(WARM_UP - 1):
        step(network, parts, optimizer, device)
    figures, losses = offload.steady(lambda: step(network, parts, optimizer, device), repeats, device)
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()), **figures,
        "tokens_per_s": work["batch"] * work["sequence"] / figures["seconds"],
        "first_loss": first, "last_loss": losses[-1],
    }  # fmt: skip


def micro_batches(work, vocabulary):
    """Returns the tokens that brimful uses too, and the tokens that follow."""
    batch, sequence = work["batch"], work["sequence"]
    texts = torch.arange(batch * (sequence + 1), device=work["device"]) * 48271 % 65537 % vocabulary
    texts = texts.view(batch, sequence + 1)
    x, y = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
    return list(zip(x.split(work["micro_batch"]), y.split(work["micro_batch"])))


def step(network, parts, optimizer, device):
    """Returns the loss of a step, and the seconds until it was read, after the last backward."""
    start = time.perf_counter()
    total, samples = torch.zeros((), device=device), sum(len(x) for x, _ in parts)
    for number, (x, y) in enumerate(parts, start=1):
        if hasattr(network, "set_requires_gradient_sync"):
            # Gradients are summed on the GPU until the last micro-batch: each is offloaded once per step.
            network.set_requires_gradient_sync(number == len(parts))
        loss = network(input_ids=x, labels=y, shift_labels=y).loss * (len(x) / samples)
        loss.backward()
        total += loss.detach()
    total, seconds = float(total), time.perf_counter() - start
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, seconds


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    contest.run("finetune", contestants, measure, package="transformers", facts={"optimizer": "adamw", "dtype": "bf16", "batch_norm": None})

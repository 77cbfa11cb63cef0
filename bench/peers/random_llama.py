"""Makes a Hugging Face folder of a Llama with random bf16 weights, with nothing but torch.

    random_llama.py FOLDER --layers 22 --width 2048 --inner 5632 --heads 32:4 [--vocabulary 32000] [--context 2048]
                    [--tied] [--shard-bytes 4000000000] [--device cuda]

Weights are drawn on the device and written tensor by tensor. More than --shard-bytes of them become shards with an
index. The folder has no tokenizer: its tokens are bytes. A complete folder that exists already stays unchanged.
"""

import argparse
import json
import os
import sys
import time

import torch

# Size of the length that precedes each safetensors header.
LENGTH_BYTES = 8


def main():
    args = arguments()
    path = os.path.join(args.folder, "config.json")
    wanted = config(args)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            if json.load(file) != wanted:
                sys.exit(f"{args.folder} holds another model: name another folder, or remove it")
        return
    os.makedirs(args.folder, exist_ok=True)
    torch.manual_seed(0)
    start = time.perf_counter()
    parts = shards(list(tensors(args)), args.shard_bytes)
    placed = {}
    for number, part in enumerate(parts, start=1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        write(os.path.join(args.folder, name), part, args.device)
        placed.update((tensor, name) for tensor, _ in part)
    size = sum(bytes_of(shape) for part in parts for _, shape in part)
    if len(parts) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        dump(os.path.join(args.folder, "model.safetensors.index.json"), index)
    # Written last: a folder without it is incomplete.
    dump(path, wanted)
    seconds = time.perf_counter() - start
    print(f"{args.folder}: {size // 2:,} parameters in {len(parts)} files, {seconds:.0f} s", file=sys.stderr)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, required=True, help="transformer blocks")
    parser.add_argument("--width", type=int, required=True, help="numbers that stand for a token")
    parser.add_argument("--inner", type=int, required=True, help="numbers between the ends of a block's network")
    parser.add_argument("--heads", required=True, help="of queries, and of keys and values: 32:4")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens that there are")
    parser.add_argument("--context", type=int, default=2048, help="the longest sequence")
    parser.add_argument("--tied", action="store_true", help="the head uses the table of the embedding")
    parser.add_argument("--shard-bytes", type=int, default=4_000_000_000, help="the most of one file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    try:
        args.heads, args.shared_heads = map(int, args.heads.split(":"))
    except ValueError:
        parser.error("--heads: give those of queries, and of keys and values, as in 32:4")
    if args.width % args.heads or args.heads % args.shared_heads:
        parser.error("--heads: those of queries divide --width, those of keys and values divide them")
    return args


def config(args):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": args.width, "intermediate_size": args.inner, "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads, "num_key_value_heads": args.shared_heads, "vocab_size": args.vocabulary,
        "max_position_embeddings": args.context, "tie_word_embeddings": args.tied, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "initializer_range": 0.02, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def tensors(args):
    """Yields the names of the weights with their shapes, in the order of the layers."""
    width, inner, shared = args.width, args.inner, args.width // args.heads * args.shared_heads
    yield "model.embed_tokens.weight", [args.vocabulary, width]
    for number in range(args.layers):
        block = f"model.layers.{number}"
        yield f"{block}.input_layernorm.weight", [width]
        for name, outputs in [("q", width), ("k", shared), ("v", shared), ("o", width)]:
            yield f"{block}.self_attn.{name}_proj.weight", [outputs, width]
        yield f"{block}.post_attention_layernorm.weight", [width]
        yield f"{block}.mlp.gate_proj.weight", [inner, width]
        yield f"{block}.mlp.up_proj.weight", [inner, width]
        yield f"{block}.mlp.down_proj.weight", [width, inner]
    yield "model.norm.weight", [width]
    if not args.tied:
        yield "lm_head.weight", [args.vocabulary, width]


def bytes_of(shape):
    return 2 * torch.Size(shape).numel()


def shards(all_tensors, most):
    """Groups consecutive tensors into shards of at most `most` bytes, or of a single larger tensor."""
    parts, taken = [[]], 0
    for name, shape in all_tensors:
        if parts[-1] and taken + bytes_of(shape) > most:
            parts.append([])
            taken = 0
        parts[-1].append((name, shape))
        taken += bytes_of(shape)
    return parts


def write(path, part, device):
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in part:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + bytes_of(shape)]}
        place += bytes_of(shape)
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for _, shape in part:
            weight = torch.ones(shape, device=device, dtype=torch.bfloat16)
            if len(shape) > 1:
                weight.normal_(0.0, 0.02)
            file.write(weight.view(torch.uint8).cpu().numpy().data)


def dump(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)


if __name__ == "__main__":
    main()

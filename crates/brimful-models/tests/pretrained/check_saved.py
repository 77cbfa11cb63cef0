"""Lets transformers and PEFT load what was saved, and compares their logits with ours.

    python check_saved.py FOLDER

Each folder in it has a `model`, perhaps an `adapter` to it, and answers.safetensors: `tokens`, their `logits`, and those with
the adapter, `adapted`.
"""

import pathlib
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4


def check(what, model, tokens, expected):
    with torch.no_grad():
        error = (model.eval()(tokens).logits - expected).abs().max().item()
    # Written so that a NaN fails too.
    if not error < TOLERANCE:
        sys.exit(f"{what}: {error:.1e}")


def main():
    for folder in sorted(path.parent for path in pathlib.Path(sys.argv[1]).glob("*/answers.safetensors")):
        answers = load_file(folder / "answers.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        check(folder.name, model, answers["tokens"], answers["logits"])
        if (folder / "adapter").exists():
            model = PeftModel.from_pretrained(model, folder / "adapter")
            check(f"{folder.name}, adapted", model, answers["tokens"], answers["adapted"])


main()

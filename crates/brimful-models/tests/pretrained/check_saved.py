"""Lets transformers and PEFT load what the tests beside this file have saved, and compares logits.

    pip install torch==2.11.0 transformers==5.22.2 peft
    cargo test --workspace --test reference
    python crates/brimful-models/tests/pretrained/check_saved.py target/tmp
"""

import pathlib
import sys

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check(what, found, expected):
    error = (found - expected).abs().max().item()
    print(f"{what}: {error:.1e}")
    assert error < TOLERANCE, what


def main():
    here, saved = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1])
    for folder in sorted(here.glob("*/config.json")):
        name = folder.parent.name
        reference = load_file(folder.parent / "reference.safetensors")
        model = load(saved / f"pretrained-saved-{name}" / "to")
        check(f"{name}, saved", logits(model, reference["tokens"]), reference["logits"])
        adapted = saved / f"pretrained-lora-{name}"
        if adapted.exists():
            model = PeftModel.from_pretrained(load(folder.parent), adapted / "adapter")
            merged = logits(load(adapted / "merged"), reference["tokens"])
            check(f"{name}, with LoRA", logits(model, reference["tokens"]), merged)


main()

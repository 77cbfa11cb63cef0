"""Writes adapters of many kinds, as PEFT saves them, to models beside this file, with what PEFT makes of them when it loads them.

    python make_adapters.py FOLDER

FOLDER/MODEL/KIND gets adapter_config.json, adapter_model.safetensors and reference.safetensors: `tokens`, and their logits with
the adapter, `adapted`.
"""

import pathlib
import sys
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
# For each model: a name, one with dots, a regular expression for two, the embedding, a norm.
MODELS = {
    "llama": ("q_proj", "self_attn.v_proj", r"model\.layers\.(?!0)\d+\..*\.(k_proj|down_proj)", "embed_tokens", "norm"),
    "llama_grouped": ("v_proj", "mlp.up_proj", r".*\.(o|gate)_proj", "embed_tokens", "norm"),
    "gpt2": ("c_attn", "attn.c_proj", r"transformer\.h\.(?!0)\d+\..*c_proj", "wte", "ln_f"),
}


def kinds(name, dotted, regex, table, norm):
    yield "name", dict(target_modules=[name])
    yield "dotted", dict(target_modules=[dotted])
    yield "regex", dict(target_modules=regex)
    yield "all_linear", dict(target_modules="all-linear")
    yield "rslora", dict(target_modules=[name], use_rslora=True)
    yield "patterns", dict(target_modules=[name, dotted], rank_pattern={name: 5}, alpha_pattern={rf"1\..*{dotted}": 11})
    yield "rslora_patterns", dict(target_modules=[name, dotted], use_rslora=True, rank_pattern={f"1.*{name}": 2})
    yield "layers", dict(target_modules=[name, dotted], layers_to_transform=[1])
    yield "excluded", dict(target_modules="all-linear", exclude_modules=[dotted])
    yield "gaussian", dict(target_modules=[name], init_lora_weights="gaussian")
    yield "orthogonal", dict(target_modules=[name], init_lora_weights="orthogonal")
    yield "head", dict(target_modules=[name, "lm_head"])
    yield "embeddings", dict(target_modules=[name, table])
    yield "saved_modules", dict(target_modules=[name], modules_to_save=[norm])
    yield "bias_all", dict(target_modules=[name], bias="all")
    yield "bias_lora", dict(target_modules=[name], bias="lora_only")
    yield "lora_bias", dict(target_modules=[name], lora_bias=True)
    yield "pissa", dict(target_modules=[name], init_lora_weights="pissa")
    yield "olora", dict(target_modules=[name], init_lora_weights="olora")
    yield "dora", dict(target_modules=[name], use_dora=True)
    yield "tokens", dict(target_modules=[name], trainable_token_indices=[1, 2])


def base(model):
    return AutoModelForCausalLM.from_pretrained(HERE / model, dtype=torch.float32)


def main():
    warnings.filterwarnings("ignore")
    into = pathlib.Path(sys.argv[1])
    for model, names in MODELS.items():
        tokens = load_file(HERE / model / "reference.safetensors")["tokens"]
        for kind, options in kinds(*names):
            if (model, kind) == ("gpt2", "olora"):
                # There PEFT takes the weight's rows as its outputs.
                continue
            torch.manual_seed(7)
            adapted = get_peft_model(base(model), LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
            for name, parameter in adapted.named_parameters():
                # Replaces the usual initialisation, with which an adapter changes nothing.
                if parameter.requires_grad:
                    parameter.data += 0.2 * torch.randn_like(parameter)
            folder = into / model / kind
            adapted.save_pretrained(folder)
            loaded = PeftModel.from_pretrained(base(model), folder).eval()
            with torch.no_grad():
                logits = loaded(tokens).logits
            save_file({"tokens": tokens, "adapted": logits.contiguous()}, folder / "reference.safetensors")


main()

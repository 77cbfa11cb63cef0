"""Writes tiny random models, as transformers saves them, with what they answer: into the folder given, or into this one.

    make transformers
    ~/.cache/brimful/transformers/bin/python crates/brimful-models/tests/pretrained/make_reference.py [FOLDER]

Each model's folder gets config.json and model.safetensors, and reference.safetensors: `tokens`, their `logits`, and under
`after.` every weight after ten steps of SGD on `batches`, each step's loss the mean over its tokens but the first. Some get
an `adapter` too, as PEFT saves it, and the logits with it, `adapted`.
"""

import pathlib
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM)

RATE = 0.1
STEPS = 10
SAMPLES = 3
SEQUENCE = 12
VOCABULARY = 40
ADAPTED = {"gpt2": ["c_attn", "c_fc"], "llama_grouped": ["q_proj", "v_proj"], "qwen2": ["o_proj", "down_proj"]}

LLAMA = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=32)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0)


def models():
    yield "gpt2", GPT2LMHeadModel(GPT2Config(**GPT2))
    yield "gpt2_untied", GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False))
    yield "llama", LlamaForCausalLM(LlamaConfig(**LLAMA))
    grouped = LLAMA | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    yield "llama_grouped", LlamaForCausalLM(LlamaConfig(**grouped, rope_parameters=LLAMA3, tie_word_embeddings=True))
    yield "llama_biased", LlamaForCausalLM(
        LlamaConfig(**LLAMA, rope_parameters=LINEAR, attention_bias=True, mlp_bias=True))
    yield "mistral", MistralForCausalLM(MistralConfig(**grouped, sliding_window=16))
    yield "qwen2", Qwen2ForCausalLM(Qwen2Config(**(LLAMA | dict(num_key_value_heads=1)), tie_word_embeddings=True))


def reference(model):
    model.train()
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE))
    batches = torch.randint(VOCABULARY, (STEPS, SAMPLES, SEQUENCE))
    found = {"tokens": tokens, "batches": batches, "logits": model(tokens).logits.detach().clone()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches:
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    after = {f"after.{name}": value.detach().clone() for name, value in model.named_parameters()}
    return found | after


def adapted(folder, targets, tokens):
    """The logits of the folder's model with an adapter, which is written beside it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Replaces the usual initialisation, with which an adapter changes nothing.
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).eval()
    # Otherwise the file would contain this machine's path.
    config.base_model_name_or_path = folder.name
    model.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    return model(tokens).logits.detach().clone()


def main():
    into = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    into = into.parent if into.is_file() else into
    for name, model in models():
        torch.manual_seed(7)
        model = model.float()
        # Wider than a usual initialisation, with biases that are not 0, so that mistakes show.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else parameter.data.add_(
                0.1 * torch.randn_like(parameter))
        folder = into / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        found = reference(model)
        if name in ADAPTED:
            found["adapted"] = adapted(folder, ADAPTED[name], found["tokens"])
        save_file(found, folder / "reference.safetensors")


main()

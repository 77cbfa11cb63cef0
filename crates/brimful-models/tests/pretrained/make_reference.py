"""Writes the tiny random models of this folder, as transformers saves them, with what they answer.

    pip install torch==2.11.0 transformers==5.22.2
    python crates/brimful-models/tests/pretrained/make_reference.py

Each folder gets config.json and model.safetensors, and reference.safetensors: `tokens`, their `logits`, and under
`after.` every weight after ten steps of SGD on `batches`, each step's loss the mean over its tokens but the first.
"""

import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM)

RATE = 0.1
STEPS = 10
SAMPLES = 3
SEQUENCE = 12
VOCABULARY = 40

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


def main():
    here = pathlib.Path(__file__).parent
    for name, model in models():
        torch.manual_seed(7)
        model = model.float()
        # Wider than at the start of a training, and biases that are not 0: else mistakes would not show.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else parameter.data.add_(
                0.1 * torch.randn_like(parameter))
        shutil.rmtree(here / name, ignore_errors=True)
        model.save_pretrained(here / name)
        (here / name / "generation_config.json").unlink(missing_ok=True)
        save_file(reference(model), here / name / "reference.safetensors")
        print(name, sum(file.stat().st_size for file in (here / name).iterdir()), "bytes", file=sys.stderr)


main()

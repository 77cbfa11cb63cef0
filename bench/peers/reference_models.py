"""Writes the outputs of other libraries' models, for crates/brimful-models/tests/suite/reference.rs.

    pip install torch torchvision transformers
    python bench/peers/reference_models.py crates/brimful-models/tests/reference

Weights and inputs come from an integer formula that the test repeats, so the files hold only the
variables' names and shapes and the outputs: any machine can check them, without weights.
"""

import pathlib
import sys

import torch
import torchvision
import transformers

PRIME = 20011


def numbers(name, shape):
    """Returns pseudo-random numbers in [-0.5, 0.5) that depend only on the name."""
    seed = sum((i + 1) * byte for i, byte in enumerate(name.encode())) % 9973
    k = torch.arange(torch.Size(shape).numel())
    return ((k * (k + seed) * 7919 + seed) % PRIME).double().div(PRIME).sub(0.5).view(shape)


def value(name, shape):
    """Returns a value for the variable of this name with which signals neither vanish nor explode."""
    u = numbers(name, shape)
    if len(shape) > 1:
        return u * (24 / torch.Size(shape[1:]).numel()) ** 0.5
    if name.endswith("running_var"):
        return u + 1
    is_scale = name.endswith("weight")
    return u * 0.2 + (1 if is_scale else 0)


def fill(module, left_out):
    """Sets each variable, and yields a line with its name and shape."""
    for name, tensor in module.state_dict().items():
        if not name.endswith(left_out):
            tensor.copy_(value(name, tensor.shape))
            yield f"{name} {' '.join(map(str, tensor.shape))}"


def line(mode, outputs):
    return f"{mode} {' '.join(f'{v:.12e}' for v in outputs.flatten().tolist())}"


def resnet(architecture):
    """Yields the variables, then the logits of two images in evaluation and in training."""
    model = getattr(torchvision.models, architecture)(num_classes=10).double()
    yield f"# torchvision {torchvision.__version__}"
    yield from fill(model, ("num_batches_tracked",))
    x = numbers("input", (2, 3, 64, 64)) * 4
    yield line("eval", model.eval()(x))
    yield line("train", model.train()(x))


def gpt2():
    """Yields the variables, then the logits of two sequences of seven tokens, with a vocabulary of eleven."""
    config = transformers.GPT2Config(n_layer=2, n_embd=24, n_head=3, n_positions=8, vocab_size=11)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    yield f"# transformers {transformers.__version__}"
    yield from fill(model.transformer, (".attn.bias", ".attn.masked_bias"))
    tokens = ((numbers("input", (2, 7)) + 0.5) * 11).long()
    yield line("eval", model(tokens).logits)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    models = {name: resnet(name) for name in ("resnet18", "resnet50", "resnet101")}
    models["gpt2"] = gpt2()
    with torch.no_grad():
        for name, lines in models.items():
            (folder / f"{name}.txt").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()

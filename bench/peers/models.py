"""Models that peers and brimful train, their samples and their loss, from the fields of a row of brimful's.

The ResNets are torchvision's. The GPT, the Llama and the U-Net are written here with the same parameters as brimful's.
"""

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

CLASSES = 1000
HEAD_WIDTH = 64
# Vocabulary of the GPT: GPT-2's 50,257 tokens, padded as usual for fast kernels, with a head that is tied to the
# embedding; or bytes with an untied head in a pipeline, where a larger head would be the one large stage, and over ranks.
VOCABULARY = {"micro": 50304, "auto": 50304, "pipeline": 256, "ranks": 256, "world": 256, "split_backward": 256, "offload": 50304}


class Block(nn.Module):
    """Attention and a two-layer MLP, each with a norm before it and a residual connection."""

    def __init__(self, width, heads=None):
        super().__init__()
        self.heads = heads or width // HEAD_WIDTH
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
    """GPT-2 without dropout, with its head tied to its embedding."""

    def __init__(self, vocabulary, layers, width, sequence, heads=None):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


class LlamaBlock(nn.Module):
    """Attention with rotary embedding and a gated MLP, each with a norm before it and a residual connection."""

    def __init__(self, width, inner):
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.input_norm, self.post_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attend(self.input_norm(x), cos, sin)
        normed = self.post_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x, cos, sin):
        samples, sequence, width = x.shape
        q, k, v = (part(x).view(samples, sequence, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(samples, sequence, width))


def turned(x, cos, sin):
    """Rotates each pair of numbers, one of either half, by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Llama whose head is tied to its embedding, and whose MLPs are 11/4 as wide as it is."""

    def __init__(self, vocabulary, layers, width, sequence):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(width, width * 11 // 4) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        speeds = 10_000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.outer(torch.arange(sequence), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embed.weight)


class ConvBlock(nn.Module):
    """3×3 convolution, instance norm, leaky ReLU."""

    def __init__(self, before, after):
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)

    def forward(self, x):
        return F.leaky_relu(F.instance_norm(self.conv(x)))


class UNet(nn.Module):
    """U-Net (B, C) of the torchgpipe paper without dropout: five levels, B blocks per cell, C channels in the first."""

    def __init__(self, blocks, channels):
        super().__init__()
        widths = [channels << level for level in range(6)]
        entries = [3, *widths[:4]]
        self.encoders = nn.ModuleList(unet_cell(blocks, entries[i], widths[i], widths[i]) for i in range(5))
        self.bottom = unet_cell(blocks, widths[4], widths[5], widths[4])
        self.decoders = nn.ModuleList(unet_cell(blocks, 2 * widths[i], widths[i] // 2, widths[i] // 2) for i in range(5))
        self.head = nn.Conv2d(channels // 2, 1, 1, bias=False)

    def forward(self, x):
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for decoder, skip in zip(reversed(self.decoders), reversed(skips)):
            x = decoder(torch.cat((skip, F.interpolate(x, scale_factor=2.0)), dim=1))
        return self.head(x)


def unet_cell(blocks, entry, middle, leaving):
    ends = [entry, *[middle] * (blocks - 1), leaving]
    return nn.Sequential(*(ConvBlock(before, after) for before, after in zip(ends, ends[1:])))


class Positions(nn.Module):
    """Adds a position embedding to each token."""

    def __init__(self, sequence, width):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(sequence, width))

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


def shape(work):
    """Parses `224×224`, or layers × width × sequence."""
    return [int(number) for number in work["shape"].split("×")]


def network(work):
    """Returns the whole model, on its device, in its dtype."""
    if work["model"] == "gpt":
        made = Gpt(VOCABULARY[work["bench"]], *shape(work))
    elif work["model"] == "llama":
        made = Llama(VOCABULARY[work["bench"]], *shape(work))
    elif work["model"].startswith("unet:"):
        made = UNet(*(int(number) for number in work["model"].removeprefix("unet:").split("x")))
    elif work["model"] == "mlp":
        made = nn.Sequential(nn.Flatten(), *perceptron([28 * 28, 1024, 1024, CLASSES]))
    else:
        made = getattr(torchvision.models, work["model"])(num_classes=CLASSES)
    made = made.to(work["device"]).train()
    return made.bfloat16() if work["dtype"] == "bf16" else made


def perceptron(widths):
    for number, (before, after) in enumerate(zip(widths, widths[1:])):
        if number:
            yield nn.ReLU()
        yield nn.Linear(before, after)


def layers(work):
    """Returns the model as the same list of layers as ours, not yet built: a balance counts them."""
    if work["model"] == "gpt":
        vocabulary, (depth, width, sequence) = VOCABULARY[work["bench"]], shape(work)
        starts = [lambda: nn.Embedding(vocabulary, width), lambda: Positions(sequence, width), nn.Identity]
        ends = [lambda: nn.LayerNorm(width), lambda: nn.Linear(width, vocabulary, bias=False)]
        return [*starts, *([lambda: Block(width)] * depth), *ends]
    made = getattr(torchvision.models, work["model"])(num_classes=CLASSES)
    blocks = [block for group in range(1, 5) for block in getattr(made, f"layer{group}")]
    stem = [made.conv1, nn.Sequential(made.bn1, made.relu), made.maxpool]
    head = [made.avgpool, nn.Flatten(), made.fc]
    return [lambda layer=layer: layer for layer in (*stem, *blocks, *head)]


def samples(work, pinned=False):
    """Returns a mini-batch in host memory, pinned if asked. Random: some kernels are faster on zeros."""
    count = work["batch"]
    if work["model"] in ("gpt", "llama"):
        x, y = torch.randint(VOCABULARY[work["bench"]], (2, count, shape(work)[2])).unbind()
    elif work["model"].startswith("unet:"):
        x, y = torch.randn(count, 3, *shape(work)), torch.randint(2, (count, 1, *shape(work))).float()
        x = x.bfloat16() if work["dtype"] == "bf16" else x
    else:
        channels = 1 if work["model"] == "mlp" else 3
        x, y = torch.randn(count, channels, *shape(work)), torch.randint(CLASSES, (count,))
        x = x.bfloat16() if work["dtype"] == "bf16" else x
    return (x.pin_memory(), y.pin_memory()) if pinned else (x, y)


def loss_of(logits, y):
    if y.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def allow(dtype):
    """Sets the same precision as ours, and lets cuDNN benchmark its kernels."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype != "f32"

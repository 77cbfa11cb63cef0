"""Composer's automatic micro-batching beside `brimful bench auto --steps-only`: prints the same JSON.

The card is filled until --limit bytes are left, then ResNet-50 is trained on a mini-batch in host
memory (page-locked with --pinned) with device_train_microbatch_size="auto". A step includes Composer's own
loop and an SGD step, which takes a few milliseconds.
"""

import argparse
import json
import logging
import statistics
import time

import torch
import torchvision
from composer import Callback, Trainer
from composer.models import ComposerModel
from torch.nn import functional as F

LEARNING_STEPS, STEADY_STEPS = 10, 5


class Classifier(ComposerModel):
    def __init__(self):
        super().__init__()
        self.network = torchvision.models.resnet50()

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


class Repeated:
    """One mini-batch, again and again."""

    def __init__(self, batch, count):
        self.batch, self.count = batch, count
        self.batch_size = len(batch[0])

    def __len__(self):
        return self.count

    def __iter__(self):
        return (self.batch for _ in range(self.count))


class Clock(Callback):
    def __init__(self):
        self.seconds, self.sizes = [], []

    def batch_start(self, state, logger):
        if len(self.seconds) == len(self.sizes):
            torch.cuda.synchronize()
            self.start = time.perf_counter()

    def batch_end(self, state, logger):
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        self.sizes.append(state.device_train_microbatch_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, required=True, help="bytes to leave free")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--pinned", action="store_true", help="the mini-batch in page-locked memory")
    options = parser.parse_args()

    logging.disable(logging.CRITICAL)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - options.limit, dtype=torch.uint8, device="cuda")
    batch = (torch.randn(options.batch, 3, 224, 224), torch.randint(1000, (options.batch,)))
    if options.pinned:
        batch = tuple(tensor.pin_memory() for tensor in batch)
    model, clock = Classifier(), Clock()
    steps = LEARNING_STEPS + STEADY_STEPS
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        train_dataloader=Repeated(batch, steps),
        max_duration=f"{steps}ba",
        device_train_microbatch_size="auto",
        device="gpu",
        precision="fp32",
        callbacks=[clock],
        progress_bar=False,
    )
    trainer.fit()
    size = clock.sizes[-1]
    print(json.dumps({
        "contestant": "Composer", "model": "resnet50", "shape": "224×224", "dtype": "tf32",
        "device": "cuda:0", "batch": options.batch, "pinned": options.pinned, "limit": options.limit, "micro_batch": size,
        # It halves from the whole mini-batch, once a failure.
        "failed": (options.batch // size).bit_length() - 1,
        "first_step_s": clock.seconds[0],
        "samples_per_s": options.batch / statistics.median(clock.seconds[-STEADY_STEPS:]),
    }), flush=True)
    del ballast


if __name__ == "__main__":
    main()

"""Composer's automatic micro-batching beside `brimful-bench auto`.

    auto_composer.py --like OURS.jsonl

PyTorch is limited to our row's share of the GPU. The model is trained on a mini-batch in host memory, also pinned,
with device_train_microbatch_size="auto". A step includes Composer's own loop and an SGD step, which takes a few
milliseconds.
"""

import logging
import statistics
import sys
import time
import types

import torch

import contest
import models

LEARNING_STEPS, STEADY_STEPS = 10, 5


def contestants(work, flags):
    yield "Composer", {"pinned": False}
    if work["device"].startswith("cuda"):
        yield "Composer, page-locked batch", {"pinned": True}


def works(rows):
    """Composer chooses its own micro-batch size, so one work covers our sizes."""
    return contest.each_once([{**row, "micro_batch": None} for row in rows])


class Repeated:
    """Repeats one mini-batch."""

    def __init__(self, batch, count):
        self.batch, self.count = batch, count
        self.batch_size = len(batch[0])

    def __len__(self):
        return self.count

    def __iter__(self):
        return (self.batch for _ in range(self.count))


def measure(work, settings, repeats):
    # Composer imports its vendor's platform for a logger that is not used here.
    sys.modules.setdefault("mcli", types.ModuleType("mcli"))
    from composer import Callback, Trainer
    from composer.models import ComposerModel

    class Model(ComposerModel):
        def __init__(self):
            super().__init__()
            self.network = models.network(work)

        def forward(self, batch):
            return self.network(batch[0])

        def loss(self, outputs, batch):
            return models.loss_of(outputs, batch[1])

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

    logging.disable(logging.CRITICAL)
    cuda = work["device"].startswith("cuda")
    models.allow(work["dtype"])
    torch.backends.cudnn.benchmark = False
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(work["limit_bytes"] / total)
    clock, model, steps = Clock(), Model(), LEARNING_STEPS + STEADY_STEPS
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        train_dataloader=Repeated(models.samples(work, settings["pinned"]), steps),
        max_duration=f"{steps}ba",
        device_train_microbatch_size="auto",
        device="gpu" if cuda else "cpu",
        precision="fp32",
        callbacks=[clock],
        progress_bar=False,
    )
    trainer.fit()
    size = clock.sizes[-1]
    return {
        "micro_batch": size,
        # Composer halves the size at each failure, starting from the whole mini-batch.
        "failed": (work["batch"] // size).bit_length() - 1,
        "first_step_s": clock.seconds[0],
        "samples_per_s": work["batch"] / statistics.median(clock.seconds[-STEADY_STEPS:]),
        "seconds": clock.seconds[-STEADY_STEPS:],
    }


if __name__ == "__main__":
    contest.run("auto", contestants, measure, works, "mosaicml")

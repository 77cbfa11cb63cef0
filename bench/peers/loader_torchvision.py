"""Images of a folder, read as torchvision's users do: ImageFolder, a DataLoader, and consecutive transforms.

    loader_torchvision.py --like OURS.jsonl [--repeats 3]

Runs the works of `brimful-bench loader`: the same folder, batches, image size and number of workers, which are
processes here. The first pass, in which they start, does not count.
"""

import statistics
import time

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import contest

# Normalisation that torchvision's weights were trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def contestants(work, flags):
    yield "torchvision DataLoader", {}


def measure(work, settings, repeats):
    side = work["image"]
    seen = transforms.Compose([
        transforms.Resize(side * 8 // 7), transforms.RandomCrop(side), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION),
    ])  # fmt: skip
    images = datasets.ImageFolder(work["data"], seen)
    loader = DataLoader(
        images, batch_size=work["batch"], shuffle=True, num_workers=work["workers"], persistent_workers=True
    )
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        brought = sum(len(classes) for _, classes in loader)
        seconds.append(time.perf_counter() - start)
        assert brought == len(images), brought
    warm_up, seconds = seconds[:1], seconds[1:]
    median = statistics.median(seconds)
    return {
        "images": len(images), "images_per_s": len(images) / median, "spread": (max(seconds) - min(seconds)) / median,
        "seconds": seconds, "warm_up_seconds": warm_up,
    }  # fmt: skip


if __name__ == "__main__":
    contest.run("loader", contestants, measure)

"""Micro-batches with the loop that PyTorch users write: slice, copy, forward, weighted loss, backward.

    micro_pytorch.py --like OURS.jsonl [--repeats 5] [--flags compile]

Images on CUDA also run channels last; with the flag `compile` everything also runs through torch.compile, in its
default mode and in reduce-overhead, which uses CUDA graphs.
"""

import torch

import contest
import micro
import models


def contestants(work, flags):
    cuda, images = work["device"].startswith("cuda"), work["model"].startswith(("resnet", "unet"))
    yield "PyTorch loop", {}
    if cuda and images:
        yield "PyTorch loop, channels last", {"channels_last": True}
    if "compile" in flags:
        for mode, name in (("default", "compiled"), ("reduce-overhead", "compiled, reduce-overhead")):
            layout = "channels last, " if images else ""
            yield f"PyTorch loop, {layout}{name}", {"channels_last": images, "compile": mode}


def make_step(work, network, settings):
    """Returns whether gradients stay between steps, and the step."""
    device, batch, mode = work["device"], work["batch"], settings.get("compile")
    channels_last, graphs = settings.get("channels_last"), mode == "reduce-overhead"
    if channels_last:
        network.to(memory_format=torch.channels_last)
    # Includes the loss, so that it is compiled and captured too.
    run = lambda x, y: models.loss_of(network(x), y)  # noqa: E731
    run = torch.compile(run, mode=mode) if mode else run
    if graphs:
        # A replayed backward writes to the captured gradients' addresses: with new gradients in each step it
        # fails ("output of CUDAGraphs has been overwritten by a subsequent run").
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(x, y):
        total = torch.zeros((), device=device)
        for micro_x, micro_y in zip(x.split(work["micro_batch"]), y.split(work["micro_batch"])):
            micro_x = micro_x.to(device, non_blocking=True)
            micro_y = micro_y.to(device, non_blocking=True)
            if channels_last:
                micro_x = micro_x.to(memory_format=torch.channels_last)
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            loss = run(micro_x, micro_y) * (len(micro_x) / batch)
            loss.backward()
            total += loss.detach()
        return total

    return graphs, step


if __name__ == "__main__":
    contest.run("micro", contestants, micro.measure_with(make_step), micro.works)

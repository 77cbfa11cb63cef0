"""Micro-batches by the loop that PyTorch users write: slice, copy, forward, weighted loss, backward.

    --channels-last              images and convolutions with the channels last in memory
    --compile default            the model through torch.compile
    --compile reduce-overhead    the same, replayed as CUDA graphs
"""

import torch

from micro_common import loss_of, measure


def make_step(args, network):
    run = network
    if args.channels_last:
        network.to(memory_format=torch.channels_last)
    if args.compile:
        # As a graph of its own, the loss would be captured too; so it is here.
        run = torch.compile(lambda x, y: loss_of(network, x, y), mode=args.compile)
    graphs = args.compile == "reduce-overhead"
    # Replayed backwards write to where gradients were: with ones that are made anew each step it
    # fails ("output of CUDAGraphs has been overwritten by a subsequent run").
    args.keep_gradients = graphs
    if graphs:
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(x, y):
        total = torch.zeros((), device=args.device)
        for start in range(0, args.batch, args.micro_batch):
            part = slice(start, min(start + args.micro_batch, args.batch))
            micro_x = x[part].to(args.device, non_blocking=True)
            micro_y = y[part].to(args.device, non_blocking=True)
            if args.channels_last:
                micro_x = micro_x.to(memory_format=torch.channels_last)
            if graphs:
                torch.compiler.cudagraph_mark_step_begin()
            loss = run(micro_x, micro_y) if args.compile else loss_of(run, micro_x, micro_y)
            loss = loss * (len(micro_x) / args.batch)
            loss.backward()
            total += loss.detach()
        return total

    return step


def name(args):
    parts = ["PyTorch loop"]
    if args.channels_last:
        parts.append("channels last")
    if args.compile:
        parts.append("compiled" if args.compile == "default" else f"compiled, {args.compile}")
    return ", ".join(parts)


if __name__ == "__main__":
    measure(name, make_step)

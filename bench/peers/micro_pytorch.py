"""Micro-batches by the loop that PyTorch users write: slice, copy, forward, weighted loss, backward."""

import torch

from micro_common import loss_of, measure


def make_step(args, network):
    def step(x, y):
        total = torch.zeros((), device=args.device)
        for start in range(0, args.batch, args.micro_batch):
            part = slice(start, min(start + args.micro_batch, args.batch))
            micro_x = x[part].to(args.device, non_blocking=True)
            micro_y = y[part].to(args.device, non_blocking=True)
            loss = loss_of(network, micro_x, micro_y) * (len(micro_x) / args.batch)
            loss.backward()
            total += loss.detach()
        return total

    return step


if __name__ == "__main__":
    measure("PyTorch loop", make_step)

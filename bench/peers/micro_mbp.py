"""Micro-batches by MBP's decorator."""

import mbp

from micro_common import loss_of, measure


def make_step(args, network):
    @mbp.apply(["x", "y"], ub_size=args.micro_batch, device=args.device)
    def loss(x, y):
        return loss_of(network, x, y)

    return lambda x, y: loss(x=x, y=y)


if __name__ == "__main__":
    measure("MBP", make_step, mbp=mbp.__version__)

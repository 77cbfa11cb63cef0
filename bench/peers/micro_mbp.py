"""Micro-batches with MBP's decorator.

micro_mbp.py --like OURS.jsonl [--repeats 5]
"""

import contest
import micro
import models


def make_step(work, network, settings):
    import mbp

    @mbp.apply(["x", "y"], ub_size=work["micro_batch"], device=work["device"])
    def loss(x, y):
        return models.loss_of(network(x), y)

    return False, lambda x, y: loss(x=x, y=y)


if __name__ == "__main__":
    named = lambda work, flags: [("MBP", {})]  # noqa: E731
    contest.run("micro", named, micro.measure_with(make_step), micro.works, "mbp-pytorch")

"""The data of a plan: the sizes of a step, and batches without values, the longest of which represents all."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, elements_in, map_tensors
from trainapp.data.source import Progress, TrainBatches
from trainapp.torch_private import outside_dispatch_modes

SURVEYED = 256  # number of samples whose shapes are compared, or two micro-batches if that is more
Fake = Callable[[Tensor], Tensor]  # makes a tensor without data from one with data


def planned_config(config: Config, size: int, world: int, all_at_once: bool = False) -> Config:
    """The configuration of a planned step, without features that cost no device memory, or only in the first few steps.

    size: micro-batch size, on one of `world` ranks. A step of many micro-batches peaks in its second one and again in
    all later ones, so two are planned. (Of fewer than three, the second need not be full.) all_at_once: all are
    planned, since each leaves memory for the next.
    """
    whole = config.batch.global_size
    global_size = whole if all_at_once or -(-whole // world) < 3 * size else 2 * size * world
    changes: dict[str, Any] = {
        "batch": dataclasses.replace(
            config.batch,
            global_size=global_size,
            micro_size=size,
            micro_schedule=None,
        ),
        "accumulation": dataclasses.replace(config.accumulation, steps="auto"),
        "data": dataclasses.replace(config.data, num_workers=0),
        "model": dataclasses.replace(config.model, init_from=None),
        "train": dataclasses.replace(config.train, check_loss=False),
        "memory": dataclasses.replace(config.memory, limit=None, timeline=False),
        "updates": [dataclasses.replace(update, every=1) for update in config.updates],  # some step has them all
    }
    return dataclasses.replace(config, mode="train", **changes)


# --- the representative batch


def longest(batches: TrainBatches, size: int) -> MicroBatch | None:
    """The micro-batch of `size` with the most elements among the first SURVEYED samples; None if all are alike. Ignores
    those with fewer samples than the first.
    """

    def steps() -> Iterator[MicroBatch]:
        progress = Progress()
        while progress.epoch == 0:
            yield from batches.micro_batches(progress, [size])
            batches.advance(progress)

    chosen, elements, samples, seen = None, set[int](), 0, 0
    for micro in steps():
        samples = samples or micro.samples
        if micro.samples == samples:
            own = elements_in(micro.data)
            chosen = micro if own > max(elements, default=-1) else chosen
            elements.add(own)
        seen += micro.samples
        if seen >= max(SURVEYED, 2 * samples):
            break
    return chosen if len(elements) > 1 else None


# --- batches without values


def without_values(real: Iterator[MicroBatch], fake: Fake, instead: MicroBatch | None) -> Iterator[MicroBatch]:
    """The micro-batches with shapes only, fetched outside of all modes."""
    while True:
        with outside_dispatch_modes():
            fetched = next(real, None)
        if fetched is None:
            return
        chosen = instead if instead is not None and instead.samples == fetched.samples else fetched

        def piece(start: int, end: int, chosen: MicroBatch = chosen) -> Any:
            with outside_dispatch_modes():
                batch = chosen.piece(start, end)
            return map_tensors(fake, batch)

        yield fetched._replace(data=map_tensors(fake, chosen.data), piece=piece)

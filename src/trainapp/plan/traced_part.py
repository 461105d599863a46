"""What of a run is traced: a few micro-batches, and of those that differ in shape the one that stands for all."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from trainapp.config.schema import Config
from trainapp.data.batch import elements_in
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.progress import Progress
from trainapp.data.step_batches import StepBatches
from trainapp.plan.values import shapes_of

SURVEYED = 256  # samples whose shapes are compared, or two micro-batches of more
Which = Literal["shortest", "longest"]


def planned_config(config: Config, size: int, eval_size: int, world: int, all_at_once: bool = False) -> Config:
    """The configuration of the trace: what costs no memory on the device, or only in a few first steps, is off.

    size, eval_size: of micro-batches, on one of `world` ranks. A step of many micro-batches peaks in its second one, as
    in all later ones: two are traced. (Of less than three, the second one need not be full.) all_at_once: all
    are, since each leaves something for the next.
    """
    whole, parts = config.batch.global_size, config.accumulation.steps
    share = -(-whole // world)
    as_given = parts != "auto" and size == -(-share // parts)
    global_size = whole if as_given or all_at_once or share < 3 * size else 2 * size * world
    changes: dict[str, Any] = {
        "batch": dataclasses.replace(
            config.batch,
            global_size=global_size,
            micro_size="auto" if as_given else size,
            eval_micro_size=eval_size,
            micro_schedule=None,
        ),
        "accumulation": dataclasses.replace(config.accumulation, steps=parts if as_given else "auto"),
        # A logged step computes the metrics, too, and sooner or later every run logs one.
        "every": dataclasses.replace(config.every, log=None if config.every.log is None else 1),
        "loader": dataclasses.replace(config.loader, num_workers=0),
        "model": dataclasses.replace(config.model, init_from=None),
        "train": dataclasses.replace(config.train, check_exactness=False, check_loss=False),
        "memory": dataclasses.replace(config.memory, limit=None, timeline=False),
        "checkpointing": dataclasses.replace(config.checkpointing, save=False),
        "objective": "auto",  # others may be computed from values
        "callbacks": {},  # what they allocate between steps is theirs
        "stopping": dataclasses.replace(config.stopping, patience=None),
        "tracker": {},
        "updates": [dataclasses.replace(update, every=1) for update in config.updates],  # each is in some step
    }
    return dataclasses.replace(config, mode="train", **changes)


def training_shapes(batches: StepBatches, size: int, which: Which) -> MicroBatch | None:
    """See `representative`."""

    def steps() -> Iterator[MicroBatch]:
        progress = Progress()
        while progress.epoch == 0:
            micro_batches = batches.micro_batches(progress, size)
            yield from micro_batches
            batches.advance(progress)

    return representative(steps(), which)


def representative(micro_batches: Iterator[MicroBatch], which: Which) -> MicroBatch | None:
    """The first micro-batch with the most, or the fewest, elements of the first SURVEYED samples; None where all full
    ones have the same shapes.
    """
    first = chosen = next(micro_batches, None)
    if first is None or chosen is None:
        return None
    samples, varies = 0, False
    for micro in itertools.chain([first], micro_batches):
        if micro.samples == first.samples:
            varies = varies or shapes_of(micro.data) != shapes_of(first.data)
            size, best = elements_in(micro.data), elements_in(chosen.data)
            if (size > best) if which == "longest" else (size < best):
                chosen = micro
        samples += micro.samples
        if samples >= max(SURVEYED, 2 * first.samples):
            break
    return chosen if varies else None

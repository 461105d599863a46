"""What of a run is traced: a few micro-batches, and of those that differ in shape the one that stands for all."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch

from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, elements_in, map_tensors, sizes_in, tensors_in
from trainapp.data.progress import Progress
from trainapp.data.source import TrainBatches
from trainapp.planning.values import shapes_of

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


def training_shapes(batches: TrainBatches, size: int, which: Which) -> MicroBatch | None:
    """See `representative`."""

    def steps() -> Iterator[MicroBatch]:
        progress = Progress()
        while progress.epoch == 0:
            micro_batches = batches.micro_batches(progress, size)
            yield from micro_batches
            batches.advance(progress)

    return representative(steps(), which)


def representative(micro_batches: Iterator[MicroBatch], which: Which) -> MicroBatch | None:
    """The first micro-batch with the most, or the fewest, elements of the first SURVEYED samples; where these are
    equal, with the longest string or the highest number beside the tensors. None where all are alike. One that is not
    full counts as if it were: in another order its samples are in a full one.
    """
    first = chosen = next(micro_batches, None)
    if first is None or chosen is None:
        return None
    samples, varies = 0, False
    for micro in itertools.chain([first], micro_batches):
        samples += micro.samples
        if not _are_alike(micro, first):
            varies, full = True, _filled(micro, first.samples)
            size, best = _extent(full), _extent(chosen)
            if (size > best) if which == "longest" else (size < best):
                chosen = full
        if samples >= max(SURVEYED, 2 * first.samples):
            break
    return chosen if varies else None


def _are_alike(micro: MicroBatch, first: MicroBatch) -> bool:
    """Whether their tensors have the same shapes but for the numbers of samples, in whichever dimension these are, and
    whether what else they hold, which a model may take for lengths, is the same.
    """
    if micro.samples == first.samples:
        return shapes_of(micro.data) == shapes_of(first.data) and sizes_in(micro.data) == sizes_in(first.data)
    if not {*sizes_in(micro.data)} <= {*sizes_in(first.data), micro.samples}:
        return False
    pairs = list(itertools.zip_longest(tensors_in(micro.data), tensors_in(first.data)))
    if any(a is None or b is None or a.ndim != b.ndim or a.dtype != b.dtype for a, b in pairs):
        return False
    sizes = [sizes for a, b in pairs for sizes in zip(a.shape, b.shape, strict=True)]
    return all(a == b or a * first.samples == b * micro.samples for a, b in sizes)


def _extent(micro: MicroBatch) -> tuple[Any, ...]:
    """Larger for a micro-batch that presumably needs more."""
    sizes = [size for size in sizes_in(micro.data) if isinstance(size, (int, float)) and size == size]
    return elements_in(micro.data), max(sizes, default=0), sum(sizes)


def _filled(micro: MicroBatch, samples: int) -> MicroBatch:
    """With its samples repeated up to so many. As it is, where they are not in the first dimension of all tensors."""
    if micro.samples == samples or any(t.ndim == 0 or len(t) != micro.samples for t in tensors_in(micro.data)):
        return micro
    rows = torch.arange(samples) % micro.samples

    def piece(start: int, end: int) -> Any:
        return map_tensors(lambda tensor: tensor[rows[start:end].to(tensor.device)], micro.data)

    return micro._replace(data=piece(0, samples), samples=samples, piece=piece)

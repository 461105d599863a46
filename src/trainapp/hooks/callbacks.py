"""Callbacks: a user's code between steps. It may look at the run, write what it likes, and ask for its end.

A callback is an object with any of these methods:

| method | when |
|---|---|
| `after_step(view)` | once per finished optimizer step, after its commit; not for steps that are skipped |
| `after_evaluation(view, metrics)` | after an evaluation, with its numbers and what metrics have computed, by name |
| `on_end(view)` | after the last step of this process, when the checkpoint is written |

They run on every rank, one after the other, with the model in evaluation mode, without gradients. Generators and modes
are restored after them. With `state_dict` and `load_state_dict`, what they keep is in the checkpoints.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from trainapp.errors import UserError
from trainapp.hooks.metrics import logged_name
from trainapp.tracking.tracker import SilentTracker, Tracker

log = logging.getLogger(__name__)
METHODS = ("after_step", "after_evaluation", "on_end")


@dataclass(frozen=True)
class View:
    """What a callback sees of a run.

    step: finished optimizer steps. epoch: that of the coming step, from 0. samples: trained so far, over all ranks.
    model: the one that is trained, with its own weights even where evaluations use those of `train.ema`; not to be
    changed. Under DDP and FSDP every rank must make the same forward.
    tracker: has `scalars(values, step)`, `text(tag, text, step)`, `image(tag, path, step)` and `note(text)`; it writes
    on rank 0 alone.
    waited: seconds that this process has waited for batches. evaluated: the data sets of evaluations by name, "" for
    the data's own split. stop: ends the run after this step, as if it had reached its end; takes the reason, for
    result.json. logged: the step's loss, rates and other metrics where it is one that is logged (`every.log`), else
    empty.
    """

    step: int
    epoch: int
    samples: int
    model: nn.Module
    run_dir: Path
    tracker: Tracker | SilentTracker
    rank: int
    world: int
    waited: float
    evaluated: Mapping[str, Any]
    stop: Callable[[str], None]
    logged: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is the one that should write files."""
        return self.rank == 0

    @property
    def data(self) -> Any:
        """The first data set of evaluations, or None."""
        return next(iter(self.evaluated.values()), None)

    @property
    def labels(self) -> Sequence[str]:
        """The names of its classes, where it has `class_names`; else empty."""
        return labels_of(self.data)

    def computed(self, metric: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """What a metric has computed of each data set: `(name, data set, result)`. None where it has nothing.

        metrics: as `after_evaluation` gets them.
        """
        for name, data in self.evaluated.items():
            yield name, data, metrics.get(logged_name(name, metric))


def labels_of(data: Any) -> Sequence[str]:
    """The names of a data set's classes, where it has `class_names`; else empty."""
    return list(getattr(data, "class_names", None) or ())


@dataclass
class Callbacks:
    """The callbacks of a run, by name, in their order.

    stepped_at: the step for which `after_step` was called last, or at which the run began; None before it begins.
    failure: the message of the error that ends the run, once it is saved.
    """

    by_name: Mapping[str, Any] = field(default_factory=dict)
    stepped_at: int | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        for name, callback in self.by_name.items():
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise UserError(
                    f"callbacks.{name}: a {type(callback).__name__} has none of the methods {', '.join(METHODS)}, so "
                    "that it would never be called"
                )

    def having(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """`(name, method)` of the callbacks that have it."""
        for name, callback in self.by_name.items():
            bound = getattr(callback, method, None)
            if callable(bound):
                yield name, bound

    def close(self) -> None:
        """However the run ends: call `close()` of the callbacks that hold something open."""
        for name, close in self.having("close"):
            try:
                close()
            except Exception:  # the others, and the trackers, are still to be closed
                log.exception("callbacks.%s: close failed", name)

"""What a technique is: a setting that trades something for memory."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from trainapp.config import excludes
from trainapp.config.schema import Config
from trainapp.errors import UserError

RESULTS = ("same", "rounded", "other")  # of the training, from the least change on: see `Technique`


@dataclass(frozen=True)
class Situation:
    """What decides whether a technique applies: the configuration, the model that is built from it, and whether its
    loss is one of the application's own.
    """

    config: Config
    model: nn.Module
    knows_loss: bool


def _no_condition(situation: Situation) -> None:
    """The technique needs nothing of the model."""


@dataclass(frozen=True)
class Technique:
    """A setting that trades something for memory.

    setting: as on the command line; `=N` and `=[NAMES]` stand for values that the user chooses.
    changes: the same, as dotted names of `Config` and their values; empty where the value is the user's.
    saves, costs, applies: for people.
    in_force: whether a configuration has the technique; None: if it has the changes.
    needs: raises UserError for a model that it cannot be applied to. For settings: `config.excludes`.
    helps: whether it would do anything for a configuration that lacks it: only then is it offered.
    is_default: whether it is in force unless the user changes it.
    result: what becomes of the training's result: "same" but for the order of additions, "rounded" (the same algorithm
    in fewer bits), "other": another optimizer, model or task.
    saves_state: whether it saves of what persists between steps, and so before any batch.
    """

    setting: str
    saves: str
    costs: str
    applies: str = "always"
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs: Callable[[Situation], None] = _no_condition
    helps: Callable[[Situation], bool] = lambda situation: True
    in_force: Callable[[Config], bool] | None = None
    is_default: bool = False
    result: Literal["same", "rounded", "other"] = "other"  # the one that no plan proposes unless nothing else fits
    saves_state: bool = False

    def is_set(self, config: Config) -> bool:
        """Whether the configuration has this technique's values."""
        if self.in_force is not None:
            return self.in_force(config)
        return bool(self.changes) and all(_value(config, name) == value for name, value in self.changes.items())

    def sections(self, config: Config) -> dict[str, Any]:
        """The sections of the configuration that the technique changes, for `dataclasses.replace`."""
        changed: dict[str, Any] = {}
        for name, value in self.changes.items():
            section, *path = name.split(".")
            changed[section] = _replaced(changed.get(section, getattr(config, section)), path, value)
        return changed

    @property
    def shows_in_a_trace(self) -> bool:
        """Whether a traced step tells what it saves: none has an allocator, nor checkpoints."""
        return not any(name.startswith(("memory.expandable", "checkpointing.")) for name in self.changes)

    @property
    def is_of_several_ranks(self) -> bool:
        """Whether it changes how the model is spread over them."""
        return any(name.startswith("parallel.") for name in self.changes)

    def suits(self, situation: Situation) -> bool:
        """Whether to offer the technique for a configuration that lacks it."""
        own = situation.config
        if own.updates and any(name.startswith("optimizer.") for name in self.changes):
            return False  # of several optimizers, it would change none that has settings of its own
        with_it = with_techniques(own, [self])
        if not self.helps(situation) or set(excludes.conflicts(with_it)) - set(excludes.conflicts(own)):
            return False
        try:
            self.needs(dataclasses.replace(situation, config=with_it))
        except UserError:
            return False
        return True


def with_techniques(config: Config, techniques: Iterable[Technique]) -> Config:
    """The configuration with the techniques' changes."""
    for technique in techniques:
        config = dataclasses.replace(config, **technique.sections(config))
    return config


def overrides_of(techniques: Iterable[Technique]) -> list[str]:
    """The overrides that set these techniques. Of two that set the same, the later one's."""
    parts = (part for technique in techniques for part in technique.setting.split())
    return list({part.partition("=")[0]: part for part in parts}.values())


def result_of(techniques: Iterable[Technique]) -> str:
    """What becomes of the training's result with all of them."""
    return max((technique.result for technique in techniques), key=RESULTS.index, default="same")


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _replaced(node: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    return dataclasses.replace(node, **{first: _replaced(getattr(node, first), rest, value)})

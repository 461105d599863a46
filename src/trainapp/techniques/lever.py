"""What a lever is: a setting that trades something for memory."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.kinds import MemoryKind

RESULTS = ("same", "rounded", "other")  # of the training, from the least change on: see `Lever`


@dataclass(frozen=True)
class Situation:
    """What decides whether a lever applies: the configuration, the model that is built from it, and whether its loss
    is one of the application's own.
    """

    config: Config
    model: nn.Module
    knows_loss: bool


def _anywhere(situation: Situation) -> None:
    """No condition."""


def _always(situation: Situation) -> bool:
    return True


@dataclass(frozen=True)
class Lever:
    """A setting that trades something for memory.

    setting: as on the command line; `=N` and `=[NAMES]` stand for values that the user chooses.
    changes: the same, as dotted names of `Config` and their values; empty where the value is the user's.
    saves, costs, applies: for the table.
    in_force: whether a configuration has the lever; None: if it has the changes.
    require: raises UserError where the lever does not apply; asked of a configuration that has it.
    helps: whether it would do anything for a configuration that lacks it: only then is it offered.
    is_default: whether it is in force unless the user changes it.
    result: what becomes of the training's result: "same" but for the order of additions, "rounded" (the same algorithm
    in fewer bits), "other": another optimizer, model or task.
    state_saved: `(bytes by kind, config) -> bytes` that persist between steps; None: only a traced step tells.
    shrinks_state: whether it saves of these at all, though only a trace or the user's choice tells how much.
    step_bytes: `model -> bytes` that the optimizer's step allocates in passing, which other optimizers do not.
    """

    setting: str
    saves: str
    costs: str
    applies: str = "always"
    changes: Mapping[str, Any] = field(default_factory=dict)
    require: Callable[[Situation], None] = _anywhere
    helps: Callable[[Situation], bool] = _always
    in_force: Callable[[Config], bool] | None = None
    is_default: bool = False
    result: Literal["same", "rounded", "other"] = "other"  # the one that no plan proposes unless nothing else fits
    state_saved: Callable[[Mapping[MemoryKind, int], Config], int] | None = None
    shrinks_state: bool = False
    step_bytes: Callable[[nn.Module], int] | None = None

    def is_set(self, config: Config) -> bool:
        """Whether the configuration has this lever's values."""
        if self.in_force is not None:
            return self.in_force(config)
        return bool(self.changes) and all(_value(config, name) == value for name, value in self.changes.items())

    def sections(self, config: Config) -> dict[str, Any]:
        """The sections of the configuration that the lever changes, for `dataclasses.replace`."""
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

    def lowers(self, static: Mapping[MemoryKind, int], situation: Situation, activations: int = 0) -> int | None:
        """By how many bytes a run's peak falls, where a trace need not tell: by what persists no more, less what the
        optimizer's step needs beyond `activations`, the most that other phases have and the step has not. May be
        negative; None: only a traced step tells.
        """
        if self.state_saved is None:
            return None
        in_passing = 0 if self.step_bytes is None else self.step_bytes(situation.model)
        return self.state_saved(static, situation.config) - max(0, in_passing - activations)

    def suits(self, situation: Situation) -> bool:
        """Whether to offer the lever for a configuration that lacks it."""
        if situation.config.updates and any(name.startswith("optimizer.") for name in self.changes):
            return False  # of several optimizers, it would change none that has settings of its own
        if not self.helps(situation):
            return False
        try:
            self.require(dataclasses.replace(situation, config=with_levers(situation.config, [self])))
        except UserError:
            return False
        return True


def with_levers(config: Config, levers: Iterable[Lever]) -> Config:
    """The configuration with the levers' changes."""
    for lever in levers:
        config = dataclasses.replace(config, **lever.sections(config))
    return config


def overrides_of(levers: Iterable[Lever]) -> list[str]:
    """The overrides that set these levers. Of two that set the same, the later lever's."""
    return list({part.partition("=")[0]: part for lever in levers for part in lever.setting.split()}.values())


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


def result_of(levers: Iterable[Lever]) -> str:
    """What becomes of the training's result with all of them."""
    return max((lever.result for lever in levers), key=RESULTS.index, default="same")

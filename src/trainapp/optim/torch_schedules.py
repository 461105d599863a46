"""torch's learning-rate schedulers as schedules of this program.

A scheduler changes an optimizer whenever it is stepped. Here it has a stand-in with the same groups, whose rates, and
other options that the scheduler sets, are given to the optimizer when an update is committed: so a step that is rolled
back or skipped does not advance it, and a warm-up can come before it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainapp.errors import UserError

Groups = list[dict[str, Any]]
_NOT_ITS = ("params", "initial_lr", "label")  # keys of a group that no scheduler may change


class _StandIn(torch.optim.Optimizer):
    """An optimizer with the groups of another, at their configured rates, and without its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        groups = [
            {name: value for name, value in group.items() if name not in _NOT_ITS}
            | {"params": [nn.Parameter(torch.zeros(()))], "lr": group["initial_lr"]}
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: schedulers warn where none comes before their own."""


def follows_evaluations(kind: Any) -> bool:
    """Whether a class's `step` needs a metric, as that of ReduceLROnPlateau does."""
    step = getattr(kind, "step", None)
    if not inspect.isclass(kind) or step is None:
        return False
    _, *parameters = inspect.signature(step).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


class TorchSchedule:
    """The schedule of what `make` builds for an optimizer. warmup: steps of a linear warm-up before it.

    It is stepped once per applied step after the warm-up, or once per evaluation where its `step` takes a metric.
    name: for messages. Raises UserError for what is no scheduler.
    """

    def __init__(
        self, make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer, warmup: int, name: str
    ):
        self._warmup, self._steps = warmup, 0
        self._initial = [group["initial_lr"] for group in optimizer.param_groups]
        self._stand_in = _StandIn(optimizer)
        self._set: set[str] = {"lr"}  # options that the scheduler has ever set; the others may be the optimizer's own
        with self._noted():
            self._scheduler = make(self._stand_in)
        if not isinstance(self._scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise UserError(
                f"schedule._target_={name}: with a parameter `optimizer`, it must be one of torch's schedulers or "
                f"return one, not a {type(self._scheduler).__name__}"
            )
        self.follows_evaluations = follows_evaluations(type(self._scheduler))

    def set_rates(self, groups: Groups, step: int) -> None:
        """See `schedules.Schedule`. Steps the scheduler for the steps that were applied since the last call."""
        while not self.follows_evaluations and self._steps < step - self._warmup:
            with self._noted():
                self._scheduler.step()
            self._steps += 1
        factor = (step + 1) / self._warmup if step < self._warmup else 1.0
        for group, own in zip(groups, self._stand_in.param_groups, strict=True):
            group.update({name: own[name] for name in self._set if name in group})
            group["lr"] = own["lr"] * factor

    def evaluated(self, objective: float) -> None:
        """See `schedules.Schedule`."""
        if self.follows_evaluations:
            with self._noted():
                self._scheduler.step(objective)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, and what it has set in the groups."""
        groups = [{name: own[name] for name in sorted(self._set)} for own in self._stand_in.param_groups]
        return {
            "scheduler": self._scheduler.state_dict(),
            "steps": self._steps,
            "groups": groups,
            "initial": self._initial,
            "class": type(self._scheduler).__name__,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue. The scheduler's settings, which are its constructor's parameters, stay those of the configuration;
        where `optimizer.lr` has changed since, the rates change in proportion. The state of another class of schedulers
        is ignored. Raises ValueError for another number of groups.
        """
        if state["class"] != type(self._scheduler).__name__:
            return
        if len(state["groups"]) != len(self._initial):
            raise ValueError(f"a schedule of {len(state['groups'])} parameter groups instead of {len(self._initial)}")
        settings = inspect.signature(type(self._scheduler)).parameters.keys() - {"last_epoch"}
        kept = {name: value for name, value in self._scheduler.state_dict().items() if name in settings}
        base = getattr(self._scheduler, "base_lrs", [])
        self._scheduler.load_state_dict(state["scheduler"] | kept | ({"base_lrs": base} if base else {}))
        self._steps = state["steps"]
        for own, saved, before, now in zip(
            self._stand_in.param_groups, state["groups"], state["initial"], self._initial, strict=True
        ):
            own.update(saved)
            own["lr"] = saved["lr"] if before == now else now * (saved["lr"] / before)
            self._set |= saved.keys()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Around a step of the scheduler: notes the options that it sets. Raises UserError for its ValueError, such as
        that of OneCycleLR beyond its last step.
        """
        before = [dict(group) for group in self._stand_in.param_groups]
        self._stand_in.step()
        try:
            yield
        except ValueError as error:
            raise UserError(f"schedule: {error}") from error
        for own, was in zip(self._stand_in.param_groups, before, strict=True):
            self._set |= {n for n, value in own.items() if n in was and n not in _NOT_ITS and value != was[n]}

"""torch's learning-rate schedulers as schedules of this program.

A scheduler changes an optimizer whenever it is stepped. Here it has a stand-in with the same groups, and the rates of a
step are those of the stand-in after as many steps: a function of the number of applied steps again. A resumed run steps
the stand-in as often as the run has, which takes some microseconds per step. Those that follow evaluations instead,
such as ReduceLROnPlateau, have a state, which a checkpoint holds.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainapp.errors import UserError
from trainapp.optim.value_snapshot import fingerprint

Groups = list[dict[str, Any]]
Make = Callable[[torch.optim.Optimizer], Any]
_NOT_ITS = ("params", "initial_lr", "label")  # keys of a group that no scheduler may change
_CHANGEABLE = (list, dict)  # of options, those that can change in place


class StandIn(torch.optim.Optimizer):
    """An optimizer with the groups and defaults of another, and without its parameters: its steps do nothing.

    built: each group's options as they were built; None: as they are now. set_options: for each group, the names of the
    options beside the rate that the scheduler has set so far. From then on each is the scheduler's, also where it sets
    it back to what it was.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, built: Groups | None = None, set_options: list[set[str]] | None = None
    ):
        defaults = dict(optimizer.defaults)
        groups = [
            {name: _own(value) for name, value in (group | before).items() if name not in _NOT_ITS}
            | {"params": [nn.Parameter(torch.zeros(()))], "lr": group["initial_lr"]}
            for group, before in zip(optimizer.param_groups, built or [{} for _ in optimizer.param_groups], strict=True)
        ]
        super().__init__(groups, defaults)
        self.set_options = set_options or [set() for _ in groups]
        # The values themselves, whose identity tells an option that was set, and copies of those that can change.
        self._built = [{name: (value, _own(value)) for name, value in g.items()} for g in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: schedulers warn where none comes before their own."""

    def note_set_options(self) -> None:
        """Call after every step of the scheduler: an option may be back at its first value later."""
        for own, built, names in zip(self.param_groups, self._built, self.set_options, strict=True):
            for name, value in own.items():
                if name in names or name == "lr" or name in _NOT_ITS or name not in built:
                    continue
                first, was = built[name]
                if value is not first or (type(value) in _CHANGEABLE and value != was):
                    names.add(name)

    def give_to(self, groups: Groups) -> None:
        """Put the rate, and what other options the scheduler has ever set, into the groups of the other optimizer.

        Not the others: an optimizer may keep numbers of its own there.
        """
        self.note_set_options()
        for own, names, group in zip(self.param_groups, self.set_options, groups, strict=True):
            group.update({name: _own(own[name]) for name in ("lr", *names) if name in group})


def _own(value: Any) -> Any:
    """A copy of an option that can change in place."""
    return copy.deepcopy(value) if type(value) in _CHANGEABLE else value


def of(
    make: Make, optimizer: torch.optim.Optimizer, warmup: int, name: str, built: Groups | None = None
) -> "ByStep | ByEvaluation":
    """The schedule of what `make` builds for an optimizer. warmup: steps of a linear warm-up before it.

    name: for messages. built: see `StandIn`. Raises UserError for what is no scheduler.
    """
    scheduler = make(StandIn(optimizer))
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise UserError(
            f"schedule._target_={name}: with a parameter `optimizer`, it must be one of torch's schedulers or return "
            f"one, not a {type(scheduler).__name__}"
        )
    if follows_evaluations(type(scheduler)):
        return ByEvaluation(make, optimizer, warmup, built)
    return ByStep(make, optimizer, warmup, built)


def follows_evaluations(kind: Any) -> bool:
    """Whether a class's `step` needs a metric."""
    step = getattr(kind, "step", None)
    if not inspect.isclass(kind) or step is None:
        return False
    _, *parameters = inspect.signature(step).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@contextlib.contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # OneCycleLR, beyond its last step
        raise UserError(f"schedule: {error}") from error


class _Warmed:
    """The linear warm-up, on top of what the stand-in says."""

    def __init__(self, make: Make, optimizer: torch.optim.Optimizer, warmup: int, built: Groups | None):
        self._make, self._warmup, self._optimizer = make, warmup, optimizer
        self._options = built or [  # as they are now, since it will change them
            {name: _own(value) for name, value in group.items() if name not in (*_NOT_ITS, "lr")}
            for group in optimizer.param_groups
        ]
        self._set_options: list[set[str]] = [set() for _ in optimizer.param_groups]
        self._begin()

    def _begin(self) -> None:
        self._stand_in = StandIn(self._optimizer, self._options, self._set_options)
        self._scheduler = self._make(self._stand_in)
        self._steps = 0

    def _give(self, groups: Groups, step: int) -> None:
        self._stand_in.give_to(groups)
        if step < self._warmup:
            for group in groups:
                group["lr"] *= (step + 1) / self._warmup


class ByStep(_Warmed):
    """A scheduler that is stepped after every applied step: a function of their number."""

    def set_rates(self, groups: Groups, step: int) -> None:
        """See `schedules.Schedule`."""
        after = max(0, step - self._warmup)
        if after < self._steps:
            self._begin()
        with _errors_named():
            while self._steps < after:
                self._stand_in.step()
                self._scheduler.step()
                self._stand_in.note_set_options()
                self._steps += 1
        self._give(groups, step)

    def evaluated(self, objective: float) -> None:
        """It follows no evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """None: it is stepped again."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """None."""


class ByEvaluation(_Warmed):
    """A scheduler that is stepped after every evaluation, with its objective."""

    def _begin(self) -> None:
        super()._begin()
        self._built = {name: fingerprint(value) for name, value in self._scheduler.state_dict().items()}

    def set_rates(self, groups: Groups, step: int) -> None:
        """See `schedules.Schedule`."""
        self._give(groups, step)

    def evaluated(self, objective: float) -> None:
        """Step it."""
        self._stand_in.step()
        with _errors_named():
            self._scheduler.step(objective)
        self._stand_in.note_set_options()

    def state_dict(self) -> dict[str, Any]:
        """What has changed since it was built, so that its settings stay those of the configuration; and the rates and
        other options that it has set.
        """
        state = {
            name: value
            for name, value in self._scheduler.state_dict().items()
            if name not in self._built or self._built[name] != fingerprint(value)
        }
        groups, own_groups = self._optimizer.param_groups, self._stand_in.param_groups
        return {
            "scheduler": state,
            "rates": [group["lr"] for group in own_groups],
            "initial": [group["initial_lr"] for group in groups],
            "options": [
                {name: own[name] for name in sorted(names)}
                for own, names in zip(own_groups, self._set_options, strict=True)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue. Where `optimizer.lr` has changed since, the rates change in proportion.

        Raises ValueError for another number of groups.
        """
        groups = self._optimizer.param_groups
        if len(state["rates"]) != len(groups):
            raise ValueError(f"a schedule of {len(state['rates'])} parameter groups instead of {len(groups)}")
        self._begin()
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), **state["scheduler"]})
        for own, group, rate, initial in zip(
            self._stand_in.param_groups, groups, state["rates"], state["initial"], strict=True
        ):
            own["lr"] = rate if initial == group["initial_lr"] else group["initial_lr"] * (rate / initial)
        for own, names, options in zip(
            self._stand_in.param_groups, self._set_options, state.get("options", []), strict=False
        ):
            own.update(options)
            names |= options.keys()  # one may have its first value again
        self._stand_in.note_set_options()

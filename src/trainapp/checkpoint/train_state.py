"""The state of a run between two steps, as saved in checkpoints."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint import optimizer_state, state_dicts
from trainapp.checkpoint.plain_values import decoded, digest, encoded
from trainapp.checkpoint.sample_rows import SampleRows
from trainapp.checkpoint.shards import Sizes
from trainapp.checkpoint.state_dicts import ModelState
from trainapp.data.progress import EVERY_STEP, Cadence, Progress
from trainapp.errors import UserError
from trainapp.models import adapters
from trainapp.optim.ema import WeightAverage
from trainapp.optim.precision import Precision
from trainapp.optim.schedules import Schedule
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.state.attributes import Attributes
from trainapp.state.stateful import Stateful
from trainapp.units import listed

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Update:
    """The parameters, optimizer and schedule of one update. A step has one, or several in turn: see `updates`."""

    optimizer: torch.optim.Optimizer
    precision: Precision  # with the update's own loss scale
    name: str = ""  # empty for a step's only update
    parameters: list[nn.Parameter] = field(default_factory=list)  # those it trains
    schedule: Schedule = field(default_factory=Schedule)  # of its learning rates
    number: int = 0  # its index in the step
    cadence: Cadence = EVERY_STEP  # the steps that have it
    # Options of the newly built groups: later differences are state, not configuration.
    built_options: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.built_options = optimizer_state.group_options(self.optimizer)

    def named(self, metric: str) -> str:
        """Return a metric's name in the log, with the update's name if there are several."""
        return f"{self.name}/{metric}" if self.name else metric


@dataclass
class TrainState:
    """Exactly the state that a resume needs. State between the updates of a step is never saved."""

    model: nn.Module
    updates: list[Update]
    average: WeightAverage
    device: torch.device
    seed: int
    keeps_gradients: bool = True  # until the update; False with `optimizer.in_backward`
    progress: Progress = field(default_factory=Progress)
    data_samples: int = 0  # size of the training data in which `progress.epoch` and `consumed` are counted
    data_order: str = "permutation"  # the order in which they are counted: `Source.order_name`
    class_names: list[str] = field(default_factory=list)  # the training data's class names, if any
    vocabulary: str = ""  # digest of the training data's tokenizer, if any
    # The model's sizes that the data determine: see `Resources`.
    filled: Mapping[str, Any] = field(default_factory=dict)
    stateful: Stateful = field(default_factory=Stateful)  # owners of state other than tensors
    model_state: ModelState = field(init=False)
    sample_rows: SampleRows = field(init=False)
    attributes: Attributes = field(init=False)

    def __post_init__(self) -> None:
        self.model_state = ModelState(self.model)
        self.sample_rows = SampleRows(self.model)
        optimizers = {}
        for update in self.updates:
            optimizers[update.named("optimizer")] = update.optimizer
        self.attributes = Attributes(self.stateful, optimizers)
        self.cadences = tuple(update.cadence for update in self.updates)

    @property
    def first_steps(self) -> int:
        """The number of steps after which each update has been made once."""
        return max(cadence.first_step for cadence in self.cadences)

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and modules found elsewhere, such as a teacher in a task."""
        return [self.model, *self.stateful.modules.values()]

    @property
    def update(self) -> Update:
        """The coming update, or the one in progress."""
        return self.updates[self.progress.update]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The current update's optimizer."""
        return self.update.optimizer

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of all updates."""
        return [update.optimizer for update in self.updates]

    @property
    def precision(self) -> Precision:
        """The current update's precision; all have the same autocast."""
        return self.update.precision

    def _by_update(self, values: list[Any]) -> Any:
        """Return the values of all updates as a checkpoint has them: by name, or without one if there is only one."""
        if not self.updates[0].name:
            return values[0]
        return {update.name: value for update, value in zip(self.updates, values, strict=True)}

    def _with_saved(self, saved: Any) -> list[tuple[Update, Any]]:
        """Return each update with its value in `saved`, a result of `_by_update`."""
        if not self.updates[0].name:
            return [(self.updates[0], saved)]
        return [(update, saved[update.name]) for update in self.updates]

    def tensors(self, values: dict[str, Any] | None = None, sizes: Sizes | None = None) -> dict[str, Any]:
        """Return model, optimizer and average by parameter name: the tensors themselves, whole or sharded.

        Args:
            values: the values saved with them; None: this rank's.
            sizes: shapes and dtypes of the tensors in a checkpoint, if it is to be read into these after `follow`.
        """
        if values:
            model_values = values["model_values"]
        else:
            model_values = self.model_state.values(SingleRank())
        of_optimizers = [optimizer_state.optimizer_tensors(self.model, optimizer) for optimizer in self.optimizers]
        tensors = {
            "model": self.model_state.tensors(model_values),
            "buffers": self.model_state.buffers(sizes),
            "optimizer": self._by_update(of_optimizers),
        }

        # The average, unless the checkpoint that is read has none.
        average = dict(zip(self.average.names, self.average.averages, strict=True))
        is_saved = sizes is None or any(name.startswith("average.") for name in sizes)
        if average and is_saved:
            tensors["average"] = average
        return tensors

    def values(self, ranks: Ranks) -> dict[str, Any]:
        """Return everything except `tensors`: plain values and small tensors. Collective.

        Raises UserError for a value that a checkpoint cannot hold.
        """
        base = adapters.base_of(self.model)
        base_digest = None
        if base is not None:
            base_digest = base.digest
        return {
            "scaler": self._by_update([update.precision.scaler.state_dict() for update in self.updates]),
            "progress": dataclasses.asdict(self.progress),
            "stateful": self._stateful_values(ranks),
            "average_step": self.average.step,
            "sampler": {
                "seed": self.seed,
                "epoch": self.progress.epoch,
                "consumed": self.progress.consumed,
                "samples": self.data_samples,
                "order": self.data_order,
            },
            "base": base_digest,
            "model_values": self.model_state.values(ranks),
            "optimizer_values": self._by_update([self._optimizer_values(update) for update in self.updates]),
            "updates": [update.name for update in self.updates],
            "class_names": self.class_names,
            "vocabulary": self.vocabulary,
            "filled": {setting: str(value) for setting, value in self.filled.items()},
            "schedule": self._by_update([schedule_values(update) for update in self.updates]),
        }

    def _stateful_values(self, ranks: Ranks) -> list[dict[str, Any]]:
        """Return the states of other owners, by rank; only once if equal on all. Raises UserError on all ranks."""
        # No rank may leave before the others: a problem is exchanged with the digests.
        states = {}
        problem = ""
        try:
            states = state_dicts.stateful_values(self.stateful)
        except UserError as error:
            problem = f"the checkpoint cannot be written: {error}"
        by_rank = ranks.all_gather_object((problem, digest(states)))
        problems = [text for text, _ in by_rank if text]
        if problems:
            raise UserError(problems[0])

        # Equal ones are saved once.
        are_equal = len(set(by_rank)) == 1
        if are_equal:
            return [states]
        return ranks.all_gather_object(states)

    def _optimizer_values(self, update: Update) -> dict[str, Any]:
        return optimizer_state.optimizer_values(self.model, update.optimizer, update.built_options)

    def not_saved(self) -> list[str]:
        """Return the names of changes by training that a checkpoint does not hold: tensors that are left out of the
        states of the model and of other modules, and attributes of the model, tasks and optimizers.
        """
        return self.model_state.left_out() + self.stateful.left_out() + self.attributes.changed()

    def follow(self, saved: dict[str, Any], sizes: Sizes) -> None:
        """Allocate memory for the saved tensors, before they are read into `tensors`.

        Raises UserError if the updates, the optimizers, the class names or the tokenizer differ, and for adapters that
        were trained on another base.

        Args:
            saved: the `values` stored with them.
            sizes: shapes and dtypes of the saved tensors.
        """
        # Refuse another experiment.
        adapters.require_same_base(self.model, saved["base"])
        names = [update.name for update in self.updates]
        if names != saved["updates"]:
            saved_updates = _updates_text(saved["updates"])
            raise UserError(f"it was saved with {saved_updates}, but this run has {_updates_text(names)}")
        require_same_data(self.class_names, self.vocabulary, saved)

        # The model's tensors exist; an optimizer's only after its first step.
        for update, values in self._with_saved(saved["optimizer_values"]):
            prefix = f"optimizer.{update.name}" if update.name else "optimizer"
            optimizer_state.prepare_optimizer(self.model, update.optimizer, values, sizes, prefix)

    def load_values(self, saved: dict[str, Any]) -> None:
        """Continue from `saved`, the `values` of a run on any number of ranks, after the tensors are filled. Does not
        include `load_stateful`.
        """
        self.model_state.load_values(saved["model_values"])
        for update, scaler in self._with_saved(saved["scaler"]):
            if update.precision.scaler.is_enabled() and scaler:
                update.precision.scaler.load_state_dict(scaler)
        for update, schedule in self._with_saved(saved["schedule"]):
            if schedule and update.schedule.state_dict():  # both are torch's
                update.schedule.load_state_dict(decoded(schedule))
        self.progress = Progress(**saved["progress"])
        self.average.step = saved["average_step"]

    def load_stateful(self, saved: list[dict[str, Any]], ranks: Ranks) -> None:
        """Restore the states of other owners, by rank or one for all. Errors of their methods are raised unchanged."""
        has_state_per_rank = len(saved) == ranks.world_size
        if not has_state_per_rank and len(saved) != 1:
            log.warning(
                "the checkpoint was written by %d ranks, with different states of %s: all %d continue with rank 0's",
                len(saved),
                ", ".join(saved[0]),
                ranks.world_size,
            )

        # A callback may have been removed since; any other state should have an owner on both sides.
        states = saved[0]
        if has_state_per_rank:
            states = saved[ranks.rank]
        unmatched = []
        for name in state_dicts.load_stateful(self.stateful, states):
            is_removed_callback = name.startswith("callbacks.") and name not in self.stateful.owners
            if not is_removed_callback:
                unmatched.append(name)
        if unmatched:
            log.warning(
                "only the checkpoint or only this run has a state of %s: it starts from its initial state",
                ", ".join(unmatched),
            )


def schedule_values(update: Update) -> Any:
    """Return the state of an update's schedule as a checkpoint holds it. Raises UserError for one that it cannot."""
    return encoded(update.schedule.state_dict(), "the schedule's state")


def _updates_text(names: list[str]) -> str:
    if not any(names):
        return "one optimizer"
    return f"the updates {', '.join(names)}"


def changed_sizes(filled: Mapping[str, Any], saved: dict[str, Any]) -> str:
    """Return what may explain other shapes than in a checkpoint with the values `saved`: sizes that the data determine,
    now and then. Empty if there is nothing to say.
    """
    now = {setting: str(value) for setting, value in filled.items()}

    # Without this key: by a version that filled in only the model's own parameters, such as `model.num_classes`.
    if "filled" not in saved:
        nested = [f"{setting}={value}" for setting, value in now.items() if setting.count(".") > 1]
        if not nested:
            return ""
        rule = "it was saved by a version that left nested `_target_`s at their defaults: set the sizes they had then"
        return f"; the data determine {listed(nested)}, but {rule}"

    # A size that only one side has was set by hand on the other.
    before = saved["filled"]
    changes = []
    for setting in sorted(now.keys() | before.keys()):
        value = now.get(setting, "set")
        value_before = before.get(setting, "set")
        if now.get(setting) != before.get(setting):
            changes.append(f"{setting} is {value} (was {value_before})")
    if not changes:
        return ""
    return f"; of the sizes that the data determine, {listed(changes)}"


def require_same_data(class_names: Sequence[str], vocabulary: str, saved: dict[str, Any]) -> None:
    """Raise UserError if inputs or outputs have another meaning than in `saved`, the values of a checkpoint. Class
    names, or a tokenizer's digest, that only one side has are ignored.
    """
    before = saved["class_names"]
    now = [str(name) for name in class_names]
    if before and now and before != now:
        changed = [f"{old} (now {new})" for old, new in zip(before, now, strict=False) if old != new]
        if not changed:  # one list is the beginning of the other
            changed = [f"{len(before)}, now {len(now)}"]
        raise UserError(
            f"the data's class names have changed since it was saved: {listed(changed)}; restore the folders "
            "or the names, or start a new run from its weights with model.init_from=RUN"
        )
    if vocabulary and saved["vocabulary"] and vocabulary != saved["vocabulary"]:
        raise UserError(
            "the data's tokenizer has changed since it was saved (a tokenizer trained on the data depends on it); set "
            "data.tokenizer=FOLDER to the run's own, which mode=export writes"
        )

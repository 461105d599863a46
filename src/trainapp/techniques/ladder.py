"""The ladder: techniques that a run turns on by itself, one after the other, when no micro-batch fits.

Only techniques that leave the result the same. Each climb begins a new session, with all that is turned on so far. What
the user sets on the command line stays as it is.
"""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainapp.config.schema import Config
from trainapp.memory.live_tensors import Category
from trainapp.techniques.catalogue import TECHNIQUES, Situation, Technique, available, overrides_of, with_techniques
from trainapp.techniques.savings import Savings, Shortage
from trainapp.units import listed

LOSS_CHUNK = "memory.loss_chunk=auto"
# The cheapest first: recomputing costs less time than copies to the host, except for those of a block's inputs.
LADDER = (
    "activation_checkpointing=selective",
    "activation_checkpointing=full",
    LOSS_CHUNK,
    "memory.offload_activations=inputs activation_checkpointing=full",
    "memory.offload_activations=all",
    "optimizer.offload=true",
)
# Keys in checkpoints and in restart.json.
TURNED_ON = "turned_on"
CLIMB = "climb"
_OF_THIS_RUN = ("hydra.run.dir=", "checkpointing.resume=")  # settings of a command
LEAST_SHARE = 0.05  # of what is missing: a technique that saves less is not turned on


@dataclass(frozen=True)
class TurnedOn:
    """The techniques that a run has turned on by itself.

    Attributes:
        settings: those in force, as on the command line.
        by_attempt: the settings in force over the whole run, by the number of the first attempt that used them.
        tried: the settings of all that were turned on, also of those that others have replaced: none a second time.
        refused: settings that the model cannot be trained with.
        memory: in words, the memory that they were turned on for: with another one they may not be needed.
    """

    settings: tuple[str, ...] = ()
    by_attempt: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    tried: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    memory: str = ""

    def with_technique(self, technique: str) -> "TurnedOn":
        """Return these with another technique, by its setting."""
        settings = settings_with(self.settings, technique)
        return dataclasses.replace(self, settings=settings, tried=(*self.tried, technique))

    def recorded(self, attempt: int) -> "TurnedOn":
        """Return these with the settings in force from an attempt on, unless they were in force before."""
        by_attempt = {first: settings for first, settings in self.by_attempt.items() if first < attempt}
        last = by_attempt[max(by_attempt)] if by_attempt else ()
        if last != self.settings:
            by_attempt[attempt] = self.settings
        return dataclasses.replace(self, by_attempt=by_attempt)

    def history(self, command: str) -> list[dict[str, Any]]:
        """Return what was turned on by attempt, for result.json: each with the command that trains so from the start.

        Args:
            command: the run's.
        """
        entries = []
        for attempt, settings in self.by_attempt.items():
            overrides = overrides_turned_on(settings)
            # In a directory of its own, since this one has the run's checkpoints.
            words = [word for word in shlex.split(command) if not word.startswith(_OF_THIS_RUN)]
            words += [*overrides.split(), "oom.techniques=none"]
            entries.append({"attempt": attempt, "settings": overrides, "command": shlex.join(words)})
        return entries

    def checkpoint_entry(self) -> dict[str, Any]:
        """Return the entry of a checkpoint or of restart.json; empty if nothing was ever turned on."""
        if not (self.settings or self.by_attempt):
            return {}
        return {TURNED_ON: self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "settings": list(self.settings),
            "by_attempt": {attempt: list(settings) for attempt, settings in self.by_attempt.items()},
            "tried": list(self.tried),
            "refused": list(self.refused),
            "memory": self.memory,
        }

    @classmethod
    def of_state_dict(cls, state: Mapping[str, Any]) -> "TurnedOn":
        """Return what a `state_dict` describes, whose keys may be strings, as in JSON."""
        by_attempt = {int(attempt): tuple(settings) for attempt, settings in state.get("by_attempt", {}).items()}
        return cls(
            tuple(state.get("settings", ())),
            by_attempt,
            tuple(state.get("tried", ())),
            tuple(state.get("refused", ())),
            state.get("memory", ""),
        )


@dataclass(frozen=True)
class Climb:
    """One more technique that is turned on, in a new session that has not made a step with it yet.

    Attributes:
        technique: its setting.
        turned_on_before: the techniques that were turned on before.
        alternatives: the settings of those that may be turned on instead if the model refuses it, the best first.
        first_size: the micro-batch size with which the search begins anew.
        samples_per_second: of the session before; None if it has made no step.
        message: what the user reads if the model refuses all of them.
    """

    technique: str
    turned_on_before: TurnedOn
    alternatives: tuple[str, ...]
    first_size: int
    samples_per_second: float | None
    message: str

    @property
    def text(self) -> str:
        """What is different in the new session, in words."""
        other_settings = [setting for setting in self.turned_on.settings if setting != self.technique]
        text = f"{self.technique} turned on"
        if other_settings:
            text += f" beside {overrides_turned_on(other_settings)}"
        return f"{text} (oom.techniques=same: the result stays the same), micro-batch {self.first_size}"

    @property
    def turned_on(self) -> TurnedOn:
        """All techniques that are turned on, with this one."""
        return self.turned_on_before.with_technique(self.technique)

    @property
    def recomputes(self) -> bool:
        """Whether the technique is activation checkpointing, which concerns the model alone."""
        return _recomputes(self.technique)

    def after_refusal(self) -> "Climb | None":
        """Return a climb with another technique than this one, which the model has refused; None without any left."""
        if not self.alternatives:
            return None
        refused = (*self.turned_on_before.refused, self.technique)
        return dataclasses.replace(
            self,
            technique=self.alternatives[0],
            alternatives=self.alternatives[1:],
            turned_on_before=dataclasses.replace(self.turned_on_before, refused=refused),
        )

    def message_after_refusal(self, refusal: str) -> str:
        """Return what the user reads when the model has refused this technique, too, and none is left.

        Args:
            refusal: the error.
        """
        refused = listed((*self.turned_on_before.refused, self.technique))
        return f"{self.message}\nTurned on by the run, but refused by the model: {refused} ({refusal})."

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for restart.json."""
        state = dataclasses.asdict(self)
        state["turned_on_before"] = self.turned_on_before.state_dict()
        state["alternatives"] = list(self.alternatives)
        return state

    @classmethod
    def of_state_dict(cls, state: Mapping[str, Any]) -> "Climb":
        """Return what a `state_dict` describes."""
        turned_on_before = TurnedOn.of_state_dict(state["turned_on_before"])
        alternatives = tuple(state["alternatives"])
        return cls(**{**state, "turned_on_before": turned_on_before, "alternatives": alternatives})


def techniques_of(settings: Iterable[str]) -> list[Technique]:
    """Return the techniques with these settings, in this order."""
    by_setting = {technique.setting: technique for technique in TECHNIQUES}
    return [by_setting[setting] for setting in settings if setting in by_setting]


def with_turned_on(config: Config, settings: Iterable[str]) -> Config:
    """Return the configuration with techniques that were turned on, except for what the command line sets."""
    techniques = techniques_of(not_chosen(settings, config))
    changed = with_techniques(config, techniques)
    checkpointing = changed.activation_checkpointing
    if checkpointing.mode != config.activation_checkpointing.mode:  # the modes that `auto` has chosen no longer apply
        checkpointing = dataclasses.replace(checkpointing, modes=None)
        changed = dataclasses.replace(changed, activation_checkpointing=checkpointing)
    return changed


def not_chosen(settings: Iterable[str], config: Config) -> tuple[str, ...]:
    """Return the settings of techniques without those that the command line sets itself."""
    return tuple(one.setting for one in techniques_of(settings) if not _is_chosen(one, config))


def recomputing() -> tuple[str, ...]:
    """Return the settings on the ladder that recompute a forward."""
    return tuple(setting for setting in LADDER if _recomputes(setting))


def _recomputes(setting: str) -> bool:
    return "activation_checkpointing=" in setting


def overrides_turned_on(settings: Iterable[str]) -> str:
    """Return techniques that were turned on, as on the command line."""
    return " ".join(overrides_of(techniques_of(settings)))


def settings_with(settings: Iterable[str], new_setting: str) -> tuple[str, ...]:
    """Return the settings of techniques with another one, which replaces those that set nothing else."""
    (new,) = techniques_of([new_setting])
    remaining = []
    for technique in techniques_of(settings):
        is_replaced = technique.changes.keys() <= new.changes.keys()
        if not is_replaced:
            remaining.append(technique.setting)
    return (*remaining, new.setting)


def next_techniques(situation: Situation, shortage: Shortage, excluded: Collection[str] = ()) -> list[str]:
    """Return the settings of the techniques that may be turned on next, the best first; none if they cannot help.

    First those that may save all that is missing, the cheapest first; then the others, the largest first. Where logits
    are most of the activations, the loss in chunks is the best.

    Args:
        situation: of the run.
        shortage: what filled memory.
        excluded: settings that were tried.
    """
    savings_by_setting: dict[str, Savings] = {}
    for technique in available(situation):
        is_candidate = technique.setting in LADDER and technique.setting not in excluded
        if not is_candidate or _is_chosen(technique, situation.config):
            continue
        savings = technique.savings(situation, shortage)
        if sum(savings.values()) > LEAST_SHARE * shortage.missing:
            savings_by_setting[technique.setting] = savings
    if _largest_saving(savings_by_setting.values(), shortage) < shortage.missing:
        return []

    saved_by_setting = {setting: sum(savings.values()) for setting, savings in savings_by_setting.items()}
    enough = [setting for setting in LADDER if saved_by_setting.get(setting, 0) >= max(shortage.missing, 1)]
    if LOSS_CHUNK in enough and _logits_dominate(saved_by_setting[LOSS_CHUNK], shortage):
        enough.remove(LOSS_CHUNK)
        enough.insert(0, LOSS_CHUNK)
    not_enough = [setting for setting in saved_by_setting if setting not in enough]
    not_enough.sort(key=lambda setting: -saved_by_setting[setting])
    return [*enough, *not_enough]


def _largest_saving(savings_of_each: Iterable[Savings], shortage: Shortage) -> float:
    """Return the bytes that several techniques save together at most: of each category not more than it held."""
    saved_by_category: Counter[Category] = Counter()
    for savings in savings_of_each:
        saved_by_category.update(savings)
    largest = float(shortage.requested)
    for category, saved in saved_by_category.items():
        largest += min(saved, shortage.of(category))
    return largest


def _logits_dominate(saved_by_chunks: float, shortage: Shortage) -> bool:
    """Return whether logits are more than half of the activations, by what the loss in chunks saves."""
    activations = shortage.of(Category.ACTIVATIONS) + shortage.requested
    return saved_by_chunks > activations / 2


def _is_chosen(technique: Technique, config: Config) -> bool:
    """Return whether the command line sets what the technique would. `activation_checkpointing=auto` leaves the blocks'
    modes to the program.
    """
    names = [override.partition("=")[0] for override in technique.setting.split()]
    if config.activation_checkpointing.mode == "auto":
        names = [name for name in names if name != "activation_checkpointing"]
    return any(config.chooses(name) for name in names)

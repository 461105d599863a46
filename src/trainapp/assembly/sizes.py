"""Sizes of the model that the user has set, compared with those that the data's `spec` knows."""

import logging
from typing import Any

from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.config.schema import Config
from trainapp.config.targets import Spec, Written
from trainapp.errors import UserError
from trainapp.losses.losses import classification, next_token, unchecked

CONTEXT = "context_length"
log = logging.getLogger(__name__)


def compare_sizes(config: Config, targets: ResolvedTargets, spec: Spec) -> None:
    """Log the model's sizes that differ from the data's, one line each. Raises UserError if a built-in loss has targets
    for which the model has no output.
    """
    differing = [written for written in spec.written if _differs(written, spec)]
    if config.activity.computes_loss:
        if config.model.target.startswith("trainapp.models."):
            _require_context(spec)
        for task in (targets.task, *targets.training_tasks):
            _require_outputs(task, differing, spec)
    if config.mode != "export":  # it reads no batch
        for written in differing:
            _log_difference(written, spec.values[written.name])


def _differs(written: Written, spec: Spec) -> bool:
    """Return whether the user's value is not the data's. 0 counts as unset: it means a model without a head."""
    value = written.value
    size_in_data = spec.values[written.name]
    if not (_is_plain(value) and _is_plain(size_in_data)):
        return False
    if written.name == CONTEXT:
        return _is_less(value, size_in_data)  # a model may take longer sequences than those of the data
    return value != 0 and _as_list(value) != _as_list(size_in_data)


def _is_plain(value: Any) -> bool:
    """Return whether the value is one that YAML may hold: a `spec` may also have tensors, say."""
    return isinstance(value, (int, float, str, list, tuple))


def _as_list(value: Any) -> Any:
    """Return a tuple as the list that YAML has for it."""
    return list(value) if isinstance(value, tuple) else value


def _require_outputs(task: Any, differing: list[Written], spec: Spec) -> None:
    """Raise UserError if the size that bounds the task's targets is too small wherever the model has it. (One of them
    may be, such as that of an encoder with its own vocabulary.)

    Args:
        task: the task.
        differing: sizes of the user's that are not the data's.
        spec: all sizes.
    """
    name = _size_that_bounds_targets(task)
    if name is None or any(setting.endswith(f".{name}") for setting in spec.filled):
        return
    needed: Any = spec.values.get(name)
    too_small = [written for written in differing if written.name == name and _is_less(written.value, needed)]
    sizes_of_this_name = sum(written.name == name for written in spec.written)
    if too_small and len(too_small) == sizes_of_this_name:
        settings = ", ".join(f"{written.setting}={written.value}" for written in too_small)
        pronoun = "it" if len(too_small) == 1 else "them"
        raise UserError(
            f"{settings}: the data has {name}={needed}, so a target of {needed - 1} would be out of range; remove "
            f"{pronoun} to use the data's size, or set at least {needed}"
        )


def _require_context(spec: Spec) -> None:
    """Raise UserError if the data's sequences are longer than the model's longest."""
    for written in spec.written:
        if written.name == CONTEXT and _differs(written, spec):
            raise UserError(
                f"{written.setting}={written.value}: the data has sequences of {spec.values[CONTEXT]} tokens; remove "
                f"it to use the data's size, or lower data.{CONTEXT}"
            )


def _size_that_bounds_targets(task: Any) -> str | None:
    """Return the size by name; None for a task of the user's own, whose targets may mean anything."""
    if unchecked(task) is classification:
        return "num_classes"
    if unchecked(task) is next_token:
        return "vocab_size"
    return None


def _is_less(value: Any, other: Any) -> bool:
    """Return whether both are integers, and the first is the smaller one."""
    return isinstance(value, int) and isinstance(other, int) and value < other


def _log_difference(written: Written, size_in_data: Any) -> None:
    setting = f"{written.setting}={written.value}"
    in_data = f"the data's {written.name}={size_in_data}"
    if _is_less(size_in_data, written.value):  # such as a vocabulary padded to a multiple of 64
        log.info("%s is larger than %s", setting, in_data)
    elif _is_less(written.value, size_in_data):
        log.warning("%s is smaller than %s: larger indices are out of range", setting, in_data)
    else:
        log.warning("%s differs from %s", setting, in_data)

"""Settings that the class beside them claims, having a parameter of the same name: `data.drop_last` of a data set that
drops samples itself, `model.freeze` of a model that freezes itself.

The value is the argument of the class, and the setting keeps its default. The same holds for `schedule.warmup`, see
`optim.schedules`. Imports no torch, but the classes.
"""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pydantic
from pydantic import TypeAdapter

from trainapp.config import targets
from trainapp.config.arguments import NAMED, as_yaml, messages, parameters_of
from trainapp.config.schema import Config, Optimizer, Target, is_users_class, setting_names
from trainapp.errors import UserError

log = logging.getLogger(__name__)
Section = TypeVar("Section", bound=Target)

# Settings of an optimizer that the program passes to a class with such a parameter.
_PASSED_ON = {"lr", "weight_decay", "fused"}


def with_claimed_settings(config: Config) -> Config:
    """Return the configuration in which claimed settings are arguments. Of such a configuration, the same again.

    A value equal to the setting's default is an argument only if the class requires it, or if it was written: on the
    command line, or in a file, see `with_written_defaults`.
    """
    updates = []
    for number, update in enumerate(config.updates):
        optimizer = _with_claims(config, f"updates.{number}.optimizer", update.optimizer)
        updates.append(dataclasses.replace(update, optimizer=optimizer))

    # With updates, the common optimizer is only what theirs start from, and is never built.
    common_optimizer = config.optimizer
    if not updates:
        common_optimizer = _with_claims(config, "optimizer", common_optimizer)

    return dataclasses.replace(
        config,
        data=_with_claims(config, "data", config.data),
        model=_with_claims(config, "model", config.model),
        optimizer=common_optimizer,
        updates=updates,
    )


def _with_claims(config: Config, section: str, node: Section) -> Section:
    """Return a section with its claimed settings among the arguments."""
    try:
        target = targets.locate(node.target, f"{section}._target_", config.user_packages)
    except UserError:
        return node  # reported with all other mistakes
    parameters = parameters_of(target)

    # A written default that the class does not claim is the setting's.
    claimed_names = {setting.name for setting in _claimed_settings(node, target)}
    arguments = {}
    for name, value in node.arguments.items():
        if name in claimed_names or not _is_default(node, name, value):
            arguments[name] = value

    # The value moves to the arguments, and the setting gets its default back.
    defaults = {}
    for setting in _claimed_settings(node, target):
        value = getattr(node, setting.name)
        default = _default_of(setting)
        defaults[setting.name] = default
        is_required = parameters[setting.name].default is inspect.Parameter.empty
        is_on_command_line = f"{section}.{setting.name}" in config.given
        if value != default:
            arguments[setting.name] = _plain(value)
        elif is_required or is_on_command_line:
            arguments.setdefault(setting.name, _plain(value))
    return dataclasses.replace(node, arguments=arguments, **defaults)


def with_written_defaults(config: Config, written: Iterable[str]) -> Config:
    """Return the configuration in which settings that the user wrote beside a class, with the value of their default,
    are arguments for now: whether the class claims them is known once it is imported.

    Args:
        config: the configuration, as composed.
        written: the settings beside the classes of data, model and optimizer that the user's files write.
    """
    changed: dict[str, Any] = {}
    for setting in written:
        section, _, name = setting.partition(".")
        node: Target = changed.get(section) or getattr(config, section)
        value = getattr(node, name)
        if is_users_class(node.target) and name not in node.arguments and _is_default(node, name, value):
            arguments = node.arguments | {name: _plain(value)}
            changed[section] = dataclasses.replace(node, arguments=arguments)
    return dataclasses.replace(config, **changed)


def _is_default(node: Target, name: str, value: Any) -> bool:
    """Return whether this is the name of a setting beside the class, and the value is the setting's default."""
    for setting in dataclasses.fields(node):
        if setting.name == name and name in setting_names(type(node)):
            return bool(_plain(_default_of(setting)) == _plain(value))
    return False


def _claimed_settings(node: Target, target: Callable[..., Any]) -> Iterator["dataclasses.Field[Any]"]:
    """Yield the settings of a section whose name is a parameter of its class."""
    claimable_names = setting_names(type(node))
    if isinstance(node, Optimizer):
        claimable_names -= _PASSED_ON
    parameters = parameters_of(target)
    for setting in dataclasses.fields(node):
        parameter = parameters.get(setting.name)
        if setting.name in claimable_names and parameter is not None and parameter.kind in NAMED:
            yield setting


def _default_of(setting: "dataclasses.Field[Any]") -> Any:
    if setting.default_factory is not dataclasses.MISSING:
        return setting.default_factory()
    return setting.default


def _plain(value: Any) -> Any:
    """Return a value of plain containers; `data.sampling` is a section."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def log_claims(config: Config) -> None:
    """Log the arguments that have the name of a setting."""
    nodes: dict[str, Target] = {"data": config.data, "model": config.model, **config.optimizers}
    for section, node in nodes.items():
        claimed_names = setting_names(type(node)).intersection(node.arguments)
        for name in sorted(claimed_names):
            log.info(
                "%s.%s=%s is an argument of %s, which has a parameter of this name; to use the setting of trainapp, "
                "rename the parameter",
                *(section, name, as_yaml(node.arguments[name]), node.target),
            )


def errors_of_unclaimed(section: str, node: Target, target: Callable[..., Any]) -> dict[str, list[str]]:
    """Return, by name, the errors of values that the schema took for arguments because they cannot be settings, and for
    which the class has no parameter.
    """
    section_class = type(node)
    claimed_names = {setting.name for setting in _claimed_settings(node, target)}
    unclaimed_names = setting_names(section_class).intersection(node.arguments) - claimed_names
    errors = {}
    for name in unclaimed_names:
        # Beside a class that is not the user's, the schema refuses the value and says why.
        values = {"_target_": "torch.nn.Module", name: node.arguments[name]}
        try:
            TypeAdapter(section_class).validate_python(values)
        except pydantic.ValidationError as error:
            errors[name] = messages(error, section, lambda location: [])
    return errors

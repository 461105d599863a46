"""The loss that `task` names, with its arguments."""

import functools
import inspect
from typing import Any

from trainapp.config import targets
from trainapp.config.schema import Config
from trainapp.config.validation import suggest
from trainapp.errors import UserError
from trainapp.train.whole_batch import require_complete

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def built_task(config: Config, found: Any, setting: str, name: str, arguments: dict[str, Any]) -> Any:
    """The function or object that a setting names, called with these arguments besides model and batch; an instance of
    the class that it names, built with them. None where nothing is named.
    """
    if inspect.isclass(found):
        task = _instance(config, found, setting, name, arguments)
    elif arguments or _requires_more(found):
        task = _with_arguments(config, found, setting, name, arguments)
    else:
        task = found
    require_complete(task, f"{setting}={name}")
    return task


def _requires_more(task: Any) -> bool:
    """Whether it is a function that cannot be called with a model and a batch alone."""
    if not inspect.isfunction(task):
        return False
    own = list(inspect.signature(task).parameters.values())
    positional = [one for one in own if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    more = [*positional[2:], *(one for one in own if one.kind is one.KEYWORD_ONLY)]
    return len(positional) >= 2 and any(one.default is one.empty for one in more)


def _with_arguments(config: Config, found: Any, setting: str, name: str, arguments: dict[str, Any]) -> Any:
    # what it is called with at every step: model and batch
    provided = dict.fromkeys([*inspect.signature(found).parameters][:2]) if inspect.isroutine(found) else {}
    if not provided or provided.keys() & arguments.keys():
        raise UserError(
            f"{setting}={name}: arguments ({', '.join(arguments)}) are for a class, or for a function behind its model "
            "and batch"
        )
    _require_taken(found, setting, name, arguments)
    given = targets.arguments_of(found, arguments, setting, config.user_packages, provided)
    own = {key: value for key, value in given.items() if key not in provided}
    # Without its attributes: `attribute` gives them the arguments, too.
    return functools.update_wrapper(functools.partial(found, **own), found, updated=())


def _require_taken(function: Any, setting: str, name: str, arguments: dict[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    others = [one.name for one in parameters[2:]]
    if wrong := [key for key in arguments if key not in others]:
        known = f"takes {', '.join(others)} besides" if others else "takes nothing but"
        raise UserError(
            f"{setting}.{wrong[0]}: no such argument{suggest(wrong[0], others)}; {name} {known} model and batch"
        )


def _instance(config: Config, kind: type, setting: str, name: str, arguments: dict[str, Any]) -> Any:
    if lacking := _lacking(kind, arguments):
        raise UserError(
            f"{setting}={name}: the class requires {', '.join(lacking)}; give the arguments with its name, as in "
            f"{setting}={{_target_: {name}, {lacking[0]}: VALUE}}, or give them defaults"
        )
    task = targets.construct(kind, arguments, setting, config.user_packages)
    if not callable(task):
        raise UserError(
            f"{setting}={name}: an instance of it cannot be called; give the class a method "
            "`__call__(self, model, batch)` that returns (loss_sum, count, metrics)"
        )
    return task


def _lacking(kind: type, arguments: dict[str, Any]) -> list[str]:
    """The parameters of its constructor that have neither a default nor an argument."""
    parameters = inspect.signature(kind).parameters.items()
    required = [key for key, one in parameters if one.default is one.empty and one.kind not in _VARIABLE]
    return [key for key in required if key not in arguments]

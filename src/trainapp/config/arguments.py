"""Checks arguments against signatures and annotations, and turns pydantic's errors into messages that say what to
change. Imports no torch.
"""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pydantic
from pydantic import TypeAdapter
from pydantic_core import ErrorDetails

from trainapp.units import suggest

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TYPES = ("int", "float", "str", "bool", "constrained-int", "constrained-float")
_ANY_CLASS = pydantic.ConfigDict(arbitrary_types_allowed=True)


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's constructor or of a function, by name."""
    try:
        return inspect.signature(target).parameters
    except ValueError:  # a class written in C, without a signature: it may take anything
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def check_arguments(
    target: Callable[..., Any], arguments: dict[str, Any], path: str, provided: Iterable[str] = ()
) -> list[str]:
    """Return the errors in calling `target(**arguments)`, judged by its signature and its annotations.

    Parameters without an annotation, or with one that pydantic cannot check, accept anything; arguments that hold a
    `_target_` are checked once they are built.

    Args:
        target: a class or function.
        arguments: by name.
        path: the setting of the arguments, such as `model`, for messages.
        provided: parameters that the application fills in.
    """
    parameters = parameters_of(target)
    named = [name for name, parameter in parameters.items() if parameter.kind in NAMED]
    errors: list[str] = []

    # Unknown names, unless the target takes `**keywords`.
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        settable = [name for name in named if name not in ("params", "self")]
        for name in arguments:
            if name not in named:
                errors.append(f"{path}.{name}: {_no_such_setting(name, settable)}")

    # Required parameters that are not set.
    available = {*arguments, *provided}
    for name in named:
        is_required = parameters[name].default is inspect.Parameter.empty
        if is_required and name not in available:
            errors.append(f"{path}.{name}: required, but not set")

    # Values that do not match their annotation. The default itself need not: `size: int = None`.
    annotations = _annotations_of(target)
    for name, value in arguments.items():
        if name not in annotations or _holds_target(value):
            continue
        is_default = value is None and name in parameters and parameters[name].default is None
        if not is_default:
            errors.extend(_check_value(name, value, annotations[name], path))
    return errors


def _annotations_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a class's constructor or of a function; none if one of them cannot be resolved."""
    function = inspect.unwrap(target)
    if inspect.isclass(function):
        function = function.__init__
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # a NameError, or any error of an expression in an annotation
        return {}


def _holds_target(node: Any) -> bool:
    """Return whether a value of plain containers has a `_target_` at any depth, which is yet to be built."""
    if isinstance(node, dict):
        return "_target_" in node or any(map(_holds_target, node.values()))
    return isinstance(node, list) and any(map(_holds_target, node))


def _check_value(name: str, value: Any, annotation: Any, path: str) -> list[str]:
    """Return the errors of one argument; none for an annotation that pydantic cannot check, such as an unresolved
    name.
    """
    try:
        # As a dictionary: a type with a configuration of its own accepts no other.
        adapter: TypeAdapter[Any] = TypeAdapter(dict[str, annotation], config=_ANY_CLASS)
        if adapter.pydantic_complete:
            adapter.validate_python({name: value})
    except pydantic.ValidationError as error:
        return messages(error, path, lambda location: [])
    except Exception:  # of many kinds
        return []
    return []


# Messages


def messages(
    error: pydantic.ValidationError, prefix: str, known_keys: Callable[[tuple[Any, ...]], Iterable[str]]
) -> list[str]:
    """Return one line per mistake: `prefix.key=value: rule`.

    Args:
        error: has the mistakes.
        prefix: the setting whose value was checked; "" for the whole configuration.
        known_keys: returns the keys that exist at a location below it.
    """
    rules_by_subject: dict[str, list[str]] = {}  # several for a union, which gives one error per branch
    unquoted_texts = set()  # the subjects that may be texts which YAML takes for something else
    for details in error.errors():
        subject, rule = _subject_and_rule(details, prefix, known_keys)
        rules = rules_by_subject.setdefault(subject, [])
        if rule not in rules:
            rules.append(rule)
        if details["type"] == "string_type" and isinstance(details["input"], bool | int | float):
            unquoted_texts.add(subject)

    lines = []
    for subject, rules in rules_by_subject.items():
        line = f"{subject}: {_joined(rules)}"
        if subject in unquoted_texts and len(rules) == 1:
            line += "; YAML does not read it as one: write it in quotes"
        lines.append(line)
    return lines


def _subject_and_rule(
    details: ErrorDetails, prefix: str, known_keys: Callable[[tuple[Any, ...]], Iterable[str]]
) -> tuple[str, str]:
    """Return both parts of a message: the setting, with its value if that is wrong, and the rule for it."""
    location = tuple(part for part in details["loc"] if not _names_a_branch(part))
    names = [str(part) for part in (prefix, *location)]
    path = ".".join(filter(None, names))

    # A setting that does not exist, or is missing, has no value to show.
    kind = details["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        unknown_key = str(location[-1])
        return path, _no_such_setting(unknown_key, known_keys(location[:-1]))
    if kind in ("missing", "missing_argument"):
        return path, "required, but not set"

    # Pydantic's rule, in the words of the other messages.
    rule = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value = as_yaml(details["input"])
    return f"{path}={value}", rule


def _names_a_branch(part: int | str) -> bool:
    """Return whether a part of pydantic's location is no key or index, but the type of a union that was tried."""
    return isinstance(part, str) and ("[" in part or part in _TYPES)


def _joined(rules: list[str]) -> str:
    """Return `must be A or B` for "must be A" and "must be B"."""
    alternatives = [rule.removeprefix("must be ") for rule in rules[1:]]
    return " or ".join([rules[0], *alternatives])


def _no_such_setting(word: str, choices: Iterable[str]) -> str:
    """Return the rule for a name that is not among `choices`."""
    names = sorted(choices)
    hint = suggest(word, names)
    if not hint:
        hint = f"; known here: {', '.join(names)}"
    return f"no such setting{hint}"


def as_yaml(value: Any) -> Any:
    """Return the value as a user writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)

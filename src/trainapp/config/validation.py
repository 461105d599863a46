"""Checks values against annotations and words each mistake as a message that says what to change.

The annotated types below are the vocabulary of `schema` and of the constructors of models and data sets:
`def __init__(self, depth: PositiveInt, dropout: Fraction = 0.0)` is both the signature and the rule.
"""

import contextlib
import difflib
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import pydantic
from pydantic import Field, TypeAdapter

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Str = Annotated[str, Field(strict=True)]
_ANY_CLASS = pydantic.ConfigDict(arbitrary_types_allowed=True)


def suggest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'depth'?`, or nothing when no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def messages(
    error: pydantic.ValidationError, prefix: str, known: Callable[[tuple[Any, ...]], Iterable[str]]
) -> list[str]:
    """One line per mistake: `prefix.key=value: rule`.

    `known(location)` names the keys that exist at a location, for the suggestion after an unknown one.
    """
    rules: dict[str, list[str]] = {}  # a union gives one error per branch: joined by "or"
    for item in error.errors():
        location = tuple(part for part in item["loc"] if isinstance(part, int) or not _is_type_name(part))
        path = ".".join(str(part) for part in (prefix, *location) if str(part))
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            names = list(known(location[:-1]))
            hint = suggest(str(location[-1]), names) or f"; known here: {', '.join(sorted(names))}"
            start, rule = path, f"no such setting{hint}"
        elif item["type"] in ("missing", "missing_argument"):
            start, rule = path, "required, but not set"
        else:
            start, rule = f"{path}={_as_yaml(item['input'])}", _rule(item["msg"])
        alternatives = rules.setdefault(start, [])
        if rule not in alternatives:
            alternatives.append(rule)
    return [
        f"{start}: {' or '.join([first, *(r.removeprefix('must be ') for r in rest)])}"
        for start, (first, *rest) in rules.items()
    ]


def _as_yaml(value: Any) -> Any:
    """The value as a user writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)


def _is_type_name(part: str) -> bool:
    """Whether this part of a location names the branch of a union rather than a key of the user's."""
    return "[" in part or part in ("int", "float", "str", "bool", "constrained-int", "constrained-float")


def _rule(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text.replace("Input should be", "must be")


def check_arguments(
    target: Callable[..., Any], arguments: dict[str, Any], path: str, provided: Iterable[str] = ()
) -> list[str]:
    """Errors in calling `target(**arguments)`, judged by its signature and its annotations.

    target: a class or function; parameters without an annotation accept anything, as do those whose annotation cannot
    be resolved or checked, and arguments that hold a `_target_`, which are judged once they are built.
    path: the setting that the arguments come from, such as `model`, for the messages.
    provided: parameters that the application fills in when `arguments` lacks them.
    """
    hints = _hints(target)
    fields: dict[str, Any] = {}
    open_ended = False
    unbuilt = {name for name, value in arguments.items() if holds_target(value)}
    arguments = {name: value for name, value in arguments.items() if name not in unbuilt}
    provided = {*provided, *unbuilt}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            open_ended = True
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        optional = parameter.default is not inspect.Parameter.empty or name in provided
        fields[f"arg_{name}"] = (
            hints.get(name, Any),
            Field(default=None if optional else ..., alias=name),
        )
    options = pydantic.ConfigDict(extra="allow" if open_ended else "forbid", arbitrary_types_allowed=True)
    try:
        model = pydantic.create_model("Arguments", __config__=options, **fields)
        is_complete = model.__pydantic_complete__  # else a name within an annotation is unresolved
    except Exception:
        is_complete = False
    if not is_complete:
        fields = {name: (hint if _can_be_checked(hint) else Any, rule) for name, (hint, rule) in fields.items()}
        model = pydantic.create_model("Arguments", __config__=options, **fields)
    try:
        model.model_validate(arguments)
    except pydantic.ValidationError as error:
        settable = [field.alias for field in model.model_fields.values() if field.alias not in ("params", "self")]
        return messages(error, path, lambda location: settable)
    return []


def holds_target(node: Any) -> bool:
    """Whether a value of plain containers has a `_target_` somewhere in it: something that is yet to be built."""
    if isinstance(node, dict):
        return "_target_" in node or any(map(holds_target, node.values()))
    return isinstance(node, list) and any(map(holds_target, node))


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a class's constructor or of a function, as far as they can be resolved: libraries import some
    of their types for type checkers alone.
    """
    own = inspect.unwrap(target)
    function = own.__init__ if inspect.isclass(own) else own
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # a NameError, and whatever an expression in an annotation raises
        pass
    names = getattr(inspect.unwrap(function), "__globals__", {})
    hints = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        with contextlib.suppress(Exception):
            hints[name] = eval(annotation, names) if isinstance(annotation, str) else annotation
    return hints


def _can_be_checked(annotation: Any) -> bool:
    """Whether pydantic has a check for it: it refuses typing's own TypedDict, say, and names that are unresolved."""
    for config in (_ANY_CLASS, None):  # none for a type that has a configuration of its own
        with contextlib.suppress(Exception):
            if TypeAdapter(annotation, config=config).pydantic_complete:
                return True
    return False

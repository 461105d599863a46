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

_TYPES = ("int", "float", "str", "bool", "constrained-int", "constrained-float")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def suggest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'depth'?`, or nothing when no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown(word: str, choices: Iterable[str]) -> str:
    """The rule for a name that does not exist among `choices`."""
    names = sorted(choices)
    return f"no such setting{suggest(word, names) or '; known here: ' + ', '.join(names)}"


def messages(
    error: pydantic.ValidationError, prefix: str, known: Callable[[tuple[Any, ...]], Iterable[str]]
) -> list[str]:
    """One line per mistake: `prefix.key=value: rule`. known: the keys that exist at a location."""
    rules: dict[str, list[str]] = {}  # a union gives one error per branch: joined by "or"
    for item in error.errors():
        # Of a union, the location also names the branch.
        location = tuple(part for part in item["loc"] if isinstance(part, int) or not ("[" in part or part in _TYPES))
        path = ".".join(str(part) for part in (prefix, *location) if str(part))
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            start, rule = path, unknown(str(location[-1]), known(location[:-1]))
        elif item["type"] in ("missing", "missing_argument"):
            start, rule = path, "required, but not set"
        else:
            start = f"{path}={as_yaml(item['input'])}"
            rule = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        alternatives = rules.setdefault(start, [])
        if rule not in alternatives:
            alternatives.append(rule)
    return [
        f"{start}: {' or '.join([first, *(r.removeprefix('must be ') for r in rest)])}"
        for start, (first, *rest) in rules.items()
    ]


def as_yaml(value: Any) -> Any:
    """The value as a user writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)


def check_arguments(
    target: Callable[..., Any], arguments: dict[str, Any], path: str, provided: Iterable[str] = ()
) -> list[str]:
    """Errors in calling `target(**arguments)`, judged by its signature and its annotations.

    target: a class or function; what has no annotation, or one that pydantic cannot check, accepts anything, as do
    arguments that hold a `_target_`: they are judged once they are built. path: the setting that the arguments come
    from, such as `model`, for the messages. provided: parameters that the application fills in.
    """
    parameters = inspect.signature(target).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    settable = [name for name in named if name not in ("params", "self")]
    unknowns = [] if is_open else [name for name in arguments if name not in named]
    errors = [f"{path}.{name}: {unknown(name, settable)}" for name in unknowns]
    for name in named:
        is_given = name in arguments or name in provided
        if not is_given and parameters[name].default is inspect.Parameter.empty:
            errors.append(f"{path}.{name}: required, but not set")
    hints = _hints(target)
    for name, value in arguments.items():
        if name in hints and not holds_target(value) and (adapter := _adapter(hints[name])) is not None:
            try:
                adapter.validate_python(value)
            except pydantic.ValidationError as error:
                errors += messages(error, f"{path}.{name}", lambda location: [])
    return errors


def holds_target(node: Any) -> bool:
    """Whether a value of plain containers has a `_target_` somewhere in it: something that is yet to be built."""
    if isinstance(node, dict):
        return "_target_" in node or any(map(holds_target, node.values()))
    return isinstance(node, list) and any(map(holds_target, node))


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a class's constructor or of a function; none where one of them cannot be resolved."""
    own = inspect.unwrap(target)
    try:
        return typing.get_type_hints(own.__init__ if inspect.isclass(own) else own, include_extras=True)
    except Exception:  # a NameError, and whatever an expression in an annotation raises
        return {}


def _adapter(annotation: Any) -> "TypeAdapter[Any] | None":
    """Pydantic's check for the annotation; None where it has none, as for names that are unresolved."""
    # without a configuration for a type that has one of its own
    for config in (pydantic.ConfigDict(arbitrary_types_allowed=True), None):
        with contextlib.suppress(Exception):
            adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=config)
            if adapter.pydantic_complete:
                return adapter
    return None

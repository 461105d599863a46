"""Builds the object that `_target_` names: only from allowed packages, only with arguments that fit.

Hydra's own block-list is not a security boundary (torch.load and os._exit pass it), so this is an allow-list.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pydantic
from pydantic import TypeAdapter

from trainapp.errors import UserError
from trainapp.units import suggest

ALLOWED_PACKAGES = (
    "trainapp.models",
    "trainapp.data",
    "trainapp.tasks",
    "trainapp.losses.losses",
    "trainapp.optim.low_precision",
    "trainapp.optim.muon",
    "trainapp.hooks",
    "trainapp.tracking",
    "torch.optim",
    "torch.nn",
    "torchmetrics",
    "transformers",
)
# By package.
EXTRAS = {"torchmetrics": "metrics", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
EXTRAS |= {"transformers": "hf", "datasets": "hf", "peft": "peft", "optuna": "sweep"}


def locate(target: str, setting: str, user_packages: Sequence[str]) -> Callable[..., Any]:
    """The class or function that a dotted name refers to.

    setting: the setting with the name, for messages; user_packages: packages allowed in addition to trainapp's own.
    Raises UserError if the name is not allowed or does not exist, or if its module cannot be imported.
    """
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{setting}={target}: must be the dotted name of a class or function, such as torch.nn.Linear")
    _require_allowed(target, target, setting, user_packages)
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        require_package(module_name.partition(".")[0], f"{setting}={target}")
        raise UserError(
            f"{setting}={target}: importing {module_name} failed: {error}; modules are found in the working directory, "
            "in --config-dir, and on PYTHONPATH"
        ) from error
    located = getattr(module, name, None)
    if not callable(located):
        names = [own for own in dir(module) if not isinstance(vars(module).get(own), types.ModuleType)]
        raise UserError(f"{setting}={target}: {module_name} has no class or function {name}{suggest(name, names)}")
    # A module's namespace also holds its imports: check where the object is defined.
    origin = located
    while isinstance(origin, functools.partial):
        origin = origin.func
    origin_module = getattr(origin, "__module__", None) or ""
    if not _may_pass_on(target, origin_module, user_packages):
        _require_allowed(f"{origin_module}.{name}", target, setting, user_packages)
    if target.startswith("transformers.") and "transformers" not in user_packages:
        _require_model_or_configuration(located, target, setting)
    return located


def _require_model_or_configuration(located: Any, target: str, setting: str) -> None:
    """Raises UserError for other names of Transformers: some, such as `pipeline`, download and run code."""
    package = importlib.import_module("transformers")
    kinds = (package.PreTrainedModel, package.PreTrainedConfig)
    if not (inspect.isclass(located) and issubclass(located, kinds)):
        raise UserError(
            f"{setting}={target}: of Transformers, classes of models and of their configurations may be named here; "
            "for an Auto class, use model=hf with model.task"
        )


def require_package(package: str, setting: str) -> None:
    """Raises UserError if a package that one of trainapp's extras installs is missing. Does not import it.

    setting: the setting with its value, for the message.
    """
    if package in EXTRAS and importlib.util.find_spec(package) is None:
        raise UserError(
            f"{setting}: needs {package}, which is not installed; pip install 'trainapp[{EXTRAS[package]}]'"
        )


def _may_pass_on(target: str, origin_module: str, user_packages: Sequence[str]) -> bool:
    """Whether a user's package may offer, as its own, what another package defines. What torch, trainapp and Python's
    standard library define is not theirs to allow: `from torch import load` is no invitation to load files.
    """
    origin_package = origin_module.partition(".")[0]
    strict = {"", "torch", "trainapp", "transformers", *sys.stdlib_module_names}
    return _is_in(target, user_packages) and strict.isdisjoint({target.partition(".")[0], origin_package})


def _is_in(name: str, packages: Iterable[str]) -> bool:
    """Whether a dotted name is one of these packages, or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _require_allowed(name: str, target: str, setting: str, user_packages: Sequence[str]) -> None:
    """Raises UserError unless the package is allowed. name: the target, or its name in the module that defines it."""
    allowed = (*ALLOWED_PACKAGES, *user_packages)
    if _is_in(name, allowed):
        return
    package = name.partition(".")[0]
    origin = "" if name == target else f"is defined in {name.rpartition('.')[0] or 'no module'}, "
    if package == "trainapp":
        remedy = "its other modules are not meant to be named: put a function or class of your own around it"
    elif origin and package in ("", *sys.stdlib_module_names):
        remedy = "define a function or class of your own that uses it"
    else:
        # All of the user's, since a list on the command line takes the place of the one in a YAML file.
        packages = [own for own in user_packages if not own.startswith("trainapp.")]
        remedy = f"if it is yours, allow it with 'user_packages=[{','.join([*packages, package])}]'"
    raise UserError(
        f"{setting}={target}: {origin}not among the packages that may be named here ({', '.join(allowed)}); {remedy}"
    )


class Written(NamedTuple):
    """A value that the user has given to a parameter named like a key of the data's `spec`."""

    setting: str
    name: str
    value: Any


@dataclass
class Spec:
    """What the data's `spec` says about the model, for parameters of these names that the user leaves unset: those of
    the model's class and of the `_target_`s in its arguments.

    values: by parameter name, such as `num_classes`. filled: what was filled in, by setting, such as
    `model.config.vocab_size`. written: what the user has set instead.
    """

    values: Mapping[str, Any]
    filled: dict[str, Any] = field(default_factory=dict)
    written: list[Written] = field(default_factory=list)

    def names_filled(self, target: Callable[..., Any]) -> set[str]:
        """Return the target's parameters that may be filled in. A configuration of Transformers keeps its own padding
        token: the data's is often the end of text, which gets no gradient in an embedding with padding.
        """
        names = {name for name, parameter in parameters_of(target).items() if parameter.kind in _NAMED}
        origin = target.func if isinstance(target, functools.partial) else target
        if str(getattr(origin, "__module__", "")).startswith("transformers."):
            names.discard("pad_token_id")
        return names.intersection(self.values)

    def fill(self, target: Callable[..., Any], passed: Iterable[str], setting: str) -> dict[str, Any]:
        """Return the values for the target's parameters that are not among those `passed`."""
        names = self.names_filled(target).difference(passed)
        values = {name: value for name, value in self.values.items() if name in names}
        self.filled.update({f"{setting}.{name}": value for name, value in values.items()})
        return values

    def note(self, arguments: Mapping[str, Any], setting: str) -> None:
        """Record which of these arguments are named like a key of the spec."""
        for name, value in arguments.items():
            if name in self.values:
                self.written.append(Written(f"{setting}.{name}", name, value))


def construct(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None = None,
    spec: Spec | None = None,
) -> Any:
    """`target(**arguments)`; parameters of the target that `arguments` lacks are filled in from `provided`.

    Nodes with a `_target_` in the arguments, at any depth and in lists, are built first: see `_build`. `spec` fills in
    their parameters, too. Raises UserError for all arguments that do not fit, and for targets that are not allowed.
    """
    values = _arguments_of(target, arguments, setting, user_packages, provided, spec)
    try:
        return target(**values)
    except Exception as error:
        # Transformers' configurations validate values with their own error types.
        if not isinstance(error, ValueError) and not str(getattr(target, "__module__", "")).startswith("transformers."):
            raise
        raise UserError(str(error) if str(error).startswith(setting) else f"{setting}: {error}") from error


def function_of(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    leading: int,
    provided: dict[str, Any] | None = None,
) -> Any:
    """What the program calls with `leading` positional arguments: an instance of a class, or a function, with
    `arguments` for its other parameters. Raises UserError as `construct` does.
    """
    if inspect.isclass(target):
        built = construct(target, arguments, setting, user_packages, provided)
        if not callable(built):
            raise UserError(
                f"{setting}: an instance of {target.__name__} cannot be called; give it a method `__call__`"
            )
        return built
    given = dict.fromkeys(list(parameters_of(target))[:leading])
    options = _arguments_of(target, arguments, setting, user_packages, (provided or {}) | given)
    options = {name: value for name, value in options.items() if name not in given}
    return functools.partial(target, **options) if options else target


def _arguments_of(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None,
    spec: Spec | None = None,
) -> dict[str, Any]:
    takes = parameters_of(target)
    provided = {k: v for k, v in (provided or {}).items() if k in takes and arguments.get(k) is None}
    if spec is not None:
        written = {name: value for name, value in arguments.items() if value is not None}
        spec.note(written, setting)
        provided |= spec.fill(target, written, setting)
    arguments = {k: v for k, v in arguments.items() if k not in provided}
    if errors := check_arguments(target, arguments, setting, provided):
        raise UserError("\n".join(errors))
    built = {name: _build(value, f"{setting}.{name}", user_packages, spec) for name, value in arguments.items()}
    return built | provided


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class's constructor or of a function, by name."""
    try:
        return inspect.signature(target).parameters
    except ValueError:  # a class written in C, without a signature: it may take anything
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def _build(node: Any, setting: str, user_packages: Sequence[str], spec: Spec | None = None) -> Any:
    """The value of a node of plain containers.

    A mapping with `_target_` becomes the result of that class or function, called with the other keys; `_args_` is a
    list of positional arguments, and `_partial_: true` gives a function that takes the remaining ones.
    """
    if isinstance(node, list):
        return [_build(child, f"{setting}.{index}", user_packages, spec) for index, child in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: _build(value, f"{setting}.{key}", user_packages, spec) for key, value in node.items()}
    target = locate(node["_target_"], f"{setting}._target_", user_packages)
    arguments = {key: value for key, value in node.items() if key not in ("_target_", "_args_", "_partial_")}
    if "_args_" in node:
        positional = _build(node["_args_"], f"{setting}._args_", user_packages, spec)
        if spec is not None:
            spec.note(dict(zip(parameters_of(target), positional, strict=False)), setting)
        target = functools.partial(target, *positional)
    if not node.get("_partial_"):
        return construct(target, arguments, setting, user_packages, spec=spec)
    if spec is None:
        return functools.partial(target, **_build(arguments, setting, user_packages))
    return _partial(target, arguments, setting, user_packages, spec)


def _partial(
    target: Callable[..., Any], arguments: dict[str, Any], setting: str, user_packages: Sequence[str], spec: Spec
) -> Any:
    """Return `target` with these arguments bound, to which the spec adds the others when it is called."""
    written = {name: value for name, value in arguments.items() if value is not None or name not in spec.values}
    spec.note(written, setting)
    values = _build(written, setting, user_packages, spec)
    unset = spec.names_filled(target).difference(written)
    if not unset:  # often called in each forward
        return functools.partial(target, **values)
    partial = _FilledPartial(target, **values)
    partial.setting, partial.spec = setting, spec
    return partial


class _FilledPartial(functools.partial):
    """A partial whose call fills in what the caller leaves unset, too: a model may pass `num_classes` itself."""

    setting: str
    spec: Spec

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        positional = (*self.args, *args)
        passed = {**self.keywords, **keywords}
        names = [*list(parameters_of(self.func))[: len(positional)], *passed]
        return self.func(*positional, **passed, **self.spec.fill(self.func, names, self.setting))


# Checking values against annotations: pydantic's errors as messages that say what to change

_TYPES = ("int", "float", "str", "bool", "constrained-int", "constrained-float")
_ANY_CLASS = pydantic.ConfigDict(arbitrary_types_allowed=True)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def messages(
    error: pydantic.ValidationError, prefix: str, known: Callable[[tuple[Any, ...]], Iterable[str]]
) -> list[str]:
    """One line per mistake: `prefix.key=value: rule`. known: the keys that exist at a location."""
    rules: dict[str, list[str]] = {}  # a union gives one error per branch: joined by "or"
    for item in error.errors():
        # For a union, the location also names the branch.
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


def unknown(word: str, choices: Iterable[str]) -> str:
    """The message for a name that is not among `choices`."""
    names = sorted(choices)
    return f"no such setting{suggest(word, names) or '; known here: ' + ', '.join(names)}"


def as_yaml(value: Any) -> Any:
    """The value as a user writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), value)


def check_arguments(
    target: Callable[..., Any], arguments: dict[str, Any], path: str, provided: Iterable[str] = ()
) -> list[str]:
    """Errors in calling `target(**arguments)`, judged by its signature and its annotations.

    target: a class or function. Parameters without an annotation, or with one that pydantic cannot check, accept
    anything; arguments that hold a `_target_` are checked once they are built. path: the setting of the arguments, such
    as `model`, for messages. provided: parameters that the application fills in.
    """
    parameters = parameters_of(target)
    named = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    settable = [name for name in named if name not in ("params", "self")]
    unknowns = [] if is_open else [name for name in arguments if name not in named]
    errors = [f"{path}.{name}: {unknown(name, settable)}" for name in unknowns]
    required = (name for name in named if parameters[name].default is inspect.Parameter.empty)
    errors += [f"{path}.{name}: required, but not set" for name in required if name not in {*arguments, *provided}]
    hints = _hints(target)
    for name, value in arguments.items():
        is_default = value is None and name in parameters and parameters[name].default is None  # `size: int = None`
        if name in hints and not is_default and not _holds_target(value):
            errors += _misfits({name: value}, hints[name], path)
    return errors


def _holds_target(node: Any) -> bool:
    """Whether a value of plain containers has a `_target_` at any depth, which is yet to be built."""
    if isinstance(node, dict):
        return "_target_" in node or any(map(_holds_target, node.values()))
    return isinstance(node, list) and any(map(_holds_target, node))


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a class's constructor or of a function; none if one of them cannot be resolved."""
    own = inspect.unwrap(target)
    try:
        return typing.get_type_hints(own.__init__ if inspect.isclass(own) else own, include_extras=True)
    except Exception:  # a NameError, or any error of an expression in an annotation
        return {}


def _misfits(argument: dict[str, Any], annotation: Any, path: str) -> list[str]:
    """Errors of one argument; none for an annotation that pydantic cannot check, such as an unresolved name."""
    try:
        # As a dictionary: a type with a configuration of its own accepts no other.
        adapter: TypeAdapter[Any] = TypeAdapter(dict[str, annotation], config=_ANY_CLASS)
        if adapter.pydantic_complete:
            adapter.validate_python(argument)
    except pydantic.ValidationError as error:
        return messages(error, path, lambda location: [])
    except Exception:  # of many kinds
        return []
    return []

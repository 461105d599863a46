"""Builds the object that `_target_` names: only from allowed packages, only with arguments that fit.

Hydra's own block-list is not a security boundary (torch.load and os._exit pass it), so this is an allow-list.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainapp.config.arguments import NAMED, check_arguments, parameters_of
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
# By package, the extra of trainapp that installs it.
EXTRAS = {
    "torchmetrics": "metrics",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "transformers": "hf",
    "datasets": "hf",
    "peft": "peft",
    "optuna": "sweep",
}


def locate(target: str, setting: str, user_packages: Sequence[str]) -> Callable[..., Any]:
    """Return the class or function that a dotted name refers to.

    Raises UserError if the name is not allowed or does not exist, or if its module cannot be imported.

    Args:
        target: the name.
        setting: the setting with the name, for messages.
        user_packages: packages allowed in addition to trainapp's own.
    """
    is_dotted = isinstance(target, str) and "." in target
    if not is_dotted or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{setting}={target}: must be the dotted name of a class or function, such as torch.nn.Linear")

    # Importing runs code, so the name must be allowed first.
    _require_allowed(target, target, setting, user_packages)
    module_name, _, name = target.rpartition(".")
    module = _import(module_name, f"{setting}={target}")
    located = getattr(module, name, None)
    if not callable(located):
        hint = suggest(name, _names_of_objects(module))
        raise UserError(f"{setting}={target}: {module_name} has no class or function {name}{hint}")

    # A module's namespace also holds its imports: check where the object is defined.
    origin_module = _module_defining(located)
    if not _may_pass_on(target, origin_module, user_packages):
        _require_allowed(f"{origin_module}.{name}", target, setting, user_packages)
    if target.startswith("transformers.") and "transformers" not in user_packages:
        _require_model_or_configuration(located, target, setting)
    return located


def _names_of_objects(module: types.ModuleType) -> list[str]:
    """Return the names in a module that are not other modules."""
    namespace = vars(module)
    return [name for name in dir(module) if not isinstance(namespace.get(name), types.ModuleType)]


def _import(module_name: str, setting: str) -> types.ModuleType:
    """Return a module. Raises UserError if it cannot be imported. setting: with its value, for the message."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        require_package(module_name.partition(".")[0], setting)
        raise UserError(
            f"{setting}: importing {module_name} failed: {error}; modules are found in the working directory, "
            "in --config-dir, and on PYTHONPATH"
        ) from error


def _module_defining(located: Any) -> str:
    """Return the name of the module that defines a class or function; "" if it does not tell."""
    while isinstance(located, functools.partial):
        located = located.func
    return getattr(located, "__module__", None) or ""


def _require_model_or_configuration(located: Any, target: str, setting: str) -> None:
    """Raise UserError for other names of Transformers: some, such as `pipeline`, download and run code."""
    package = importlib.import_module("transformers")
    allowed = (package.PreTrainedModel, package.PreTrainedConfig)
    if not (inspect.isclass(located) and issubclass(located, allowed)):
        raise UserError(
            f"{setting}={target}: of Transformers, classes of models and of their configurations may be named here; "
            "for an Auto class, use model=hf with model.task"
        )


def require_package(package: str, setting: str) -> None:
    """Raise UserError if a package that one of trainapp's extras installs is missing. Does not import it.

    setting: the setting with its value, for the message.
    """
    if package in EXTRAS and importlib.util.find_spec(package) is None:
        raise UserError(
            f"{setting}: needs {package}, which is not installed; pip install 'trainapp[{EXTRAS[package]}]'"
        )


def _may_pass_on(target: str, origin_module: str, user_packages: Sequence[str]) -> bool:
    """Return whether a user's package may offer, as its own, what another package defines. What torch, trainapp and
    Python's standard library define is not theirs to allow: `from torch import load` is no invitation to load files.
    """
    target_package = target.partition(".")[0]
    origin_package = origin_module.partition(".")[0]
    strict_packages = {"", "torch", "trainapp", "transformers", *sys.stdlib_module_names}
    return _is_in(target, user_packages) and strict_packages.isdisjoint({target_package, origin_package})


def _is_in(name: str, packages: Iterable[str]) -> bool:
    """Return whether a dotted name is one of these packages, or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _require_allowed(name: str, target: str, setting: str, user_packages: Sequence[str]) -> None:
    """Raise UserError unless the package is allowed. name: the target, or its name in the module that defines it."""
    allowed = (*ALLOWED_PACKAGES, *user_packages)
    if _is_in(name, allowed):
        return
    module_name = name.rpartition(".")[0]
    package = name.partition(".")[0]
    is_defined_elsewhere = name != target
    origin = ""
    if is_defined_elsewhere:
        origin = f"is defined in {module_name or 'no module'}, "

    # Only the user's own packages can be allowed.
    if package == "trainapp":
        remedy = "its other modules are not meant to be named: put a function or class of your own around it"
    elif is_defined_elsewhere and package in ("", *sys.stdlib_module_names):
        remedy = "define a function or class of your own that uses it"
    else:
        # Include packages already allowed: a list on the command line replaces the one in a YAML file.
        packages = [user_package for user_package in user_packages if not user_package.startswith("trainapp.")]
        packages.append(package)
        remedy = f"if it is yours, allow it with 'user_packages=[{','.join(packages)}]'"
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
    """

    values: Mapping[str, Any]  # by parameter name, such as `num_classes`
    filled: dict[str, Any] = field(default_factory=dict)  # by setting, such as `model.config.vocab_size`
    written: list[Written] = field(default_factory=list)  # what the user has set instead

    def fillable_names(self, target: Callable[..., Any]) -> set[str]:
        """Return the target's parameters that may be filled in. A configuration of Transformers keeps its own padding
        token: the data's is often the end of text, which gets no gradient in an embedding with padding.
        """
        names = {name for name, parameter in parameters_of(target).items() if parameter.kind in NAMED}
        function = target.func if isinstance(target, functools.partial) else target
        if _is_of_transformers(function):
            names.discard("pad_token_id")
        return names.intersection(self.values)

    def fill(self, target: Callable[..., Any], passed: Iterable[str], setting: str) -> dict[str, Any]:
        """Return the values for the target's parameters that are not among those `passed`."""
        names = self.fillable_names(target).difference(passed)
        values = {name: value for name, value in self.values.items() if name in names}
        for name, value in values.items():
            self.filled[f"{setting}.{name}"] = value
        return values

    def note(self, arguments: Mapping[str, Any], setting: str) -> None:
        """Record which of these arguments are named like a key of the spec."""
        for name, value in arguments.items():
            if name in self.values:
                self.written.append(Written(f"{setting}.{name}", name, value))


def _is_of_transformers(target: Any) -> bool:
    module_name = str(getattr(target, "__module__", ""))
    return module_name.startswith("transformers.")


def construct(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None = None,
    spec: Spec | None = None,
) -> Any:
    """Return `target(**arguments)`; parameters of the target that `arguments` lacks are filled in from `provided`.

    Nodes with a `_target_` in the arguments, at any depth and in lists, are built first: see `_build`. `spec` fills in
    their parameters, too. Raises UserError for all arguments that do not fit, and for targets that are not allowed.
    """
    values = _arguments_of(target, arguments, setting, user_packages, provided, spec)
    try:
        return target(**values)
    except Exception as error:
        # Transformers' configurations validate values with their own error types.
        if not isinstance(error, ValueError) and not _is_of_transformers(target):
            raise
        message = str(error)
        if not message.startswith(setting):
            message = f"{setting}: {message}"
        raise UserError(message) from error


def function_of(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    leading: int,
    provided: dict[str, Any] | None = None,
) -> Any:
    """Return what the program calls with `leading` positional arguments: an instance of a class, or a function, with
    `arguments` for its other parameters. Raises UserError as `construct` does.
    """
    if inspect.isclass(target):
        built = construct(target, arguments, setting, user_packages, provided)
        if not callable(built):
            raise UserError(
                f"{setting}: an instance of {target.__name__} cannot be called; give it a method `__call__`"
            )
        return built

    # The leading parameters count as provided while the others are checked, and are left to the caller.
    leading_names = list(parameters_of(target))[:leading]
    placeholders = dict.fromkeys(leading_names)
    checked = _arguments_of(target, arguments, setting, user_packages, (provided or {}) | placeholders)
    keywords = {name: value for name, value in checked.items() if name not in leading_names}
    if not keywords:
        return target
    return functools.partial(target, **keywords)


def _arguments_of(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None,
    spec: Spec | None = None,
) -> dict[str, Any]:
    """Return all arguments of the target, checked and built. Arguments: see `construct`."""
    parameters = parameters_of(target)

    # What the user leaves unset, from `provided` and then from the spec. A null is unset, too.
    filled_in = {}
    for name, value in (provided or {}).items():
        if name in parameters and arguments.get(name) is None:
            filled_in[name] = value
    if spec is not None:
        written = {name: value for name, value in arguments.items() if value is not None}
        spec.note(written, setting)
        filled_in |= spec.fill(target, written, setting)

    # All mistakes of the others are reported before anything is built.
    arguments = {name: value for name, value in arguments.items() if name not in filled_in}
    errors = check_arguments(target, arguments, setting, filled_in)
    if errors:
        raise UserError("\n".join(errors))

    built = {}
    for name, value in arguments.items():
        built[name] = _build(value, f"{setting}.{name}", user_packages, spec)
    return built | filled_in


def _build(node: Any, setting: str, user_packages: Sequence[str], spec: Spec | None = None) -> Any:
    """Return the value of a node of plain containers, in which mappings with `_target_` are built."""
    if isinstance(node, list):
        values = []
        for index, child in enumerate(node):
            values.append(_build(child, f"{setting}.{index}", user_packages, spec))
        return values
    if not isinstance(node, dict):
        return node
    if "_target_" in node:
        return _build_target(node, setting, user_packages, spec)
    value_by_key = {}
    for key, child in node.items():
        value_by_key[key] = _build(child, f"{setting}.{key}", user_packages, spec)
    return value_by_key


def _build_target(node: dict[str, Any], setting: str, user_packages: Sequence[str], spec: Spec | None) -> Any:
    """Return the result of the class or function `_target_`, called with the other keys; `_args_` is a list of
    positional arguments, and `_partial_: true` gives a function that takes the remaining ones.
    """
    target = locate(node["_target_"], f"{setting}._target_", user_packages)
    arguments = {key: value for key, value in node.items() if key not in ("_target_", "_args_", "_partial_")}

    # Bind positional arguments first: the others are checked against the signature that is left.
    if "_args_" in node:
        positional = _build(node["_args_"], f"{setting}._args_", user_packages, spec)
        if spec is not None:
            value_by_parameter = dict(zip(parameters_of(target), positional, strict=False))
            spec.note(value_by_parameter, setting)
        target = functools.partial(target, *positional)

    if node.get("_partial_"):
        return _build_partial(target, arguments, setting, user_packages, spec)
    return construct(target, arguments, setting, user_packages, spec=spec)


def _build_partial(
    target: Callable[..., Any], arguments: dict[str, Any], setting: str, user_packages: Sequence[str], spec: Spec | None
) -> Any:
    """Return `target` with these arguments bound, to which the spec adds the others when it is called."""
    if spec is None:
        return functools.partial(target, **_build(arguments, setting, user_packages))

    # A null counts as unset where the spec has a value.
    written = {name: value for name, value in arguments.items() if value is not None or name not in spec.values}
    spec.note(written, setting)
    values = _build(written, setting, user_packages, spec)
    unset_names = spec.fillable_names(target).difference(written)
    if not unset_names:  # a plain partial is faster, and often called in each forward
        return functools.partial(target, **values)

    # The spec's values are added at the call, which may pass some of them.
    partial = _FilledPartial(target, **values)
    partial.setting = setting
    partial.spec = spec
    return partial


class _FilledPartial(functools.partial):
    """A partial whose call fills in what the caller leaves unset, too: a model may pass `num_classes` itself."""

    setting: str
    spec: Spec

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        positional = (*self.args, *args)
        passed_keywords = {**self.keywords, **keywords}
        parameter_names = list(parameters_of(self.func))
        passed_names = [*parameter_names[: len(positional)], *passed_keywords]
        from_spec = self.spec.fill(self.func, passed_names, self.setting)
        return self.func(*positional, **passed_keywords, **from_spec)

"""Builds what `_target_` names: only from allowed packages, only with arguments that fit.

Hydra's own block-list is no security boundary (torch.load and os._exit pass it), so this is an allow-list.
"""

import functools
import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from trainapp.config.validation import check_arguments, holds_target, suggest
from trainapp.errors import UserError

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
EXTRAS = {"torchmetrics": "metrics", "wandb": "wandb", "mlflow": "mlflow"}  # by package


def locate(target: str, setting: str, user_packages: Sequence[str]) -> Callable[..., Any]:
    """The class or function that a dotted name refers to.

    setting: the setting that gave the name, for messages; user_packages: allowed in addition to trainapp's own.
    Raises UserError when it is not allowed, does not exist, or its module cannot be imported.
    """
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{setting}={target}: must be the dotted name of a class or function, such as torch.nn.Linear")
    allowed = (*ALLOWED_PACKAGES, *user_packages)
    _require_allowed(target, target, setting, allowed)
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if error.name and not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(f"{setting}={target}: importing {module_name} failed: {error}") from error
        if module_name.startswith("trainapp.data."):
            raise UserError(
                f"{setting}={target}: there is no module {module_name}; data sets are in trainapp.data.sets, as in "
                "trainapp.data.sets.digits.Digits"
            ) from None
        require_package(module_name.partition(".")[0], f"{setting}={target}")
        raise UserError(
            f"{setting}={target}: there is no module {module_name}; modules are found in the working directory, "
            "in --config-dir, and on PYTHONPATH"
        ) from None
    except SystemExit as error:  # else the program would end without a word about it
        raise UserError(
            f"{setting}={target}: importing {module_name} failed: it exits with {error.code}; keep what only a script "
            'does under `if __name__ == "__main__":`'
        ) from error
    located = getattr(module, name, None)
    if not callable(located):
        names = [own for own in dir(module) if not isinstance(vars(module).get(own), types.ModuleType)]
        raise UserError(f"{setting}={target}: {module_name} has no class or function {name}{suggest(name, names)}")
    # A module's namespace also holds what it imports: judge the object by where it comes from.
    origin = located
    while isinstance(origin, functools.partial):
        origin = origin.func
    _require_allowed(f"{getattr(origin, '__module__', '')}.{name}", target, setting, allowed)
    if target.startswith("transformers.") and "transformers" not in user_packages:
        _require_model_or_configuration(located, target, setting)
    return located


def _require_model_or_configuration(located: Any, target: str, setting: str) -> None:
    """Of Transformers' other names some download and run code, as `pipeline` does."""
    package = importlib.import_module("transformers")
    kinds = (package.PreTrainedModel, package.PreTrainedConfig)
    if not (inspect.isclass(located) and issubclass(located, kinds)):
        raise UserError(
            f"{setting}={target}: of Transformers, classes of models and of their configurations may be named here; "
            "for an Auto class, use model=hf with model.task"
        )


def require_package(package: str, setting: str) -> None:
    """Raises UserError where a package is missing that an extra of trainapp installs. Does not import it.

    setting: with its value, for the message.
    """
    if package in EXTRAS and not _is_installed(package):
        raise UserError(
            f"{setting}: needs {package}, which is not installed; pip install 'trainapp[{EXTRAS[package]}]'"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # half installed
        return False


def _require_allowed(name: str, target: str, setting: str, allowed: Sequence[str]) -> None:
    """name: the target, or the same with the module that defines it."""
    if not any(name == package or name.startswith(package + ".") for package in allowed):
        whose = "" if name == target else f"is defined in {name.rpartition('.')[0]}, "
        raise UserError(
            f"{setting}={target}: {whose}not among the packages that may be named here ({', '.join(allowed)}); "
            f"if it is yours, allow it with 'user_packages=[{name.partition('.')[0]}]'"
        )


def construct(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None = None,
) -> Any:
    """`target(**arguments)`; parameters of the target that `arguments` lacks are filled in from `provided`.

    Nodes with a `_target_` in the arguments, at any depth, in lists too, are built first: see `_build`. Raises
    UserError for all arguments that do not fit, and all nodes that name nothing allowed.
    """
    return _call(target, [], arguments_of(target, arguments, setting, user_packages, provided), setting)


def arguments_of(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `construct` calls the target with, for one that is called more than once."""
    takes = inspect.signature(target).parameters
    provided = {k: v for k, v in (provided or {}).items() if k in takes and arguments.get(k) is None}
    arguments = {k: v for k, v in arguments.items() if k not in provided}
    errors = check_arguments(target, arguments, setting, provided)
    built = {name: _build(value, f"{setting}.{name}", user_packages, errors) for name, value in arguments.items()}
    if errors:
        raise UserError("\n".join(errors))
    return {**built, **provided}


def _call(target: Callable[..., Any], positional: list[Any], arguments: dict[str, Any], setting: str) -> Any:
    try:
        return target(*positional, **arguments)
    except Exception as error:
        # Configurations of Transformers check their values with errors of their own.
        if not isinstance(error, ValueError) and not str(getattr(target, "__module__", "")).startswith("transformers."):
            raise
        raise UserError(str(error) if str(error).startswith(setting) else f"{setting}: {error}") from error


def _build(node: Any, setting: str, user_packages: Sequence[str], errors: list[str]) -> Any:
    """The value that a node of plain containers stands for. Mistakes are added to `errors`; then its value is void.

    A mapping with `_target_` becomes what that class or function returns for the other keys; `_args_` is a list of
    positional arguments, and `_partial_: true` gives a function that still takes more.
    """
    if isinstance(node, list):
        return [_build(child, f"{setting}.{index}", user_packages, errors) for index, child in enumerate(node)]
    if not isinstance(node, dict):
        return node
    values = {k: _build(v, f"{setting}.{k}", user_packages, errors) for k, v in node.items() if k != "_target_"}
    if "_target_" not in node:
        return values
    try:
        target = locate(node["_target_"], f"{setting}._target_", user_packages)
        positional, is_partial = values.pop("_args_", []), values.pop("_partial_", False)
        if is_partial:
            return functools.partial(target, *positional, **values)
        errors += _misfits(target, positional, values, node, setting)
        return None if errors else _call(target, positional, values, setting)
    except UserError as error:
        errors.append(str(error))
        return None


def _misfits(
    target: Callable[..., Any], positional: list[Any], values: dict[str, Any], node: dict[str, Any], setting: str
) -> list[str]:
    """Arguments of a nested node that do not fit; none for a class written in C, without a signature."""
    try:
        if not positional:
            plain = {name: value for name, value in values.items() if not holds_target(node[name])}
            return check_arguments(target, plain, setting, values.keys() - plain.keys())
        inspect.signature(target).bind(*positional, **values)
    except TypeError as error:
        return [f"{setting}: {node['_target_']}: {error}"]
    except (NameError, ValueError):
        pass
    return []

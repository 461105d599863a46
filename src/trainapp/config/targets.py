"""Builds what `_target_` names: only from allowed packages, only with arguments that fit.

Hydra's own block-list is no security boundary (torch.load and os._exit pass it), so this is an allow-list.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hydra.utils import instantiate

from trainapp.config.validation import check_arguments, suggest
from trainapp.errors import UserError

ALLOWED_PACKAGES = (
    "trainapp.models",
    "trainapp.data",
    "trainapp.tasks",
    "trainapp.train.losses",
    "torch.optim",
    "torch.nn",
)


def locate(target: str, setting: str, user_packages: Sequence[str]) -> Callable[..., Any]:
    """The class or function that a dotted name refers to.

    setting: the setting that gave the name, for messages; user_packages: allowed in addition to trainapp's own.
    Raises UserError when it is not allowed, does not exist, or its module cannot be imported.
    """
    allowed = (*ALLOWED_PACKAGES, *user_packages)
    _require_allowed(target, target, setting, allowed)
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if error.name and not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(f"{setting}={target}: importing {module_name} failed: {error}") from error
        raise UserError(
            f"{setting}={target}: there is no module {module_name}; modules are found in the working directory, "
            "in --config-dir, and on PYTHONPATH"
        ) from None
    located = getattr(module, name, None)
    if not callable(located):
        raise UserError(
            f"{setting}={target}: {module_name} has no class or function {name}{suggest(name, dir(module))}"
        )
    # A module's namespace also holds what it imports: judge the object by where it comes from.
    _require_allowed(f"{getattr(located, '__module__', '')}.{name}", target, setting, allowed)
    return located


def _require_allowed(name: str, target: str, setting: str, allowed: Sequence[str]) -> None:
    if not any(name == package or name.startswith(package + ".") for package in allowed):
        package = target.partition(".")[0]
        raise UserError(
            f"{setting}={target}: not among the packages that may be named here ({', '.join(allowed)}); "
            f"if it is yours, allow it with 'user_packages=[{package}]'"
        )


def check(target: Callable[..., Any], arguments: dict[str, Any], setting: str, provided: dict[str, Any]) -> list[str]:
    """Errors in building `target` from `arguments`; `provided` is what the application can fill in."""
    return check_arguments(target, arguments, setting, provided)


def construct(
    target: Callable[..., Any],
    arguments: dict[str, Any],
    setting: str,
    user_packages: Sequence[str],
    provided: dict[str, Any] | None = None,
) -> Any:
    """`target(**arguments)`; parameters of the target that `arguments` lacks are filled in from `provided`.

    Nested `_target_` nodes in the arguments are built first. Raises UserError for arguments that do not fit.
    """
    provided = {k: v for k, v in (provided or {}).items() if k in _parameters(target) and arguments.get(k) is None}
    arguments = {k: v for k, v in arguments.items() if k not in provided}
    errors = check_arguments(target, arguments, setting, provided)
    if errors:
        raise UserError("\n".join(errors))
    _check_nested(arguments, setting, user_packages)
    plain = {k: instantiate(v) if isinstance(v, dict) and "_target_" in v else v for k, v in arguments.items()}
    try:
        return target(**plain, **provided)
    except ValueError as error:
        raise UserError(str(error) if str(error).startswith(setting) else f"{setting}: {error}") from error


def _parameters(target: Callable[..., Any]) -> Sequence[str]:
    return list(inspect.signature(target).parameters)


def _check_nested(node: Any, setting: str, user_packages: Sequence[str]) -> None:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        if isinstance(child, dict) and "_target_" in child:
            locate(child["_target_"], f"{setting}.{key}._target_", user_packages)
        _check_nested(child, f"{setting}.{key}", user_packages)

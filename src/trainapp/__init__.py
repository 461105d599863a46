"""trainapp trains any PyTorch model in whatever memory is available, with the same result."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainapp.api import load as load
    from trainapp.api import plan as plan
    from trainapp.api import predict as predict
    from trainapp.api import train as train
    from trainapp.errors import UserError as UserError
    from trainapp.run.result import Result as Result


__version__ = "0.1.0"
# Public names and their modules.
_OFFERED = {
    "train": "api",
    "load": "api",
    "predict": "api",
    "plan": "api",
    "Result": "run.result",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import trainapp` stays fast."""
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OFFERED])

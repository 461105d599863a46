"""trainapp trains any PyTorch model in whatever memory is available, with the same result."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`trainapp.plan(...)` without an import of its own."""
    if name == "plan":
        import importlib

        return importlib.import_module("trainapp.plan")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Peak memory predicted without running: `trainapp.plan(["model=gpt", "memory.limit=8GiB"])`.

The room of the planner and the function that asks it share this name, so the module can be called.
"""

import sys
import types
from collections.abc import Iterable
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, overrides: Iterable[str] = ()) -> dict[str, Any]:
        """The plan of `python -m trainapp OVERRIDES mode=plan`: the content of plan.json. Writes nothing.

        Raises UserError for mistakes in the configuration.
        """
        from trainapp.config import compose
        from trainapp.plan.process import ask

        return ask(compose.from_command_line(overrides))


sys.modules[__name__].__class__ = _Callable

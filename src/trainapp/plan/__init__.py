"""Peak memory predicted without running: `trainapp.plan(["model=gpt", "memory.limit=8GiB"])`.

The room of the planner and the function that asks it share this name, so the module can be called.
"""

import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, overrides: Iterable[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
        """The plan of `python -m trainapp OVERRIDES mode=plan`: the content of plan.json. Writes nothing.

        config_dir: as `--config-dir`, a folder with options of your own; modules are found there, too. Raises
        UserError for mistakes in the configuration, with the message of the command line, and where another thread's
        run is in progress.
        """
        from trainapp import alone
        from trainapp.config import command_line, compose
        from trainapp.errors import UserError
        from trainapp.plan.answer import complete
        from trainapp.plan.process import ask

        given = compose.as_overrides(overrides)
        if flags := [text for text in given if text.startswith("-")]:
            raise UserError(
                f"trainapp.plan: {flags[0]} is an option of the command line; give overrides such as 'model=gpt', and "
                "a folder with options of your own as config_dir=FOLDER"
            )
        with alone.brief("trainapp.plan"):  # a run in another thread has the import path and Hydra
            before = list(sys.path)
            try:
                command_line.add_import_paths([] if config_dir is None else ["--config-dir", str(config_dir)])
                return complete(ask(compose.from_command_line(given, config_dir=config_dir)))
            finally:
                sys.path[:] = before


sys.modules[__name__].__class__ = _Callable

"""Takes classes and functions out of a script whose other statements would parse arguments, download data and train."""

import ast
import contextlib
from pathlib import Path
from types import ModuleType


def definitions(path: Path) -> ModuleType:
    """A module with what a script imports and defines; its other statements are not run.

    An import that fails is left out: what needs it fails where it is used.
    """
    module = ModuleType(path.stem)
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            with contextlib.suppress(ImportError, RuntimeError):
                _execute(statement, path, module)
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            _execute(statement, path, module)
    return module


def run_last_loop(path: Path, module: ModuleType) -> None:
    """Run the last `for` at the top level of a script, with the module's names: the training loop of a flat script."""
    loops = [statement for statement in ast.parse(path.read_text()).body if isinstance(statement, ast.For)]
    _execute(loops[-1], path, module)


def _execute(statement: ast.stmt, path: Path, module: ModuleType) -> None:
    code = compile(ast.Module([statement], type_ignores=[]), str(path), "exec")
    exec(code, vars(module))

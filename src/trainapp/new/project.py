"""`trainapp new my_project`: generates a starter project. Imports no torch."""

import importlib.util
import keyword
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from trainapp.errors import UserError
from trainapp.files import PACKAGE

_TEMPLATE, _SUFFIX = PACKAGE / "new" / "template", ".template"
USAGE = "trainapp new NAME: writes a project into the new folder NAME, whose last part is the name of its Python module"


def command(arguments: Sequence[str]) -> None:
    """Run the command line behind `trainapp new`. Raises UserError for mistakes."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"trainapp new {' '.join(arguments)}".rstrip() + f": give one name; {USAGE}")
    folder = Path(arguments[0])
    write(folder)
    print(
        f"{folder} is ready:\n  cd {folder}\n  python -m trainapp --config-dir . experiment=first\nSee its README.md."
    )


def write(folder: Path) -> list[Path]:
    """Write the project. Returns its files.

    Raises UserError for a name that a module cannot have, and for a folder that is not empty or cannot be written.
    """
    name, setting = folder.name, f"trainapp new {folder}"
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UserError(f"{setting}: the folder's name must be that of a Python module: letters, digits and _")
    if name in sys.stdlib_module_names or _is_installed(name):
        raise UserError(f"{setting}: a module {name} already exists; choose another name")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{setting}: exists and is not empty; choose another name, or remove it")
        return [_write(folder, source, name) for source in sorted(_TEMPLATE.rglob(f"*{_SUFFIX}"))]
    except OSError as error:
        raise UserError(f"{setting}: {error.filename}: {error.strerror}; choose another place") from None


def _write(folder: Path, source: Path, name: str) -> Path:
    """Write one file, replacing `$name` in the text and `NAME` in the path by the project's name."""
    path = folder / str(source.relative_to(_TEMPLATE)).removesuffix(_SUFFIX).replace("NAME", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(string.Template(source.read_text()).substitute(name=name))
    return path


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a plain folder, such as the empty one to write to, has none

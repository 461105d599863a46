"""Writes docs/configuration.md below its mark: every setting of conf/, with its default, its values and its comment.

`python scripts/settings_reference.py`; tests/config/test_reference.py fails while the page is not up to date.
"""

import re
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainapp.config.arguments import as_yaml
from trainapp.config.schema import Config

ROOT = Path(__file__).parents[1]
PAGE, CONF = ROOT / "docs/configuration.md", ROOT / "conf"
MARK = "<!-- Written by scripts/settings_reference.py; do not edit below. -->\n"
_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?: (?P<value>.*?))?(?:\s+# (?P<comment>.*))?")
_TYPES = {
    bool: "`true`, `false`", int: "integer", float: "number", str: "text", list: "list", dict: "mapping",
    type(None): "`null`",
}  # fmt: skip


class Row(NamedTuple):
    """A setting, or a section whose `value` is empty."""

    name: str
    value: str
    comment: str


def rows(path: Path) -> Iterator[Row]:
    """The settings and sections of a YAML file, in its order."""
    text = path.read_text()
    prefix = "" if path.parent == CONF or "@package _global_" in text else path.parent.name
    parents: list[tuple[int, str]] = []
    for line in re.sub(r"^defaults:\n(?:[ -].*\n)*", "", text, flags=re.MULTILINE).splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        depth = len(match["indent"])
        parents = [parent for parent in parents if parent[0] < depth]
        parents.append((depth, match["key"]))
        name = ".".join([*filter(None, [prefix]), *(key for _, key in parents)])
        yield Row(name, (match["value"] or "").strip(), match["comment"] or "")


def values(name: str) -> str:
    """What the schema allows, as text; empty for the arguments of a class."""
    node: Any = Config
    for part in name.split("."):
        node = typing.get_type_hints(node).get(part) if is_dataclass(node) else None
    # Not in the schema's order: Python's cache of unions returns `int | str` where an equal `str | int` came first.
    return ", ".join(sorted(dict.fromkeys(_texts(node)), key=_rank))


def _rank(text: str) -> int:
    """Return the rank in a list of allowed values: words that are allowed, types, null."""
    if text == "`null`":
        return len(_TYPES) + 1
    names = list(_TYPES.values())
    return names.index(text) + 1 if text in names else 0


def _texts(kind: Any) -> Iterator[str]:
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        yield from (f"`{as_yaml(value)}`" for value in typing.get_args(kind))
    elif origin in _TYPES:
        yield _TYPES[origin]
    else:  # a union, or annotated with rules
        for part in typing.get_args(kind):
            yield from _texts(part)


def reference() -> str:
    """The part of the page that is written."""
    groups = [path for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name not in ("hydra", "local")]
    read = {path: list(rows(path)) for path in (CONF / "train.yaml", *groups)}
    # A setting that one option describes need not be described by the next.
    said = {row.name: row.comment for found in reversed(read.values()) for row in found if row.comment}
    parts = []
    for path, found in read.items():
        head = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
        title = "Common settings" if path.parent == CONF else f"`{path.parent.name}={path.stem}`"
        lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
        for row in found:
            comment = "the class to build" if row.name.endswith("_target_") else row.comment or said.get(row.name, "")
            value = f"`{row.value}`" if row.value else ""
            if value or comment:
                lines.append(f"| `{row.name}` | {value} | {values(row.name) if value else ''} | {comment} |")
        parts.append("\n".join([f"## {title}", "", *([" ".join(head), ""] if head else []), *lines]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n" + reference())

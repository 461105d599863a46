"""`optimizer._target_=CLASS` on the command line: the class by itself, without the settings of the group's option.

An option such as `optimizer=adamw` has the arguments of its own class, which another one would refuse, or worse, take.
Imports no torch.
"""

import re
from collections.abc import Sequence

GROUPS = ("data", "model", "optimizer", "schedule")  # whose options name a class
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w.@/:]+)(?P<rest>=.*)?", re.DOTALL)


def expanded(overrides: Sequence[str]) -> list[str]:
    """Hydra's overrides with the default option left out of each group that gets a `_target_`, so that it starts empty.

    Its settings need no `+` then, and `~` has nothing to remove. Where an option is chosen, too, as in `optimizer=sgd
    optimizer._target_=mine.SGD`, its settings stay. Other arguments of the command line may be among the overrides.
    """
    texts = list(overrides)
    for group in GROUPS:
        keys = [_parts(text) for text in texts]
        is_inline = any(key == f"{group}._target_" and sign != "~" for sign, key, _ in keys)
        if is_inline and not any(key == group for _, key, _ in keys):
            own = [_added(text, group) for text in texts if not _removes(text, group)]
            texts = [*own[: _first(own, group)], f"~{group}", *own[_first(own, group) :]]
    return texts


def _parts(text: str) -> tuple[str, str, str]:
    match = None if text.startswith("-") else _OVERRIDE.fullmatch(text)
    return ("", "", "") if match is None else (match["sign"] or "", match["key"], match["rest"] or "")


def _removes(text: str, group: str) -> bool:
    sign, key, _ = _parts(text)
    return sign == "~" and key.startswith(f"{group}.")


def _added(text: str, group: str) -> str:
    _, key, rest = _parts(text)
    return f"++{key}{rest}" if key.startswith(f"{group}.") else text


def _first(texts: Sequence[str], group: str) -> int:
    """Where the group's overrides begin: flags before them, with their values, stay as they are."""
    return next(number for number, text in enumerate(texts) if _parts(text)[1].startswith(f"{group}."))

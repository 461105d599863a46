"""`optimizer._target_=CLASS` or `optimizer={_target_: CLASS, ...}` on the command line: the class by itself, without
the settings of the group's option.

An option such as `optimizer=adamw` has arguments for its own class, which another would reject or, worse, accept.
Imports no torch.
"""

import re
from collections.abc import Sequence

GROUPS = ("data", "model", "optimizer", "schedule")  # whose options name a class
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w.@/:]+)(?P<rest>=.*)?", re.DOTALL)


def expanded(overrides: Sequence[str]) -> list[str]:
    """Hydra's overrides with the default option left out of each group that gets a `_target_`, so that it starts empty.

    Its settings then need no `+`, and `~` for a setting of the option is dropped. Where an option is chosen, too, as in
    `optimizer=sgd optimizer._target_=mine.SGD`, its settings stay, as they do behind `++optimizer._target_`, which
    replaces a value among others. Other arguments of the command line may be among the overrides.
    """
    texts = [part for text in overrides for part in _of_mapping(text)]
    for group in GROUPS:
        keys = [parts(text) for text in texts]
        is_inline = any(key == f"{group}._target_" and sign in ("", "+") for sign, key, _ in keys)
        is_chosen = any(key == group and (sign == "~" or rest) for sign, key, rest in keys)
        if is_inline and not is_chosen:
            own = [_added(text, group) for n, text in enumerate(texts) if not _removes_default(text, group, texts[:n])]
            texts = [*own[: _first(own, group)], f"~{group}", *own[_first(own, group) :]]
    return texts


def _of_mapping(text: str) -> list[str]:
    """`model={_target_: CLASS, ...}` in place of the option; Hydra would merge it into the default one's settings."""
    sign, key, rest = parts(text)
    is_whole = sign in ("", "+") and key in GROUPS and rest.startswith("={") and "_target_" in rest
    return [f"~{key}", f"++{key}{rest}"] if is_whole else [text]


def parts(text: str) -> tuple[str, str, str]:
    """The sign, name and rest, with its `=`, of an override; empty for other arguments."""
    match = None if text.startswith("-") else _OVERRIDE.fullmatch(text)
    return ("", "", "") if match is None else (match["sign"] or "", match["key"], match["rest"] or "")


def _removes_default(text: str, group: str, before: Sequence[str]) -> bool:
    """Whether it removes a setting of the option's, which an empty group does not have: none that was given before."""
    sign, key, _ = parts(text)
    is_removed = sign == "~" and key.startswith(f"{group}.")
    return is_removed and not any(own == key and sign != "~" for sign, own, _ in map(parts, before))


def _added(text: str, group: str) -> str:
    sign, key, rest = parts(text)
    return f"++{key}{rest}" if sign != "~" and key.startswith(f"{group}.") else text


def _first(texts: Sequence[str], group: str) -> int:
    """Where the group's overrides begin: flags before them, with their values, stay as they are."""
    return next(number for number, text in enumerate(texts) if parts(text)[1].startswith(f"{group}."))

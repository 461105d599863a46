"""Classes from a column of labels."""

from typing import Any

from trainapp.errors import UserError
from trainapp.units import listed


def numbered_classes(rows: Any, train: Any, label: str, wanted: list[str] | None) -> tuple[list[str], dict[Any, int]]:
    """The class names, and the class index of each label. Raises UserError for a label without a class, or a value that
    is not a label.
    """
    if wanted is not None and len(set(wanted)) < len(wanted):
        twice = sorted({name for name in wanted if wanted.count(name) > 1})
        raise UserError(f"data.classes={wanted}: {listed(twice)} is named twice; name each class once")
    names = getattr(rows.features[label], "names", None)
    for column in () if names else (train[label], rows[label]):
        for number, value in enumerate(column):
            if isinstance(value, list | dict):
                raise UserError(
                    f"data.label={label}: row {number} holds a {type(value).__name__} ({str(value)[:60]}), and a text "
                    "has one class: a number or a name; write one per row, or give data and loss of your own"
                )
    values = list(range(len(names))) if names else sorted(set(train[label]) - {None})
    by_name = dict(zip(map(str, names or values), values, strict=True))
    order = list(by_name) if wanted is None else list(wanted)
    missing: list[Any] = [name for name in by_name if name not in order]
    missing += sorted(set(rows[label]) - set(values), key=str)
    if missing:
        raise UserError(
            f"data.label={label}: {listed(map(str, missing))} have no class: not among {listed(order)}, which "
            f"{'the training rows have' if wanted is None else 'data.classes names'}"
        )
    numbers = {by_name[name]: number for number, name in enumerate(order) if name in by_name}
    return order, numbers

"""Rows of texts and labels, read with the package `datasets`, which is imported late."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainapp.config.targets import require_package
from trainapp.errors import UserError
from trainapp.units import listed

log = logging.getLogger(__name__)

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
VALIDATION = ("validation", "valid", "val", "dev", "eval")  # usual names of the split
Classes = tuple[list[str], torch.Tensor | None]  # their names, and the class of each row, int64 [N], if known


def open_rows(path: str | Sequence[str], name: str | None, directory: Path, setting: str = "path") -> dict[str, Any]:
    """Open a data set. Return its splits, by name. Raises UserError if the path holds none.

    Args:
        path: files, a folder, or a name on the hub.
        name: the configuration of a data set on the hub.
        directory: the cache.
        setting: the setting of `data` that holds the path, for messages.
    """
    require_package("datasets", f"data.{setting}={path}")
    import datasets  # late: only these data sets need it

    datasets.disable_progress_bars()
    files = [path] if isinstance(path, str) else path
    paths = [os.path.expanduser(file) for file in files]
    try:
        loaded = _load(paths, name, str(directory / "datasets"))
    except Exception as error:  # a missing or damaged file, a name unknown to the hub, no network
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"data.{setting}={path}: cannot be read: {reason}") from error
    if isinstance(loaded, dict):
        return dict(loaded)
    return {"train": loaded}


def _load(paths: list[str], name: str | None, cache: str) -> Any:
    """Load files of one kind, a folder, or a data set of the hub: one data set, or a dict of its splits."""
    import datasets

    # A folder, as the package has saved it or with files that it knows.
    first = paths[0] if paths else ""
    if len(paths) == 1 and os.path.isdir(first):
        names = os.listdir(first)
        was_saved_by_datasets = "state.json" in names or "dataset_dict.json" in names
        if was_saved_by_datasets:
            return datasets.load_from_disk(first)
        return datasets.load_dataset(first, cache_dir=cache)

    # Files of one kind.
    builders = {BUILDERS.get(Path(path).suffix) for path in paths}
    if len(builders) == 1 and None not in builders:
        return datasets.load_dataset(builders.pop(), data_files=paths, cache_dir=cache)

    # Otherwise a name on the hub.
    looks_like_files = os.path.exists(first) or first.startswith((".", "/")) or "*" in first
    if len(paths) == 1 and not looks_like_files:
        return datasets.load_dataset(first, name)
    raise ValueError(f"name files of one kind ({', '.join(BUILDERS)}), a folder, or a data set on the hub")


def split_rows(
    splits: dict[str, Any], split: str, train_split: str, val_split: str | None, val_fraction: float
) -> tuple[Any, Any]:
    """Return the rows of this split, and the training rows. Raises UserError for a name that no split has.

    Args:
        splits: the data set's own splits, by name.
        split: train or val.
        train_split: the name of the training rows.
        val_split: the name of the validation rows; None: the usual name that there is or, without one, the last
            training rows.
        val_fraction: how many of the training rows are for validation then.
    """
    for setting, chosen in (("train_split", train_split), ("val_split", val_split)):
        if chosen is not None and chosen not in splits:
            raise UserError(f"data.{setting}={chosen}: there is no such split; splits: {listed(sorted(splits))}")

    # The data set's own validation rows.
    all_train_rows = splits[train_split]
    val_name = val_split
    if val_name is None:
        usual_names = [name for name in VALIDATION if name in splits]
        val_name = usual_names[0] if usual_names else None
    if val_name is not None:
        rows = all_train_rows if split == "train" else splits[val_name]
        return rows, all_train_rows

    # Without any, the last training rows.
    total = len(all_train_rows)
    border = total - int(total * val_fraction)
    train_rows = all_train_rows.select(range(border))
    if split == "train":
        return train_rows, train_rows
    val_rows = all_train_rows.select(list(range(border, total)))
    log.info("data.val_fraction=%s: the last %d of %d rows are for validation", val_fraction, len(val_rows), total)
    return val_rows, train_rows


def number_classes(rows: Any, train_rows: Any, label: str, names: list[str] | None) -> Classes:
    """Return the class names, and the class of each row, int64 [N]. Raises UserError for a label without a class, or a
    value that cannot be a label.

    Args:
        rows: whose labels are numbered.
        train_rows: their labels are the classes, unless the column or `names` names them.
        label: the column.
        names: `data.classes`.
    """
    # The labels' names: those of the column if it has any, otherwise the values themselves.
    names_of_column = getattr(rows.features[label], "names", ())
    name_by_value = dict(enumerate(names_of_column))
    try:
        labels = [str(name_by_value.get(value, value)) for value in rows[label]]
        train_names = list(name_by_value.values())
        if not train_names:
            train_values = set(train_rows[label]) - {None}
            train_names = [str(value) for value in sorted(train_values)]
    except TypeError:  # lists, or labels of several types
        raise UserError(
            f"data.label={label}: a text has one class, a number or a name, all of the same type; write one per row, "
            "or use your own data and loss"
        ) from None

    class_names = train_names if names is None else names
    number_by_name = {name: number for number, name in enumerate(class_names)}
    missing = sorted(set(labels) - set(number_by_name))
    if missing:
        owner = "the training rows have" if names is None else "data.classes names"
        raise UserError(
            f"data.label={label}: {listed(missing)} have no class: not among {listed(list(number_by_name))}, which "
            f"{owner}"
        )
    numbers = [number_by_name[name] for name in labels]
    return list(number_by_name), torch.tensor(numbers)

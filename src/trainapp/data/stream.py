"""Streams: data sets that are read from their beginning to their end. What a source is and can do."""

from typing import Any

from torch.utils.data import IterableDataset


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had in turn: a torch IterableDataset, or what has `__iter__` but no indices."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def is_empty(dataset: Any) -> bool:
    """Whether the data set is known to have no samples: of a stream, that shows only when it is read."""
    return not is_stream(dataset) and len(dataset) == 0


def at_most(samples: int, dataset: Any) -> int:
    """This many samples, or all of the data set if it is known to have fewer."""
    return samples if is_stream(dataset) else min(samples, len(dataset))


def has_parts(source: Any) -> bool:
    """Whether the source can be read in parts: one of Hugging Face's, or with a method `shard(index, count)`."""
    return is_of_datasets(source) or callable(getattr(source, "shard", None))


def part_of(source: Any, index: int, count: int) -> Any:
    """The part `index` of `count` that the source makes of itself."""
    if count == 1:
        return source
    if is_of_datasets(source):
        from datasets.distributed import split_dataset_by_node  # the source comes from there, so it is installed

        return split_dataset_by_node(source, index, count)
    return source.shard(index, count)


def tells_position(source: Any) -> bool:
    """Whether its `state_dict` says where it is.

    That of Hugging Face's shuffle buffer does not hold the buffer: samples in it would be lost (datasets 5.2,
    iterable_dataset.py, BufferShuffledExamplesIterable).
    """
    has_protocol = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_protocol and not (is_of_datasets(source) and _has_shuffle_buffer(getattr(source, "_ex_iterable", None)))


def is_of_datasets(source: Any) -> bool:
    """Whether it is one of Hugging Face's."""
    return type(source).__module__.partition(".")[0] == "datasets"


def _has_shuffle_buffer(iterable: Any) -> bool:
    if type(iterable).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(iterable, "ex_iterable", None), *(getattr(iterable, "ex_iterables", None) or ())]
    return any(_has_shuffle_buffer(one) for one in inner if one is not None)

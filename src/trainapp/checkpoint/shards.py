"""The tensors of a checkpoint, through torch.distributed.checkpoint: one format for one process and for many.

Each rank writes its shards into one file; any number of ranks may read them. torch's own reader unpickles the metadata,
which would run code planted there. Here an unpickler that allows a handful of classes reads it, and only tensors are
requested, which torch loads with `weights_only`.
"""

import pickle
import warnings
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainapp.errors import UserError
from trainapp.units import flat, listed

METADATA = ".metadata"
Sizes = dict[str, tuple[torch.Size, torch.dtype]]  # shape and dtype of saved tensors, by name
_METADATA_CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "set")),
}
# torch warns even with `no_dist`; the filter is global because saving runs in a thread.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class _Unpickler(pickle.Unpickler):
    """Resolves only the classes of checkpoint metadata, and dtypes: nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        # By exact name: a dotted one would reach anything that an allowed module or class has imported.
        is_allowed = (module, name) in _ALLOWED
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_allowed or is_dtype:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enum members this way
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """Do `getattr` for members of an enum alone."""
    if not isinstance(kind, EnumMeta):  # among the allowed names, only memory formats are an enum
        raise pickle.UnpicklingError(f"it names {kind}.{name}")
    return kind[name]


class SafeReader(FileSystemReader):
    """Reads the tensors that `write` wrote. Raises UserError for metadata that holds anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata."""
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            entries = metadata.state_dict_metadata.items()
            not_tensors = [name for name, entry in entries if type(entry) is not TensorStorageMetadata]
        except Exception as error:  # planted or damaged bytes raise nearly anything
            raise UserError(
                f"checkpoint {self.path}: its metadata is not a checkpoint's; not loaded: {error}"
            ) from None
        if not_tensors:  # torch would unpickle them, whatever was requested
            raise UserError(f"checkpoint {self.path}: {not_tensors[0]} is not a tensor; not loaded")
        return metadata


def copy_to_host(tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of nested dicts of tensors in host memory, for `write` to save while training changes the
    originals.
    """
    return _writer(folder).stage(_without_empty_dicts(tensors))


def write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the tensors in nested dicts into the existing `folder`, each rank its part. Collective over `group`.

    Raises CheckpointException, a BaseException, on every rank if one could not write.

    Args:
        tensors: nested dicts of tensors, whole or sharded.
        folder: the checkpoint.
        group: a group used for nothing else, since this may run in a thread during training; None for a single process.
    """
    save(_without_empty_dicts(tensors), storage_writer=_writer(folder), process_group=group, no_dist=group is None)


def sizes(folder: Path) -> Sizes:
    """Return shape and dtype of the saved tensors by name: `model.fc.weight`.

    Raises UserError for metadata that holds anything else.
    """
    entries: dict[str, Any] = SafeReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def read(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None, hint: str = "") -> None:
    """Fill the tensors in nested dicts, with any sharding, in place. Collective over `group`.

    For each part of `tensors` (its outermost keys) the checkpoint must hold exactly the same names and shapes, except
    `buffers`, where it may hold more; its other parts are not read. Raises UserError otherwise, with the hint at its
    end.
    """
    # The shapes here and in the checkpoint, by name.
    shapes = {}
    for name, tensor in flat(_without_empty_dicts(tensors)):
        shapes[name] = tuple(tensor.shape)
    saved_shapes = {}
    for name, (shape, _) in sizes(folder).items():
        if name.partition(".")[0] in tensors:
            saved_shapes[name] = tuple(shape)

    # torch would report a part of the differences, one by one.
    only_here = shapes.keys() - saved_shapes.keys()
    only_saved = {name for name in saved_shapes.keys() - shapes.keys() if not name.startswith("buffers.")}
    differences = sorted(only_here | only_saved)
    for name in sorted(shapes.keys() & saved_shapes.keys()):
        if shapes[name] != saved_shapes[name]:
            differences.append(f"{name} {saved_shapes[name]} instead of {shapes[name]}")
    if differences:
        raise UserError(
            f"checkpoint {folder} does not fit this configuration's model or optimizer: {len(differences)} tensors "
            f"differ: {listed(differences, most=4)}{hint}"
        )

    fill(tensors, folder, process_group=group, no_dist=group is None)


def fill(tensors: dict[str, Any], folder: Path, **options: Any) -> None:
    """Fill the tensors in nested dicts, in place. options: of torch's `load`. Raises UserError for unreadable files."""
    try:
        load(_without_empty_dicts(tensors), storage_reader=SafeReader(str(folder)), **options)
    except dcp.api.CheckpointException as error:  # a BaseException
        failures = list(error.failures.values())
        reason, _ = failures[0]  # with its traceback
        raise UserError(f"checkpoint {folder} cannot be read: {reason}") from reason


def _writer(folder: Path) -> FileSystemWriter:
    # The caller syncs the files: torch syncs its metadata before the buffer is flushed.
    return FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=False)


def _without_empty_dicts(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts without those that are empty, which torch would pickle."""
    filled = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _without_empty_dicts(value)
            if not value:
                continue
        filled[name] = value
    return filled

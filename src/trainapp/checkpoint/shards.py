"""Checkpoints of many ranks: each writes its own shards through torch.distributed.checkpoint; any number may read them.

torch's reader unpickles its metadata and loads whatever bytes are in a file. Here metadata is read by an unpickler that
knows a handful of classes, and nothing but tensors is ever asked for (their loader is `weights_only`).
"""

import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainapp.errors import UserError

METADATA = ".metadata"
EXTRA = "extra.pt"
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("builtins", "set"),
}


class _Unpickler(pickle.Unpickler):
    """Finds the classes of a checkpoint's metadata and dtypes, nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = module in _MODULES and isinstance(self._found(module, name), type)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if allowed or is_dtype or (module, name) in _OTHERS:
            return self._found(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def _found(self, module: str, name: str) -> Any:
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads what `write` wrote: tensors. Raises UserError for metadata that holds anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The plan of the checkpoint."""
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            others = [
                n for n, entry in metadata.state_dict_metadata.items() if type(entry) is not TensorStorageMetadata
            ]
        except (pickle.UnpicklingError, AttributeError, EOFError, IndexError, TypeError) as error:
            raise UserError(
                f"checkpoint {self.path}: its metadata is not a checkpoint's; not loaded: {error}"
            ) from None
        if others:  # torch would unpickle them, whatever was asked for
            raise UserError(f"checkpoint {self.path}: {others[0]} is no tensor; not loaded")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def tensors_of(values: dict[str, Any]) -> dict[str, Any]:
    """The tensors in nested dicts, flat: `{"model.fc.weight": ...}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": tensor for inner, tensor in tensors_of(value).items()}
        elif isinstance(value, torch.Tensor):
            flat[name] = value
    return flat


def write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Every rank writes its part into the existing `folder`. Collective over `group`."""
    dcp.save(tensors, storage_writer=_writer(folder), process_group=group, no_dist=group is None)


def write_later(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> Future:
    """The same in the background: tensors are copied to host memory first, then training may go on.

    group: one that nothing else uses; async_save hangs on a shared one.
    """
    return dcp.async_save(tensors, storage_writer=_writer(folder), process_group=group)


def read(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill `tensors`, of whatever sharding, in place. Raises UserError where the checkpoint lacks or differs."""
    try:
        dcp.load(tensors, storage_reader=SafeReader(str(folder)), process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:  # a BaseException
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, UserError):
            raise first from None
        raise UserError(f"checkpoint {folder} does not fit this configuration's model or optimizer: {first}") from None


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=True)

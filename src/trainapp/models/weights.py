"""Loads a model's initial weights from a file."""

import collections
import json
import logging
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.parallel.strategy import copy_into
from trainapp.torch_private import COMPILED_PREFIX
from trainapp.units import listed

log = logging.getLogger(__name__)

WRAPPER_KEYS = ("model", "state_dict", "model_state_dict")  # where training checkpoints keep the weights
INDEX = ".safetensors.index.json"  # suffix of an index, which maps tensors to files
WRAPPER_PREFIXES = ("module.", COMPILED_PREFIX)  # added to every name by DDP and torch.compile


def load_weights(model: nn.Module, path: str | Path, strict: bool = True, prefix: str | None = None) -> list[str]:
    """Copy the tensors of a file into the model's parameters and buffers of the same names: `model.init_from`.

    Returns the model's names that were not loaded, with a warning: empty if strict.
    Raises UserError, before anything is copied, with one message that begins with `model.init_from=<path>: `.

    Args:
        model: the model.
        path: `*.safetensors`, a folder or an index of several such files in the Hub's layout, or a file written by
            `torch.save(state_dict)`. The state dict may be wrapped as `{"model": ...}` or `{"state_dict": ...}`, and
            its names prefixed by DDP or torch.compile. No code in the file is executed.
        strict: whether every name and shape must match. False keeps parameters that the file lacks, or has in another
            shape, and ignores tensors that the model lacks. For weights that only the model ties, the file's first name
            counts.
        prefix: the part of a larger model to load, such as `encoder`; None: all.
    """
    setting = f"model.init_from={path}"
    state_dict = _read(Path(path).expanduser(), setting)
    return load_tensors(model, state_dict, strict, setting, prefix=prefix)


def load_tensors(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool,
    setting: str,
    excluded: Collection[str] = (),
    prefix: str | None = None,
) -> list[str]:
    """Copy the tensors of a state dict into the model, as `load_weights` does.

    Args:
        model: the model.
        state_dict: the tensors by name, possibly wrapped and prefixed.
        strict: see `load_weights`.
        setting: the setting that named them, with its value, for messages.
        excluded: names of parameters to leave unchanged.
        prefix: see `load_weights`.
    """
    targets = _tensors_of(model, excluded)
    sources = _unwrap(state_dict, targets)
    if prefix is not None:
        setting += f": model.init_prefix={prefix}"
        sources = _below(prefix, sources)

    # Sort the names by whether the tensors fit.
    missing = _missing(targets, sources)
    unexpected = [name for name in sources if name not in targets]
    in_both = [name for name in sources if name in targets]
    misshaped = [name for name in in_both if sources[name].shape != targets[name].shape]
    fitting = [name for name in in_both if sources[name].shape == targets[name].shape]
    untied = _untied(fitting, targets, sources)

    # Refuse, before anything is copied, what the user did not allow.
    misshaped_texts = [f"{name}: {_shape(sources[name])}, not {_shape(targets[name])}" for name in misshaped]
    names_by_problem = {
        "missing": missing,
        "not in the model": unexpected,
        "of another shape": misshaped_texts,
        "tied in the model, but not equal in the file": untied,
    }
    has_problems = any(names_by_problem.values())
    if not fitting or (strict and has_problems):
        remedy = "or set model.init_strict=false to load what fits"
        if not fitting:
            remedy = _remedy_where_nothing_fits(targets, sources)
        raise _misfit(setting, names_by_problem, remedy)

    # Copy the tensors that fit, and name all others.
    if unexpected:
        log.warning("%s: not in the model, ignored: %s", setting, listed(unexpected))
    for name in fitting:
        if name not in untied:
            copy_into(targets[name], sources[name])
    not_loaded = missing + misshaped + untied
    if not_loaded:
        log.warning("%s: not loaded, left as initialised: %s", setting, ", ".join(not_loaded))
    return not_loaded


def _misfit(setting: str, names_by_problem: Mapping[str, Sequence[str]], remedy: str) -> UserError:
    """Return the error for weights that do not fit. remedy: beside building the model as it was; may be empty."""
    problems = []
    for problem, names in names_by_problem.items():
        if names:
            problems.append(f"{len(names)} {problem} ({listed(names)})")
    reason = "; ".join(problems) or "there are none"
    remedies = ["Build the model with the settings of their training"]
    if remedy:
        remedies.append(remedy)
    return UserError(f"{setting}: the weights do not fit the model: {reason}. {', '.join(remedies)}")


def _remedy_where_nothing_fits(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> str:
    """Return advice to load the part of the file's model that is this model; empty if there is none."""
    prefix = _fitting_prefix(targets, sources)
    if not prefix:
        return ""
    return (
        f"or set model.init_prefix={prefix} to load that part of a larger model (with model.init_strict=false, if this "
        "model has others as well)"
    )


def _tensors_of(model: nn.Module, excluded: Collection[str]) -> dict[str, Tensor]:
    """Return the model's parameters and buffers by name, tied ones by each of their names."""
    excluded_ids = {id(parameter) for name, parameter in model.named_parameters() if name in excluded}
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in excluded_ids:
            tensors[name] = tensor
    return tensors


def _unwrap(state_dict: Mapping[str, Any], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the model's names, without wrappers' keys and prefixes."""
    innermost = _innermost(state_dict)
    tensors = {str(name): tensor for name, tensor in innermost.items() if isinstance(tensor, Tensor)}
    for prefix in WRAPPER_PREFIXES * 2:  # in either order
        is_added_by_wrapper = _all_begin_with(prefix, tensors) and not _all_begin_with(prefix, targets)
        if is_added_by_wrapper:
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the part with this name, by their names in it."""
    beginning = f"{prefix.rstrip('.')}."
    return {name.removeprefix(beginning): tensor for name, tensor in tensors.items() if name.startswith(beginning)}


def _fitting_prefix(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> str:
    """Return the name of the part of the file's model that has most of the model's tensors; empty if none has any."""
    count_by_prefix: collections.Counter[str] = collections.Counter()
    for name, tensor in sources.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            target = targets.get(".".join(parts[length:]))
            if target is not None and target.shape == tensor.shape:
                count_by_prefix[".".join(parts[:length])] += 1
    if not count_by_prefix:
        return ""
    ((prefix, _),) = count_by_prefix.most_common(1)
    return prefix


def _innermost(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict that a training checkpoint has under one of WRAPPER_KEYS, or else this one."""
    for key in WRAPPER_KEYS:
        if isinstance(state_dict.get(key), Mapping):
            return _innermost(state_dict[key])
    return state_dict


def _all_begin_with(prefix: str, names: Iterable[str]) -> bool:
    return all(name.startswith(prefix) for name in names)


def _missing(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the model's tensors that the file has under none of their names."""
    loaded_ids = {id(tensor) for name, tensor in targets.items() if name in sources}
    names = [name for name, tensor in targets.items() if id(tensor) not in loaded_ids]
    # Old files lack BatchNorm's counter, which matters only to `momentum=None`.
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _untied(names: list[str], targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose tensor in the file differs from an earlier one that the model ties to it."""
    first_names: dict[int, str] = {}  # by the id of the model's tensor
    untied = []
    for name in names:
        first_name = first_names.setdefault(id(targets[name]), name)
        if first_name != name and not torch.equal(sources[name], sources[first_name]):
            untied.append(name)
    return untied


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _read(path: Path, setting: str) -> Mapping[str, Any]:
    """Return the state dict in a file or folder, as it was saved. Raises UserError if there is none."""
    if not path.exists():
        raise UserError(f"{setting}: there is no such file")
    folder = path if path.is_dir() else path.parent
    if (folder / ".metadata").is_file():  # written by torch.distributed.checkpoint
        raise UserError(f"{setting}: is a file of a training checkpoint; give the checkpoint's folder, or the run's")
    if path.is_dir():
        path = _model_in(path, setting)

    try:
        content = _read_file(path)
    except Exception as error:  # damaged or hostile bytes raise nearly anything
        lines = str(error).splitlines()
        reason = lines[0][:200] if lines else ""  # the next lines explain how to allow a pickle
        raise UserError(
            f"{setting}: cannot be read as weights ({type(error).__name__}: {reason}). It must be a .safetensors "
            "file, or a state dict of tensors saved with torch.save: other objects could run code and are refused"
        ) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{setting}: holds a {type(content).__name__}, not a state dict; save model.state_dict()")
    return content


def _model_in(folder: Path, setting: str) -> Path:
    """Return the file or index of the folder's model. Raises UserError unless there is exactly one."""
    candidates = [folder / "model.safetensors", folder / f"model{INDEX}"]
    files = [file for file in candidates if file.is_file()]
    if len(files) != 1:
        raise UserError(f"{setting}: the folder has {len(files)} models named model.safetensors; name a file")
    return files[0]


def _read_file(path: Path) -> Any:
    if path.name.endswith(INDEX):
        return _read_index(path)
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    # Only the zip format can be memory-mapped: its tensors are then read once, directly into the model.
    can_be_mapped = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped)


def _read_index(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all files that an index names, read from its own folder."""
    file_by_tensor = json.loads(path.read_text())["weight_map"]
    file_names = {Path(file).name for file in file_by_tensor.values()}
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(file_names):
        tensors.update(safetensors.torch.load_file(path.parent / file_name))
    return tensors

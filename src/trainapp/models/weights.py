"""Loads a model's initial weights from a file."""

import json
import logging
import zipfile
from collections.abc import Collection, Mapping
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


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> list[str]:
    """Copies the tensors of a file into the model's parameters and buffers of the same names: `model.init_from`.

    path: `*.safetensors`, a folder or an index of several such files in the Hub's layout, or a file written by
    `torch.save(state_dict)`. The state dict may be wrapped as `{"model": ...}` or `{"state_dict": ...}`, and its names
    prefixed by DDP or torch.compile. No code in the file is executed.
    strict: whether every name and shape must match. False keeps parameters that the file lacks, or has in another
    shape, and ignores tensors that the model lacks. For weights that only the model ties, the file's first name counts.
    Returns the model's names that were not loaded, with a warning: empty if strict.
    Raises UserError, before anything is copied, with one message that begins with `model.init_from=<path>: `.
    """
    setting = f"model.init_from={path}"
    return load_tensors(model, _read(Path(path).expanduser(), setting), strict, setting)


def load_tensors(
    model: nn.Module, content: Mapping[str, Any], strict: bool, setting: str, apart: Collection[str] = ()
) -> list[str]:
    """As `load_weights`, from a state dict. setting: the setting that named it, with its value, for messages. apart:
    names of parameters to leave unchanged.
    """
    left = {id(parameter) for name, parameter in model.named_parameters() if name in apart}  # tied ones have two names
    tensors = model.state_dict(keep_vars=True).items()
    own = {name: tensor for name, tensor in tensors if isinstance(tensor, Tensor) and id(tensor) not in left}
    found = _unwrap(content, own)
    loaded = {id(tensor) for name, tensor in own.items() if name in found}

    lacking = [name for name, tensor in own.items() if id(tensor) not in loaded]
    # Old files lack BatchNorm's counter, which matters only to `momentum=None`.
    missing = [name for name in lacking if not name.endswith("num_batches_tracked")]
    unexpected = [name for name in found if name not in own]
    misshaped = [name for name in found if name in own and found[name].shape != own[name].shape]
    fitting = {name: found[name] for name in found if name in own and name not in misshaped}
    untied: list[str] = []
    first: dict[int, str] = {}  # of tied weights, the first name
    for name, tensor in fitting.items():
        if (other := first.setdefault(id(own[name]), name)) != name and not torch.equal(tensor, fitting[other]):
            untied.append(name)
    kinds = {
        "missing": missing,
        "not in the model": unexpected,
        "of another shape": [f"{name}: {list(found[name].shape)}, not {list(own[name].shape)}" for name in misshaped],
        "tied in the model, but not equal in the file": untied,
    }
    misfits = "; ".join(f"{len(names)} {kind} ({listed(names)})" for kind, names in kinds.items() if names)
    if not fitting or (strict and misfits):
        raise UserError(
            f"{setting}: the weights do not fit the model: {misfits or 'there are none'}. Build the model with "
            f"the settings of their training{', or set model.init_strict=false to load what fits' if fitting else ''}"
        )
    if unexpected:
        log.warning("%s: not in the model, ignored: %s", setting, listed(unexpected))
    for name, tensor in fitting.items():
        if name not in untied:
            copy_into(own[name], tensor)
    if skipped := missing + misshaped + untied:
        log.warning("%s: not loaded, left as initialised: %s", setting, ", ".join(skipped))
    return skipped


def _read(path: Path, setting: str) -> Mapping[str, Any]:
    if not path.exists():
        raise UserError(f"{setting}: there is no such file")
    folder = path if path.is_dir() else path.parent
    if (folder / ".metadata").is_file():  # written by torch.distributed.checkpoint
        raise UserError(f"{setting}: is a file of a training checkpoint; give the checkpoint's folder, or the run's")
    if path.is_dir():
        files = [path / name for name in ("model.safetensors", f"model{INDEX}") if (path / name).is_file()]
        if len(files) != 1:
            raise UserError(f"{setting}: the folder has {len(files)} models named model.safetensors; name a file")
        path = files[0]
    try:
        if path.name.endswith(INDEX):
            names = {Path(name).name for name in json.loads(path.read_text())["weight_map"].values()}
            files = [path.parent / name for name in sorted(names)]
        else:
            files = [path] if path.suffix == ".safetensors" else []
        if files:
            return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
        # only the zip format can be memory-mapped: its tensors are then read once, directly into the model
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # damaged or hostile bytes raise nearly anything
        reason = (str(error).splitlines() or [""])[0]  # the next lines explain how to allow a pickle
        raise UserError(
            f"{setting}: cannot be read as weights ({type(error).__name__}: {reason[:200]}). It must be a .safetensors "
            "file, or a state dict of tensors saved with torch.save: other objects could run code and are refused"
        ) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{setting}: holds a {type(content).__name__}, not a state dict; save model.state_dict()")
    return content


def _unwrap(content: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the model's names, without wrappers' keys and prefixes."""
    while wrapped := [content[key] for key in WRAPPER_KEYS if isinstance(content.get(key), Mapping)]:
        content = wrapped[0]
    found = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    for prefix in WRAPPER_PREFIXES * 2:  # in either order
        is_wrapped, is_own = (all(name.startswith(prefix) for name in names) for names in (found, own))
        if is_wrapped and not is_own:
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found

"""Loads a model's initial weights from a file."""

import contextlib
import json
import logging
import pickle
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
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
INDEX = ".safetensors.index.json"  # how the name of an index ends: which tensor is in which file
WRAPPER_PREFIXES = ("module.", COMPILED_PREFIX)  # put before every name by DDP and torch.compile


def load_weights(model: nn.Module, path: str | Path, strict: bool = True) -> list[str]:
    """Copies the tensors of a file into the model's parameters and buffers of the same names: `model.init_from`.

    path: `*.safetensors`, a folder or an index of several such files in the Hub's layout, or what
    `torch.save(state_dict)` wrote. The state dict may be wrapped as `{"model": ...}` or `{"state_dict": ...}`, and its
    names by DDP or torch.compile. No code in the file is executed.
    strict: whether every name and shape must match. False leaves parameters that the file lacks, or has in
    another shape, as they are, and passes over what the model lacks.
    Returns the model's names that were not loaded, with a warning: empty when strict.
    Raises UserError, before anything is copied, with one message that begins with `model.init_from=<path>: `.
    """
    setting = f"model.init_from={path}"
    with _naming(setting):
        return _load(model, _read(Path(path).expanduser()), strict, setting)


def load_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    strict: bool,
    setting: str,
    apart: Collection[str] = (),
) -> list[str]:
    """As `load_weights`, from tensors by name. setting: what named them, with its value, for messages. apart: names of
    parameters that stay as they are.
    """
    with _naming(setting):
        return _load(model, tensors, strict, setting, apart)


@contextlib.contextmanager
def _naming(setting: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error.__cause__


def _load(
    model: nn.Module, content: Mapping[str, Any], strict: bool, setting: str, apart: Collection[str] = ()
) -> list[str]:
    left = {id(parameter) for name, parameter in model.named_parameters() if name in apart}  # a tied one has two names
    tensors = model.state_dict(keep_vars=True).items()
    own = {name: tensor for name, tensor in tensors if isinstance(tensor, Tensor) and id(tensor) not in left}
    found = _unwrap(content, own)
    aliases = {id(tensor): name for name, tensor in own.items() if name in found}
    _refuse_untied(own, found, aliases)

    missing = [name for name, tensor in own.items() if id(tensor) not in aliases and not _optional(name)]
    unexpected = [name for name in found if name not in own]
    misshaped = [name for name in found if name in own and found[name].shape != own[name].shape]
    fitting = {name: found[name] for name in found if name in own and name not in misshaped}
    if not fitting and not misshaped:
        raise UserError(f"no name fits the model: it has {listed(own)}; the file has {listed(found)}")
    if not fitting or (strict and (missing or unexpected or misshaped)):
        raise UserError(_misfit(own, found, missing, unexpected, misshaped))
    if unexpected:
        log.warning("%s: not in the model, passed over: %s", setting, listed(unexpected))
    for name, tensor in fitting.items():
        copy_into(own[name], tensor)
    if skipped := missing + misshaped:
        log.warning("%s: not loaded, left as initialised: %s", setting, ", ".join(skipped))
    return skipped


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise UserError("there is no such file")
    folder = path if path.is_dir() else path.parent
    if (folder / ".metadata").is_file():  # as torch.distributed.checkpoint leaves it
        raise UserError(
            f"is a training checkpoint; write its weights to a file first, with mode=export "
            f"checkpointing.resume={folder} and the model's settings, and give that model.safetensors"
        )
    files = _safetensors_of(path)
    try:
        if files:
            return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
        # only the zip format can be mapped: its tensors are then read once, straight into the model
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # damaged or hostile bytes raise nearly anything
        raise UserError(
            f"cannot be read as weights ({_reason(error)}). It must be a .safetensors file, or a state dict "
            "of tensors saved with torch.save: other objects could run code and are refused"
        ) from error
    if not isinstance(content, Mapping):
        raise UserError(f"holds a {type(content).__name__}, not a state dict; save model.state_dict()")
    return content


def _safetensors_of(path: Path) -> list[Path]:
    """The files that `path` stands for: itself, or those of an export in several. Empty for a file of another kind."""
    if path.is_dir():
        choices = [path / name for name in ("model.safetensors", f"model{INDEX}") if (path / name).is_file()]
        if len(choices) != 1:
            found = "two models, model.safetensors and one in several files" if choices else "no model.safetensors"
            raise UserError(f"is a folder with {found}; give the .safetensors or .pt file with the weights")
        path = choices[0]
    if not path.name.endswith(INDEX):
        return [path] if path.suffix == ".safetensors" else []
    try:
        names = sorted({Path(name).name for name in json.loads(path.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path.name} is no index of files of weights ({type(error).__name__})") from error
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise UserError(f"{path.name} names files that are not there: {listed(missing)}")
    return [path.parent / name for name in names]


def _reason(error: Exception) -> str:
    """One line; torch's own message for a refused pickle is a page that tells how to let it run."""
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds a {refused[1]}"
    if isinstance(error, pickle.UnpicklingError):
        return "it is a pickle of another kind"
    lines = str(error).splitlines() or [""]
    return f"damaged or of another kind: {type(error).__name__}: {lines[0][:120]}"


def _unwrap(content: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the model's kind of names."""
    while wrapped := [content[key] for key in WRAPPER_KEYS if isinstance(content.get(key), Mapping)]:
        content = wrapped[0]
    found = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    if not found:
        raise UserError(f"holds no tensors, only {listed(map(str, content))}")
    while prefix := next((p for p in WRAPPER_PREFIXES if _all_start(found, p)), None):
        if _all_start(own, prefix):
            break
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _all_start(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _optional(name: str) -> bool:
    """Old files lack BatchNorm's counter, which matters only to `momentum=None`."""
    return name.endswith("num_batches_tracked")


def _refuse_untied(own: Mapping[str, Tensor], found: Mapping[str, Tensor], aliases: Mapping[int, str]) -> None:
    for name, tensor in own.items():
        other = aliases.get(id(tensor), name)
        if name in found and name != other and not torch.equal(found[name], found[other]):
            raise UserError(
                f"{name} and {other} are one tensor in this model but differ in the file; "
                "untie them (in gpt: model.tie_embeddings=false)"
            )


def _misfit(
    own: dict[str, Tensor],
    found: dict[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    misshaped: list[str],
) -> str:
    """What does not fit, and what to do about it."""
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing ({listed(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} not in the model ({listed(unexpected)})")
    if misshaped:
        shapes = [f"{name}: {list(found[name].shape)}, not {list(own[name].shape)}" for name in misshaped]
        parts.append(f"{len(misshaped)} of another shape ({listed(shapes)})")
    some_fit = len(misshaped) + len(unexpected) < len(found)
    otherwise = ", or set model.init_strict=false to load what fits" if some_fit else ""
    return (
        f"the weights do not fit the model: {'; '.join(parts)}. Give the model the settings that the weights "
        f"were trained with{otherwise}"
    )

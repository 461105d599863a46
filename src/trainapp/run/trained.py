"""A run's trained model: `mode=export` and `trainapp.load`, in one process, on the CPU, from a checkpoint of any number
of ranks.

An export is safetensors. A Transformers model, or adapters, become a folder that their own libraries open, with the
data's tokenizer beside the weights.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from trainapp.assembly.model import build_model
from trainapp.assembly.resources import open_resources
from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import checkpoints_in, resolve
from trainapp.checkpoint.manifest import read_manifest
from trainapp.checkpoint.train_state import require_same_data
from trainapp.config.claimed_settings import with_claimed_settings
from trainapp.config.excludes import NO_BEST
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.files import BEST, CHECKPOINTS, strict_json
from trainapp.hooks.callbacks import labels_of
from trainapp.models import adapters
from trainapp.models.inspect import is_of_transformers, restore_cache
from trainapp.parallel.ranks import SingleRank
from trainapp.run.resume import BUILT_FROM, as_saved, saved_config
from trainapp.units import bytes_text, listed

log = logging.getLogger(__name__)


def model(run_dir: Path, which: str | Path, user_packages: Sequence[str]) -> nn.Module:
    """Return the model of a run: see `trainapp.load`.

    Args:
        run_dir: absolute.
        which: best, last, or a checkpoint.
        user_packages: the caller's. The checkpoint's are not trusted: they could import planted code.
    """
    # The checkpoint.
    name = str(which)
    if name == "best" and not _has_best(run_dir):
        log.info("trainapp.load: %s, so this is the last checkpoint of %s", NO_BEST, run_dir)
        name = "last"
    if name == "best":
        name = str(run_dir / CHECKPOINTS / BEST)
    elif name == "last":
        name = str(run_dir)
    path = resolve(name, "trainapp.load: which")

    # The settings that its model is built from.
    config = _saved_sections(path, (*BUILT_FROM, "train", "batch"))
    config = dataclasses.replace(config, user_packages=list(user_packages))
    trained = _trained(config, path)
    if config.adapter.base_dtype == "bf16":
        trained.model.float()  # all fp32, as the head is
    return trained.model


def _has_best(run_dir: Path) -> bool:
    """Return `Config.has_best` of the run in this directory; True if it has no checkpoint that tells."""
    for path in checkpoints_in(run_dir / CHECKPOINTS):
        with contextlib.suppress(OSError, ValueError):
            return _saved_sections(path, (*BUILT_FROM, "objective")).has_best
    return True


def _saved_sections(path: Path, sections: Sequence[str]) -> Config:
    """Return a configuration with these sections of the checkpoint at `path`, and defaults for all else."""
    saved = read_manifest(path)["config"]
    values = {section: saved[section] for section in sections}
    return saved_config(path, values)


class Trained(NamedTuple):
    """A trained model, and what an export writes beside its weights."""

    model: nn.Module  # in evaluation mode, on the CPU
    data: Any  # the training data
    values: dict[str, Any]  # the checkpoint's plain values


def _trained(config: Config, path: Path) -> Trained:
    """Return the model of these settings with the weights in the checkpoint at `path`: their average if the run kept
    one.
    """
    # On the CPU, in the dtype of the weights: no mode but `bf16_pure` has another one than fp32.
    config = with_claimed_settings(config)
    precision = config.precision
    if precision.mode != "bf16_pure":
        precision = dataclasses.replace(precision, mode="fp32")
    config = dataclasses.replace(
        config,
        mode="export",
        train=dataclasses.replace(config.train, device="cpu", deterministic=False, detect_anomaly=False),
        data=dataclasses.replace(config.data, num_workers=0),
        precision=precision,
    )

    with contextlib.closing(open_resources(config, SingleRank())) as resources:
        data = resources.targets.train_data
        model, filled = build_model(config, resources)

    # The weights, which must have been trained on data that is numbered alike.
    values = checkpointer.restore_model(model, path, filled)
    with checkpointer.misfits_named(path):
        require_same_data(labels_of(data), getattr(data, "vocabulary", ""), values)
    return Trained(model.eval(), data, values)


def export(config: Config) -> list[Path]:
    """Write the weights of the checkpoint that `checkpointing.resume` names (their average if the run kept one):
    `mode=export`. Return the files of weights.

    If the data names its classes, `class_names.json` lists them in the order of the model's outputs. Raises UserError
    if `export.merge` does not apply, and for a folder with other weights.
    """
    path = resolve(config.checkpointing.resume)
    folder = Path(config.export.folder or Path(config.run_dir) / "export")
    trained = _trained(as_saved(config, path), path)
    if config.export.merge:
        _merge_adapters(trained.model, config)
    has_adapters = adapters.base_of(trained.model) is not None and not config.export.merge
    _require_no_other_weights(folder, has_adapters)
    _write_model(folder, trained, has_adapters)

    # What stands beside the weights.
    save_tokenizer = getattr(trained.data, "save_tokenizer", None)
    if callable(save_tokenizer) and (has_adapters or is_of_transformers(trained.model)):
        save_tokenizer(folder)
    class_names = folder / "class_names.json"
    class_names.unlink(missing_ok=True)  # names of an earlier export would not fit these weights
    if trained.values["class_names"]:
        class_names.write_text(strict_json(trained.values["class_names"], indent=1) + "\n")

    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read
    total_bytes = sum(file.stat().st_size for file in files)
    log.info("exported %s of weights to %s", bytes_text(total_bytes), folder)
    return files


def _merge_adapters(model: nn.Module, config: Config) -> None:
    """Add the adapters to the weights of their layers, in the dtype of `export.merge_dtype`."""
    if adapters.base_of(model) is None:
        raise UserError("export.merge=true: the model has no adapters; leave it out")
    adapters.merge(model)
    if config.export.merge_dtype == "bf16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)


def _require_no_other_weights(folder: Path, has_adapters: bool) -> None:
    """Raise UserError for a folder with weights that the export would not replace."""
    replaced = {"model.safetensors"}
    if has_adapters:
        replaced = {"adapter_model.safetensors", "adapter_config.json"}
    other_weights: set[str] = set()
    for pattern in ("*.safetensors", "*.safetensors.index.json", "adapter_config.json"):
        other_weights.update(file.name for file in folder.glob(pattern))
    other_weights -= replaced
    if other_weights:
        raise UserError(
            f"export.folder={folder}: it holds other weights, which would be mixed with these "
            f"({listed(sorted(other_weights))}); name another folder, or remove them"
        )


def _write_model(folder: Path, trained: Trained, has_adapters: bool) -> None:
    """Write the weights, in the layout of the library that opens them."""
    model = trained.model
    if is_of_transformers(model) and not has_adapters:
        restore_cache(model)
        model.save_pretrained(str(folder))  # type: ignore[operator]  # the hub's layout may differ from the memory's
        return
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapters:
        tensors, settings = adapters.exported_adapters(model, trained.values["model_values"]["written"])
        _write(folder / "adapter_model.safetensors", tensors)
        settings.save_pretrained(str(folder))
    else:
        _write(folder / "model.safetensors", model.state_dict(keep_vars=True))


def _write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write the tensors; tied weights once, under their first name."""
    first_names: dict[int, str] = {}  # by id of the tensor
    for name, tensor in tensors.items():
        if torch.is_tensor(tensor):
            first_names.setdefault(id(tensor), name)

    # Copies of their own: safetensors refuses tensors that share memory.
    weights = {}
    for name in first_names.values():
        weights[name] = tensors[name].detach().clone().contiguous()
    save_file(weights, path, metadata={"format": "pt"})

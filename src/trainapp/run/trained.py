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
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from trainapp.assembly.model import build_model
from trainapp.assembly.resources import open_resources
from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import checkpoints_in, resolve
from trainapp.checkpoint.manifest import read_manifest
from trainapp.checkpoint.train_state import require_same_data
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
    """See `trainapp.load`. run_dir: absolute. user_packages: the caller's. The checkpoint's are not trusted: they could
    import planted code.
    """
    if str(which) == "best" and not _has_best(run_dir):
        log.info("trainapp.load: %s, so this is the last checkpoint of %s", NO_BEST, run_dir)
        which = "last"
    named = {"best": run_dir / CHECKPOINTS / BEST, "last": run_dir}
    path = resolve(str(named.get(str(which), which)), "trainapp.load: which")
    saved = read_manifest(path)["config"]
    config = saved_config(path, {name: saved[name] for name in (*BUILT_FROM, "train")})
    loaded, _, _ = _trained(dataclasses.replace(config, user_packages=list(user_packages)), path)
    return loaded.float() if config.adapter.base_dtype == "bf16" else loaded  # all fp32, as the head is


def _has_best(run_dir: Path) -> bool:
    """Return `Config.has_best` of the run in this directory; True if it has no checkpoint that tells."""
    for path in checkpoints_in(run_dir / CHECKPOINTS):
        with contextlib.suppress(OSError, ValueError):
            saved = read_manifest(path)["config"]
            return saved_config(path, {name: saved[name] for name in (*BUILT_FROM, "objective")}).has_best
    return True


def _trained(config: Config, path: Path) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model of these settings in evaluation mode, with the weights in the checkpoint at `path` (their average if
    the run kept one); the training data; and the checkpoint's plain values.
    """
    mode = config.precision.mode
    config = dataclasses.replace(
        config,
        mode="export",
        train=dataclasses.replace(config.train, device="cpu", deterministic=False, detect_anomaly=False),
        data=dataclasses.replace(config.data, num_workers=0),
        # Only bf16_pure has weights in another dtype.
        precision=dataclasses.replace(config.precision, mode=mode if mode == "bf16_pure" else "fp32"),
    )
    with contextlib.closing(open_resources(config, SingleRank())) as resources:
        data, built = resources.targets.train_data, build_model(config, resources)
    values = checkpointer.restore_model(built, path, resources.filled)
    with checkpointer.misfits_named(path):
        require_same_data(labels_of(data), getattr(data, "vocabulary", ""), values)
    return built.eval(), data, values


def export(config: Config) -> list[Path]:
    """`mode=export`: write the weights of the checkpoint that `checkpointing.resume` names (their average if the run
    kept one). Returns the files of weights.

    If the data names its classes, `class_names.json` lists them in the order of the model's outputs. Raises UserError
    if `export.merge` does not apply, and for a folder with other weights.
    """
    path = resolve(config.checkpointing.resume)
    folder = Path(config.export.folder or Path(config.run_dir) / "export")
    trained, data, values = _trained(as_saved(config, path), path)
    has_adapters = adapters.base_of(trained) is not None
    if config.export.merge:
        if not has_adapters:
            raise UserError("export.merge=true: the model has no adapters; leave it out")
        adapters.merge(trained)
        has_adapters = False
        if config.export.merge_dtype == "bf16":
            for parameter in trained.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
    own = {"adapter_model.safetensors", "adapter_config.json"} if has_adapters else {"model.safetensors"}
    patterns = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
    if others := {file.name for pattern in patterns for file in folder.glob(pattern)} - own:
        raise UserError(
            f"export.folder={folder}: it holds other weights, which would be mixed with these "
            f"({listed(sorted(others))}); name another folder, or remove them"
        )
    if has_adapters:
        tensors, settings = adapters.exported(trained, values["model_values"]["written"])
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "adapter_model.safetensors", tensors)
        settings.save_pretrained(str(folder))
    elif is_of_transformers(trained):
        restore_cache(trained)
        trained.save_pretrained(str(folder))  # type: ignore[operator]  # the hub's layout may differ from the memory's
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "model.safetensors", trained.state_dict(keep_vars=True))
    save_tokenizer = getattr(data, "save_tokenizer", None)
    if callable(save_tokenizer) and (has_adapters or is_of_transformers(trained)):
        save_tokenizer(folder)
    names = folder / "class_names.json"
    names.unlink(missing_ok=True)  # names of an earlier export would not fit these weights
    if values["class_names"]:
        names.write_text(strict_json(values["class_names"], indent=1) + "\n")
    written = sorted(folder.glob("*.safetensors"))
    for file in written:
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read
    log.info("exported %s of weights to %s", bytes_text(sum(file.stat().st_size for file in written)), folder)
    return written


def _write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write the tensors; tied weights once, under their first name."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if torch.is_tensor(tensor):
            names.setdefault(id(tensor), name)
    weights = {name: tensors[name].detach().clone().contiguous() for name in names.values()}
    save_file(weights, path, metadata={"format": "pt"})

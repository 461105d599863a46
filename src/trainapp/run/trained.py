"""A trained model out of its run: `mode=export`, `trainapp.load`, and the weights that another run begins with.

An export is safetensors from any number of ranks, in one file or several. A model of Transformers, or adapters, become
a folder that their own libraries open, with the tokenizer of the data beside the weights.
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

from trainapp.assembly import build
from trainapp.checkpoint import checkpointer, shards
from trainapp.checkpoint.directory import CheckpointDirectory, read_manifest, resolve
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.files import strict_json
from trainapp.models import adapters
from trainapp.models.inspect import as_published, is_of_transformers
from trainapp.models.weights import load_tensors
from trainapp.parallel.ranks import SingleRank, answered_by_rank_zero
from trainapp.parallel.strategy import is_shard, whole
from trainapp.run.resume import BUILT_FROM, saved_config
from trainapp.signals import StopRequest
from trainapp.training.session import Session
from trainapp.units import bytes_text, listed

log = logging.getLogger(__name__)


def model(run_dir: Path, which: str | Path, user_packages: Sequence[str]) -> nn.Module:
    """See `trainapp.load`. run_dir: absolute."""
    path = _checkpoint(run_dir, which)
    config = _settings_of(path, user_packages)
    with contextlib.closing(build.build(config, StopRequest(), SingleRank())) as session:
        checkpointer.restore(session.state, path, session.ranks)
        session.state.average.replace_weights()
        loaded = session.state.model
        return (loaded.float() if config.adapter.base_dtype == "bf16" else loaded).eval()  # its head is in fp32


def _checkpoint(run_dir: Path, which: str | Path) -> Path:
    """Raises UserError where there is none, or a damaged one."""
    try:
        if not isinstance(which, str | Path) or not str(which):
            raise UserError("which must be 'best', 'last' or the path of a checkpoint")
        if which == "last":
            return resolve(str(run_dir))
        if which != "best":
            return resolve(str(Path(which).expanduser()))
        best = CheckpointDirectory(run_dir, 1, SingleRank()).best()
        if best is None and run_dir.is_dir():
            raise UserError("it has no best checkpoint: the run saved none at an evaluation; use which='last'")
        return resolve(str(best or run_dir))
    except UserError as error:
        reason = str(error).removeprefix("checkpointing.resume=")
        raise UserError(f"trainapp.load: run_dir={run_dir}, which={str(which)!r}: {reason}") from None


def _settings_of(path: Path, user_packages: Sequence[str]) -> Config:
    """The settings in a checkpoint, as far as they make the model, for the CPU.

    user_packages: the caller's. Those in the checkpoint are not trusted: with them, a planted name would run.
    """
    saved = read_manifest(path)["config"]
    config = saved_config(path, {name: saved[name] for name in (*BUILT_FROM, "train")})
    mode = config.precision.mode
    on_cpu = {"device": "cpu", "compile": False, "deterministic": False, "detect_anomaly": False}
    changes: dict[str, Any] = {
        "mode": "export",
        "user_packages": list(user_packages),
        "train": dataclasses.replace(config.train, **on_cpu),  # type: ignore[arg-type]
        "data": dataclasses.replace(config.data, num_workers=0),
        # The weights come from the checkpoint; with adapters, it has those alone.
        "model": dataclasses.replace(config.model, init_from=None) if config.adapter.kind == "none" else config.model,
        # The others differ from fp32 in how they compute; this one in what the weights are.
        "precision": dataclasses.replace(config.precision, mode=mode if mode == "bf16_pure" else "fp32"),
        "optimizer": dataclasses.replace(config.optimizer, fused="auto", in_backward=False, offload=False),
    }
    return dataclasses.replace(config, **changes)


def load_weights(session: Session, path: Path) -> None:
    """Copy the weights in the checkpoint at `path` into the model, by the rules of `model.init_from`.

    They are those that `mode=export` would write: parameters, by their average if that run kept one, and buffers. Every
    rank reads them whole into host memory, and keeps its part. Of a run with adapters they are the adapters, and
    what forwards have written, for the same base. Raises UserError, before anything is copied, where they do not fit.
    """
    checkpointer.require_same_base(session.state.model, path)
    config, saved = session.config, shards.sizes(path)
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    sources = {name: f"average.{name}" if f"average.{name}" in saved else f"model.{name}" for name in names}
    read = shards.read_whole(sources.values(), path)
    weights = {name: read[source] for name, source in sources.items()}
    setting = f"checkpointing.resume={config.checkpointing.resume}"
    base = adapters.base_of(session.state.model)
    apart = frozenset() if base is None else base.names.difference(names)
    load_tensors(session.state.model, weights, config.model.init_strict, setting, apart)
    session.state.average.start_at_weights()
    log.info(
        "begins at step 0 with the %sweights of %s (step %d), and with nothing else of that run",
        "averaged " if any(source.startswith("average.") for source in read) else "",
        path,
        read_manifest(path)["step"],
    )


def export(session: Session, folder: Path, largest: int) -> list[Path]:
    """Write the run's model into the folder, with the weight average if the run keeps one. Collective. Returns the
    files of weights.

    Where the data names its classes, `class_names.json` lists them in the order of the model's outputs.
    largest: bytes per file. Raises UserError for `export.merge` where it does not apply.
    """
    if session.config.export.merge:
        _merge_adapters(session)
    state, average = session.state, session.state.average
    _require_replaceable(session, folder, largest)
    folder.mkdir(parents=True, exist_ok=True)
    # Swapped in, so that the state dict has them under whatever names, and in whatever form, hooks give them. Shards
    # stay: `_gathered` finds those of their averages.
    with contextlib.nullcontext() if any(map(is_shard, average.weights)) else average.in_place_of_weights():
        if adapters.base_of(state.model) is not None:
            written = _export_adapters(session, folder)
        elif is_of_transformers(state.model):
            written = _export_transformers(session, folder, largest)
        else:
            written = _export_weights(session, folder, largest)
    if session.ranks.is_rank_zero:  # after the weights, which may be refused
        names = folder / "class_names.json"
        names.unlink(missing_ok=True)  # those of an earlier export would be taken for these weights'
        if state.class_names:
            names.write_text(strict_json(state.class_names, indent=1) + "\n")
        size = bytes_text(sum(path.stat().st_size for path in written))
        log.info("exported %s of weights to %s (%d file%s)", size, folder, len(written), "s" * (len(written) > 1))
    return written


def _merge_adapters(session: Session) -> None:
    """`export.merge=true`: add the adapters to the weights beside which they were trained, in place.

    With a weight average, its values. Raises UserError for a model without adapters, and for one in shards.
    """
    model = session.state.model
    if adapters.base_of(model) is None:
        raise UserError("export.merge=true: the model has no adapters; leave it out")
    if any(is_shard(parameter) for parameter in model.parameters()):
        raise UserError(
            "export.merge=true with parallel=fsdp: an adapter is merged into whole weights, of which each rank has a "
            "shard; use parallel=single, which reads checkpoints of any number of ranks"
        )
    session.state.average.replace_weights()
    adapters.merge(model)
    if session.config.export.merge_dtype == "bf16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)


def _require_replaceable(session: Session, folder: Path, largest: int) -> None:
    """Raises UserError where the folder has weights that this export would not replace: a reader would find two models.
    Collective.
    """
    replaced = {"adapter_model.safetensors", "adapter_config.json"}
    if adapters.base_of(session.state.model) is None:
        replaced = {"model.safetensors"} if len(_files(_tensors_of(session.state.model), largest)) == 1 else set()
    patterns = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
    present = {path.name for pattern in patterns for path in folder.glob(pattern)}
    if left := answered_by_rank_zero(session.ranks, lambda: sorted(present - replaced)):
        raise UserError(
            f"export.folder={folder}: it holds other weights, which would be mixed with these ({listed(left)}); name "
            "another folder, or remove them"
        )


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the state dict; tied weights once, under their first name."""
    tensors, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(value) and id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _files(tensors: Mapping[str, torch.Tensor], largest: int) -> list[list[str]]:
    """The names of the tensors in each file of at most `largest` bytes, or of a single tensor."""
    files: list[list[str]] = []
    size = largest
    for name, tensor in tensors.items():
        if not files or size + tensor.nbytes > largest:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    return files


def _export_weights(session: Session, folder: Path, largest: int) -> list[Path]:
    """Write `model.safetensors`, or files of at most `largest` bytes with an index in the Hub's layout.

    Collective: shards are gathered file by file, so that rank 0 holds at most one file's worth.
    """
    tensors = _tensors_of(session.state.model)
    files = _files(tensors, largest)
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weights = _gathered(session, {name: tensors[name] for name in names})
        if session.ranks.is_rank_zero:
            _write(folder / name, weights)
        places |= dict.fromkeys(names, name)
    if not session.ranks.is_rank_zero:
        return []
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(strict_json(index, indent=1) + "\n")
    return [folder / name for name in dict.fromkeys(places.values())]


def _export_adapters(session: Session, folder: Path) -> list[Path]:
    """Write `adapter_model.safetensors` and `adapter_config.json`. Collective."""
    tensors, settings = adapters.exported(session.state.model, session.state.written(session.ranks))
    weights = _gathered(session, tensors)
    if not session.ranks.is_rank_zero:
        return []
    path = folder / "adapter_model.safetensors"
    _write(path, weights)
    settings.save_pretrained(str(folder))
    _save_tokenizer(session, folder)
    return [path]


def _export_transformers(session: Session, folder: Path, largest: int) -> list[Path]:
    """Write what Transformers' own `save_pretrained` writes. Collective; rank 0 holds all weights at once.

    Transformers restores the layout of the hub, which for some models is not that of the weights in memory.
    """
    model: Any = session.state.model
    weights = _gathered(session, model.state_dict(keep_vars=True))
    if not session.ranks.is_rank_zero:
        return []
    with as_published(model):
        model.save_pretrained(str(folder), state_dict=weights, max_shard_size=largest)
    _save_tokenizer(session, folder)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors lets only the owner read
    return files


def _gathered(session: Session, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors in host memory, by the average of a sharded weight if there is one; tied ones stay one tensor.
    Empty on ranks other than 0, which take part in gathering.
    """
    average = session.state.average
    averages = {id(w): own for w, own in zip(average.weights, average.averages, strict=True) if is_shard(w)}
    gathered: dict[int, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not torch.is_tensor(tensor):
            continue
        if id(tensor) not in gathered:
            value = whole(averages.get(id(tensor), tensor).detach()).cpu().contiguous()
            gathered[id(tensor)] = value if session.ranks.is_rank_zero else value.new_empty(0)
        weights[name] = gathered[id(tensor)]
    return weights if session.ranks.is_rank_zero else {}


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors lets only the owner read


def _save_tokenizer(session: Session, folder: Path) -> None:
    save = getattr(session.batches.dataset, "save_tokenizer", None)
    if callable(save):
        save(folder)

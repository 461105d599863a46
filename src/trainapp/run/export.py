"""`mode=export`: the weights of a checkpoint as safetensors, in one file or several, from any number of ranks.

A model of Transformers, or adapters, become a folder that their own libraries open: see `export_pretrained`.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainapp import strict_json
from trainapp.errors import UserError
from trainapp.models import transformers_models
from trainapp.models.adapters import base_of
from trainapp.parallel.dtensor import is_shard, whole
from trainapp.parallel.rank_zero import answered_by_rank_zero
from trainapp.run import export_pretrained
from trainapp.run.export_pretrained import averages_by_id
from trainapp.train.run import Run
from trainapp.units import bytes_text, listed

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
log = logging.getLogger(__name__)


def export(run: Run, folder: Path, largest: int) -> list[Path]:
    """Write the run's model into the folder, with the weight average if the run keeps one. Collective. Returns the
    files of weights.

    Where the data names its classes, `class_names.json` lists them in the order of the model's outputs.
    largest: bytes per file. Raises UserError for `export.merge` where it does not apply.
    """
    if run.config.export.merge:
        export_pretrained.merge_adapters(run)
    _require_replaceable(run, folder, largest)
    folder.mkdir(parents=True, exist_ok=True)
    with _averages_as_weights(run):
        if base_of(run.state.model) is not None:
            written = export_pretrained.export_adapters(run, folder)
        elif transformers_models.is_one(run.state.model):
            written = export_pretrained.export_transformers(run, folder, largest)
        else:
            written = export_weights(run, folder, largest)
    if run.ranks.is_rank_zero:  # after the weights, which may be refused
        _write_class_names(run, folder / "class_names.json")
    return written


def _averages_as_weights(run: Run) -> AbstractContextManager[None]:
    """Swapped into the model, whose state dict then has them under whatever names, and in whatever form, hooks give
    them. Shards stay: their part in a DTensor cannot be swapped, and `averages_by_id` finds them.
    """
    is_sharded = any(map(is_shard, run.state.average.weights))
    return nullcontext() if is_sharded else run.state.average.in_place_of_weights()


def _write_class_names(run: Run, path: Path) -> None:
    """Those of an earlier export would be taken for these weights'."""
    if run.state.class_names:
        path.write_text(strict_json.dumps(run.state.class_names, indent=1) + "\n")
    else:
        path.unlink(missing_ok=True)


def _require_replaceable(run: Run, folder: Path, largest: int) -> None:
    """Raises UserError where the folder has weights that this export would not replace: a reader would find two models.
    Collective.
    """
    replaced = {"adapter_model.safetensors", "adapter_config.json"}
    if base_of(run.state.model) is None:
        tensors = {
            id(tensor): tensor for tensor in run.state.model.state_dict(keep_vars=True).values()
        }  # tied ones once
        size = sum(tensor.nbytes for tensor in tensors.values() if torch.is_tensor(tensor))
        replaced = {"model.safetensors"} if size <= largest else set()
    present = {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)}
    if left := answered_by_rank_zero(run.ranks, lambda: sorted(present - replaced)):
        raise UserError(
            f"export.folder={folder}: it holds other weights, which would be mixed with these ({listed(left)}); name "
            "another folder, or remove them"
        )


def export_weights(run: Run, folder: Path, largest: int) -> list[Path]:
    """Write `model.safetensors`, or files of at most `largest` bytes with an index in the Hub's layout.

    Tied weights are written once, under their first name. Collective: shards are gathered one tensor at a time, so that
    rank 0 holds at most one file's worth.
    """
    parts: list[Path] = []
    places: dict[str, Path] = {}
    waiting: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal waiting, size
        if waiting and run.ranks.is_rank_zero:
            path = folder / f".part-{len(parts):05d}.safetensors"
            path.touch()
            mode = path.stat().st_mode
            save_file(waiting, path, metadata={"format": "pt"})
            path.chmod(mode)  # safetensors lets only the owner read
            places.update(dict.fromkeys(waiting, path))
            parts.append(path)
        waiting, size = {}, 0

    seen: set[int] = set()
    averages = averages_by_id(run)
    for name, tensor in run.state.model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not torch.is_tensor(tensor):
            continue
        seen.add(id(tensor))
        value = whole(averages.get(id(tensor), tensor).detach()).cpu().contiguous()
        if size and size + value.nbytes > largest:
            flush()
        if run.ranks.is_rank_zero:
            waiting[name] = value.clone()
        size, total = size + value.nbytes, total + value.nbytes
    flush()
    return _name_files(folder, parts, places, total) if run.ranks.is_rank_zero else []


def _name_files(folder: Path, parts: list[Path], places: dict[str, Path], total: int) -> list[Path]:
    """Rename the parts: their final names include the number of files. Returns the paths."""
    names = {
        part: "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        for number, part in enumerate(parts, start=1)
    }
    written = [part.rename(folder / names[part]) for part in parts]
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[part] for name, part in places.items()}}
        (folder / "model.safetensors.index.json").write_text(strict_json.dumps(index, indent=1) + "\n")
    log.info(
        "exported %s of weights to %s (%d file%s)", bytes_text(total), folder, len(written), "s" * (len(written) > 1)
    )
    return written

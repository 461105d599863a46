"""Exports that other libraries open: a folder for `from_pretrained` of Transformers, or for peft's PeftModel.

With the tokenizer of the data beside the weights, where it has one.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainapp.errors import UserError
from trainapp.models import adapters, transformers_models
from trainapp.parallel.dtensor import is_shard, whole
from trainapp.train.run import Run
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


def merge_adapters(run: Run) -> None:
    """`export.merge=true`: add the adapters to the weights beside which they were trained, in place.

    With a weight average, its values. Raises UserError for a model without adapters, and for one in shards.
    """
    model = run.state.model
    if adapters.base_of(model) is None:
        raise UserError("export.merge=true: the model has no adapters; leave it out")
    if any(is_shard(parameter) for parameter in model.parameters()):
        raise UserError(
            "export.merge=true with parallel=fsdp: an adapter is merged into whole weights, of which each rank has a "
            "shard; use parallel=single, which reads checkpoints of any number of ranks"
        )
    run.state.average.replace_weights()
    adapters.merge(model)
    if run.config.export.merge_dtype == "bf16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)


def export_adapters(run: Run, folder: Path) -> list[Path]:
    """Write `adapter_model.safetensors` and `adapter_config.json`: of the base only modules in which training changed
    something, such as BatchNorm's statistics. Collective. Raises UserError for a change that peft cannot load.
    """
    written = {name for own in run.ranks.all_gather_object(run.state.written()) for name in own}
    tensors, settings = adapters.exported(run.state.model, written)
    weights = _gathered(run, tensors)
    if not run.ranks.is_rank_zero:
        return []
    path = folder / "adapter_model.safetensors"
    _write(path, {name: tensor.clone() for name, tensor in weights.items()})
    settings.save_pretrained(str(folder))
    _save_tokenizer(run, folder)
    log.info("exported %s of adapters to %s", _size(weights), folder)
    return [path]


def export_transformers(run: Run, folder: Path, largest: int) -> list[Path]:
    """Write what Transformers' own `save_pretrained` writes. Collective; rank 0 holds all weights at once.

    Transformers restores the layout of the hub, which for some models is not that of the weights in memory.
    """
    model: Any = run.state.model
    weights = _gathered(run, model.state_dict(keep_vars=True))
    if not run.ranks.is_rank_zero:
        return []
    with transformers_models.as_published(model):
        model.save_pretrained(str(folder), state_dict=weights, max_shard_size=largest)
    _save_tokenizer(run, folder)
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors lets only the owner read
    log.info(
        "exported %s of weights to %s (%d files)", bytes_text(sum(f.stat().st_size for f in files)), folder, len(files)
    )
    return files


def averages_by_id(run: Run) -> dict[int, torch.Tensor]:
    """The weight averages of a sharded model, by the id of the parameter; those of others are swapped in."""
    average = run.state.average
    if not any(map(is_shard, average.weights)):
        return {}
    return {id(weight): own for weight, own in zip(average.weights, average.averages, strict=True)}


def _gathered(run: Run, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors in host memory; tied ones stay one tensor. Empty on ranks other than 0, which take part in
    gathering.
    """
    averages = averages_by_id(run)
    gathered: dict[int, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not torch.is_tensor(tensor):
            continue
        if id(tensor) not in gathered:
            value = whole(averages.get(id(tensor), tensor).detach()).cpu().contiguous()
            gathered[id(tensor)] = value if run.ranks.is_rank_zero else value.new_empty(0)
        weights[name] = gathered[id(tensor)]
    return weights if run.ranks.is_rank_zero else {}


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors lets only the owner read


def _save_tokenizer(run: Run, folder: Path) -> None:
    save = getattr(run.batches.dataset, "save_tokenizer", None)
    if callable(save):
        save(folder)


def _size(tensors: dict[str, torch.Tensor]) -> str:
    return bytes_text(sum(tensor.nbytes for tensor in tensors.values()))

"""The tensors of a model as a checkpoint holds them, and a fresh model made ready to take them.

Parameters and persistent buffers are taken from the modules themselves, whatever hooks make of the state dict, and are
filled in place. What a user's module adds to its state dict in addition is restored through `load_state_dict`.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain import decoded, digest, encoded
from trainapp.checksum import checksum
from trainapp.errors import UserError
from trainapp.models import adapters
from trainapp.parallel.dtensor import local
from trainapp.torch_private import EXTRA_STATE, buffers_of, non_persistent_buffers, parameters_of, storage_id
from trainapp.units import listed

Layout = tuple[str, list[int], str]  # "parameter" or "buffer", shape, dtype
Sizes = dict[str, tuple[torch.Size, torch.dtype]]  # of saved tensors, by name


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: the tensors themselves, whole or in shards.

    A tensor with several names, such as tied weights, is listed under the first. Without sparse ones, which
    torch.distributed.checkpoint does not take: `added_entries` has them.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        hidden = non_persistent_buffers(module)
        places = (*parameters_of(module).items(), *buffers_of(module).items())
        for name, tensor in places:
            if tensor is not None and name not in hidden and id(tensor) not in seen and not _is_sparse(tensor):
                seen.add(id(tensor))
                tensors[f"{prefix}.{name}" if prefix else name] = tensor
    return tensors


def saved_tensors(model: nn.Module, written: Collection[str] = ()) -> dict[str, Tensor]:
    """`own_tensors` without the frozen base of a model with adapters, of which a checkpoint has the digest.

    written: names of what is saved of the base nevertheless.
    """
    base = adapters.base_of(model)
    frozen = frozenset() if base is None else base.names.difference(written)
    return {name: tensor for name, tensor in own_tensors(model).items() if name not in frozen}


def base_checksums(model: nn.Module) -> dict[str, Tensor]:
    """Of a model with adapters, the checksum of this rank's part of each parameter of its frozen base; empty for
    another model and in a trace. Two passes over the memory.
    """
    base = adapters.base_of(model)
    if base is None or not base.digest:
        return {}
    own = own_tensors(model).items()
    return {name: checksum(local(tensor)).cpu() for name, tensor in own if name in base.names}


def written_base(model: nn.Module, built: dict[str, Tensor]) -> list[str]:
    """What differs from `built`, the `base_checksums` of the model as it was built, on this rank: forwards have written
    it, as those of a momentum teacher or a codebook do.
    """
    now = base_checksums(model) if built else {}
    return sorted(name for name, value in now.items() if name not in built or not torch.equal(value, built[name]))


def layout(model: nn.Module) -> dict[str, Layout]:
    """Kind, shape and dtype of the model's own tensors, in plain values."""
    return {
        name: ("parameter" if isinstance(tensor, nn.Parameter) else "buffer", list(tensor.shape), str(tensor.dtype))
        for name, tensor in own_tensors(model).items()
    }


def changes(model: nn.Module, built: dict[str, Layout]) -> dict[str, dict[str, Any]]:
    """The tensors whose layout is no longer that of the model as it was built, in plain values.

    They are buffers that the first forward fills, registers or lets grow: a fresh model does not have them, so that
    `follow` must make them before a checkpoint can be read into it.
    """
    now = layout(model)
    changed = {name: {"was": built.get(name), "is": now.get(name)} for name in built.keys() | now.keys()}
    return {name: entry for name, entry in sorted(changed.items()) if entry["was"] != entry["is"]}


def follow(model: nn.Module, changed: dict[str, dict[str, Any]], saved: Sizes, device: torch.device) -> None:
    """Change a fresh model's tensors as the saved one's had changed: allocated, not yet filled.

    A tensor of another layout than the saved model had when it was built is left as it is: then the models differ.
    """
    built = layout(model)
    modules = dict(model.named_modules())
    for name, entry in changed.items():
        prefix, _, own_name = name.rpartition(".")
        is_same_model = prefix in modules and _plain(built.get(name)) == _plain(entry["was"])
        if is_same_model and (entry["is"] is None or name in saved):
            _replace(modules[prefix], own_name, entry["is"], saved.get(name), device)


def _plain(layout: Any) -> Any:
    return None if layout is None else [*layout]


def _replace(module: nn.Module, name: str, layout: Layout | None, size: Any, device: torch.device) -> None:
    places = next((p for p in (parameters_of(module), buffers_of(module)) if name in p), None)
    if layout is None:
        if places is not None:
            places[name] = None
        return
    tensor = torch.empty(size[0], dtype=size[1], device=device)
    if layout[0] == "parameter":
        tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
    if places is None and hasattr(module, name):
        delattr(module, name)  # a plain attribute, which the forward replaces
    elif places is not None:
        del places[name]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


def added_entries(model: nn.Module) -> dict[str, Any]:
    """What the modules add to the state dict in addition to dense parameters and buffers, and extra state, by name.

    Tensors that share memory with a parameter or a buffer are views of what is saved anyway. Copies of them under
    their own name, as hooks make them, are left out too: the originals are exact.
    """
    owned = [tensor for tensor in (*model.parameters(), *model.buffers()) if not _is_sparse(tensor)]
    identities = {id(tensor) for tensor in owned}
    storages = {storage_id(tensor.untyped_storage()) for tensor in owned if _is_strided(tensor)}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own_names = {name for name, tensor in named if not _is_sparse(tensor)}
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name not in own_names
        and id(value) not in identities
        and name.rpartition(".")[2] != EXTRA_STATE
        and not (_is_strided(value) and storage_id(value.untyped_storage()) in storages)
    }


def save_added_entries(model: nn.Module) -> dict[str, Any]:
    """A copy of `added_entries`, encoded. Raises UserError for one that a checkpoint cannot hold."""
    return {name: encoded(value, f"{name} of the model's state dict") for name, value in added_entries(model).items()}


def load_added_entries(model: nn.Module, entries: dict[str, Any]) -> None:
    """Restore what `save_added_entries` returned, through `load_state_dict`.

    Call before the model's own tensors are filled: hooks may change those. Raises UserError when the entries are not
    what the model has afterwards.
    """
    if not entries:
        return
    entries = decoded(entries)
    current = {name: value for name, value in model.state_dict().items() if name not in entries}
    try:
        model.load_state_dict(current | entries)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the model's load_state_dict does not take {listed(sorted(entries))}: {error}") from error
    restored = save_added_entries(model)
    expected = {name: digest(encoded(value, name)) for name, value in entries.items()}
    lost = [name for name, known in expected.items() if name not in restored or digest(restored[name]) != known]
    if lost:
        raise UserError(f"the model's load_state_dict does not restore {listed(sorted(lost))} of its state dict")


def require_loadable(model: nn.Module) -> None:
    """Raises UserError where the model adds entries to its state dict that its own `load_state_dict` refuses.

    torch's rule for modules is that one takes what the other returns; a run that cannot be resumed should not start.
    """
    expanded = [name for name, tensor in own_tensors(model).items() if _is_strided(tensor) and _is_expanded(tensor)]
    if expanded:
        raise UserError(
            f"{listed(sorted(expanded))} of the model: elements share memory, so that a checkpoint could be saved "
            "but not loaded; use expand(...).clone(), or train with checkpointing=off"
        )
    entries = decoded(save_added_entries(model))
    if not entries:
        return
    try:
        refused = model.load_state_dict(entries, strict=False).unexpected_keys
    except Exception:  # a hook that wants the whole state dict: found out when it is loaded
        return
    if refused:
        raise UserError(
            f"the model's state_dict() holds {listed(sorted(refused))}, which its load_state_dict does not take: a "
            "checkpoint could not restore it; register it as a buffer, load it in _load_from_state_dict, or set "
            "checkpointing=off"
        )


def _is_strided(value: Any) -> bool:
    """Whether it is a tensor in memory of its own, not a wrapper such as a shard, and not sparse."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided

"""What an export of adapters holds: the adapters, and whatever else training changed, in a form that peft loads."""

import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.models.adapters import Base, base_of, digest_of, require_peft
from trainapp.units import listed

log = logging.getLogger(__name__)


def exported(model: nn.Module, written: Collection[str] = ()) -> tuple[dict[str, Tensor], Any]:
    """The adapters and what else has changed in training, by the names that `PeftModel.from_pretrained` reads, and
    peft's configuration of them.

    written: names of frozen parameters that forwards have written. Raises UserError for a change that peft cannot load
    beside adapters.
    """
    peft = require_peft()
    settings = model.peft_config["default"]  # set by peft
    # Otherwise it would ask the hub about the base's embeddings.
    tensors = model.state_dict(keep_vars=True)
    options = {"state_dict": tensors, "save_embedding_layers": False}
    trained = peft.get_peft_model_state_dict(model, **options)
    if changed := _changed_beside(model, tensors, {id(tensor) for tensor in trained.values()}, written):
        owners = _owners(model, changed, peft)
        settings = copy.copy(settings)
        settings.modules_to_save = [*(settings.modules_to_save or ()), *owners]
        for name in owners:
            trained |= {own: tensor for own, tensor in tensors.items() if own.startswith(f"{name}.")}
        log.info(
            "beside the adapters, the export has the modules %s, in which training changed %s",
            *map(listed, (owners, changed)),
        )
    return {f"base_model.model.{name}": tensor for name, tensor in trained.items()}, settings


def _changed_beside(
    model: nn.Module, tensors: Mapping[str, Any], known: set[int], written: Collection[str]
) -> list[str]:
    """The parameters that are trained or `written` and the buffers that have changed, but for those in `known`."""
    base, parameters = _base(model), dict(model.named_parameters(remove_duplicate=False))
    changed = []
    for name, tensor in tensors.items():
        if not torch.is_tensor(tensor) or id(tensor) in known:
            continue
        if name in parameters:
            is_changed = parameters[name].requires_grad or name in written
        else:
            is_changed = base.buffers.get(name) != digest_of({name: tensor})
        if is_changed:
            changed.append(name)
    return changed


def _owners(model: nn.Module, tensors: list[str], peft: Any) -> list[str]:
    """The modules that hold these, and all that peft would take for them: it compares the ends of names. Raises
    UserError where one of them has adapters itself, which peft would not find in its copy, or has grown new buffers.
    """
    kinds = (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.AuxiliaryTrainingWrapper)
    modules = dict(model.named_modules())
    adapted = [name for name, module in modules.items() if isinstance(module, kinds)]
    ends = tuple(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    outside = [name for name in modules if not any(name.startswith(f"{own}.") for own in adapted)]
    owners = [name for name in outside if name.endswith(ends)]
    grown = [
        name
        for name in tensors
        if name not in _base(model).buffers and name in dict(model.named_buffers(remove_duplicate=False))
    ]
    mixed = [name for name in owners if any(own == name or own.startswith(f"{name}.") for own in adapted)]
    inside = [end for end in ends if end not in outside]
    if grown or mixed or inside or "" in ends:
        raise UserError(
            f"mode=export: training changed {listed(tensors)}, which peft cannot load beside adapters (their modules "
            "have adapters themselves, or new buffers), so that they would be lost; export the whole model with "
            "export.merge=true"
        )
    return [name for name in owners if not any(name.startswith(f"{other}.") for other in owners)]


def _base(model: nn.Module) -> Base:
    base = base_of(model)
    assert base is not None, "a model without adapters"
    return base

"""LoRA through peft: `adapter=lora`. Small matrices are trained beside frozen linear layers.

Source: Hu et al. 2021, "LoRA: low-rank adaptation of large language models" (arXiv:2106.09685). peft's layers are put
into the model in place, which keeps its class, its blocks and its names. The frozen part is the *base*: a checkpoint
has its digest instead of its values, since it can be loaded from its source again.
"""

import functools
import hashlib
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config.schema import Adapter, Config
from trainapp.config.targets import require_package
from trainapp.errors import UserError
from trainapp.models.huggingface import drawn
from trainapp.models.inspect import blocks_of, task_heads
from trainapp.models.weights import load_weights
from trainapp.state.checksum import checksum
from trainapp.torch_private import has_values
from trainapp.units import listed

log = logging.getLogger(__name__)

# peft's task names by suffix of Transformers' class names: peft needs them to open an export.
_KINDS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}


@dataclass(frozen=True)
class Base:
    """The frozen part of a model with adapters: its parameters by name, and a digest of their values."""

    names: frozenset[str]
    digest: str  # empty for tensors without values


_bases: "weakref.WeakKeyDictionary[nn.Module, Base]" = weakref.WeakKeyDictionary()


def base_of(model: nn.Module) -> Base | None:
    """The frozen part of a model with adapters; None for a model without."""
    return _bases.get(model)


def adapted(kind: Callable[..., nn.Module], config: Config, weights: str | None) -> Callable[..., nn.Module]:
    """The model's class, or a function that builds one and adds the adapters that the configuration asks for.

    weights: the file with the base's initial weights, if any.
    """
    if config.adapter.kind == "none":
        return kind

    @functools.wraps(kind, updated=())
    def build(*args: Any, **kwargs: Any) -> nn.Module:
        model = kind(*args, **kwargs)
        # Load the base's weights now: adapters rename its layers. A trace has none to load.
        if weights is not None and has_values(next(model.parameters())):
            load_weights(model, weights, config.model.init_strict)
        add_lora(model, config.adapter)
        return model

    return build


def add_lora(model: nn.Module, settings: Adapter) -> None:
    """Freeze the model and add adapters to the linear layers of its blocks, in place. Draws from torch's generators.

    Raises UserError for names that the model does not have, and if peft is missing.
    """
    require_package("peft", "adapter=lora")
    import peft

    trained = _new_modules(model) if settings.train == "auto" else _found_in(model, settings.train)
    options = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=linear_layers(model) if settings.targets == "auto" else list(settings.targets),
        modules_to_save=trained or None,
        bias="none",
        task_type=next((kind for name, kind in _KINDS.items() if type(model).__name__.endswith(name)), None),
        base_model_name_or_path=getattr(getattr(model, "config", None), "name_or_path", None) or None,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # peft corrects it for Conv1D
            peft.inject_adapter_in_model(options, model)
    except ValueError as error:
        raise UserError(f"adapter=lora: {error}") from error
    for parameter in model.parameters():
        if parameter.is_floating_point():
            # Adapters stay in fp32: in lower precision their small updates would be lost.
            frozen = torch.bfloat16 if settings.base_dtype == "bf16" else parameter.dtype
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
    base = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    _bases[model] = Base(frozenset(base), digest_of(base))


def require_same_base(model: nn.Module, saved: str | None) -> None:
    """Raises UserError unless a checkpoint with this digest (None: without adapters) fits this base."""
    base = base_of(model)
    own = None if base is None else base.digest
    if own == saved:
        return
    if saved is None:
        raise UserError(
            "it holds a whole model; use adapter=none, or train adapters on it: export it, and set model.path to the "
            "export (for a Transformers model) or model.init_from to its model.safetensors"
        )
    raise UserError(
        f"it holds {'' if own else 'only '}adapters, trained on {'another' if own else 'a'} base model; use the same "
        "adapter settings and model.path (or model settings, train.seed and model.init_from), with unchanged files"
    )


def merge(model: nn.Module) -> None:
    """Merge the adapters into the base weights, in place. Names and classes are then those of the plain model, which
    cannot be trained further. A bf16 base is converted to fp32 first: rounded to bf16, the sum would lose most of what
    was learned.
    """
    import peft

    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    for name, module in list(model.named_modules()):
        if isinstance(module, peft.utils.ModulesToSaveWrapper):
            replaced = module.modules_to_save["default"]
        elif isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            replaced = module.get_base_layer()
            names = model.named_parameters(remove_duplicate=False)
            if sum(parameter is replaced.weight for _, parameter in names) > 1:  # the other layer stays unchanged
                replaced.weight = nn.Parameter(replaced.weight.detach().clone(), requires_grad=False)
            module.merge()
        else:
            continue
        model.set_submodule(name, replaced)
    _bases.pop(model, None)
    vars(model).pop("peft_config", None)


def exported(model: nn.Module, written: Collection[str] = ()) -> tuple[dict[str, Tensor], Any]:
    """The adapters and the modules trained beside them, by the names that `PeftModel.from_pretrained` reads, and their
    peft configuration. A warning names other tensors that may have changed, such as BatchNorm's statistics.

    written: names of frozen parameters that forwards have written.
    """
    import peft

    # Otherwise peft would ask the hub about the base's embeddings.
    options = {"state_dict": model.state_dict(keep_vars=True), "save_embedding_layers": False}
    trained = peft.get_peft_model_state_dict(model, **options)
    known = {id(own) for own in trained.values()}
    known |= {id(p) for name, p in model.named_parameters() if not p.requires_grad and name not in written}
    if left := [name for name, own in model.state_dict(keep_vars=True).items() if id(own) not in known]:
        log.warning(
            "the export has the adapters and the modules in adapter.train; for %s, peft uses the base's values. "
            "If training has changed them, use export.merge=true",
            listed(left),
        )
    return {f"base_model.model.{name}": tensor for name, tensor in trained.items()}, model.peft_config["default"]


def linear_layers(model: nn.Module) -> list[str]:
    """The layers to which `adapter.targets=auto` adds adapters. Raises UserError if there are none."""
    inside = {id(module) for block in blocks_of(model, "adapter.targets=auto") for module in block.modules()}
    layers = {name: module for name, module in model.named_modules() if id(module) in inside}
    # Conv1D is GPT-2's, with a transposed weight.
    found = [name for name, m in layers.items() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    if not found:
        raise UserError(f"adapter.targets=auto: no linear layers in the blocks of {type(model).__name__}; name modules")
    return found


def _new_modules(model: nn.Module) -> list[str]:
    """Modules that a task adds to a pretrained body, trained in full: opening an export would reinitialise them."""
    found = task_heads(model)
    for name in drawn(model):
        owner = name.rpartition(".")[0]
        if owner and not f"{owner}.".startswith(tuple(f"{other}." for other in found)):
            found.append(owner)
    return found


def _found_in(model: nn.Module, wanted: list[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    for given in wanted:
        if not any(f".{name}".endswith(f".{given}") for name in names):  # peft would train nothing for it
            last = listed(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise UserError(
                f"adapter.train=[{given}]: {type(model).__name__} has no module of this name; it has {last}"
            )
    return wanted


@torch.no_grad()
def digest_of(base: Mapping[str, Tensor]) -> str:
    """A digest of names, dtypes, shapes and bits. Two passes over the memory: a second for 10 GB."""
    if not all(has_values(tensor) and tensor.layout is torch.strided for tensor in base.values()):
        return ""
    digest = hashlib.sha256()
    for name, parameter in sorted(base.items()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(checksum(parameter).cpu().numpy().tobytes())
    return digest.hexdigest()

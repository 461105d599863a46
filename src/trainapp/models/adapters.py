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
from trainapp.models.huggingface import newly_initialised
from trainapp.models.inspect import blocks_of, task_heads
from trainapp.models.weights import load_weights
from trainapp.state.checksum import checksum
from trainapp.torch_private import has_values
from trainapp.units import listed

log = logging.getLogger(__name__)

# peft's task names by suffix of Transformers' class names: peft needs them to open an export.
_PEFT_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}


@dataclass(frozen=True)
class Base:
    """The frozen part of a model with adapters."""

    names: frozenset[str]  # of its parameters
    digest: str  # of their values; empty for tensors without values


_bases: "weakref.WeakKeyDictionary[nn.Module, Base]" = weakref.WeakKeyDictionary()


def base_of(model: nn.Module) -> Base | None:
    """Return the frozen part of a model with adapters; None for a model without."""
    return _bases.get(model)


def with_adapters(
    build_model: Callable[..., nn.Module], config: Config, base_weights: str | None
) -> Callable[..., nn.Module]:
    """Return a function that builds the model and adds the adapters that the configuration asks for.

    Args:
        build_model: the model's class, or a function; returned as it is for `adapter=none`.
        config: the configuration.
        base_weights: the file with the base's initial weights, if any.
    """
    if config.adapter.kind == "none":
        return build_model

    @functools.wraps(build_model, updated=())
    def build_with_adapters(*args: Any, **kwargs: Any) -> nn.Module:
        model = build_model(*args, **kwargs)
        # Load the base's weights now: adapters rename its layers. A trace has none to load.
        if base_weights is not None and has_values(next(iter(model.parameters()))):
            load_weights(model, base_weights, config.model.init_strict, config.model.init_prefix)
        add_lora(model, config.adapter)
        return model

    return build_with_adapters


def add_lora(model: nn.Module, settings: Adapter) -> None:
    """Freeze the model and add adapters to the linear layers of its blocks, in place. Draws from torch's generators.

    Raises UserError for names that the model does not have, and if peft is missing.
    """
    require_package("peft", "adapter=lora")
    import peft

    # Modules that are trained in full, and layers that get an adapter.
    if settings.train == "auto":
        trained_modules = _new_modules(model)
    else:
        _require_modules(model, settings.train)
        trained_modules = settings.train
    if settings.targets == "auto":
        adapted_layers = linear_layers(model)
    else:
        adapted_layers = list(settings.targets)

    lora_config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=adapted_layers,
        modules_to_save=trained_modules or None,
        bias="none",
        task_type=_peft_task(model),
        base_model_name_or_path=_name_or_path(model),
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")  # peft corrects it for Conv1D
            peft.inject_adapter_in_model(lora_config, model)
    except ValueError as error:
        raise UserError(f"adapter=lora: {error}") from error

    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.requires_grad:
            # Adapters stay in fp32: in lower precision their small updates would be lost.
            parameter.data = parameter.data.to(torch.float32)
        elif settings.base_dtype == "bf16":
            parameter.data = parameter.data.to(torch.bfloat16)

    # The base, as it stays.
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    _bases[model] = Base(frozenset(frozen), digest_of(frozen))


def _new_modules(model: nn.Module) -> list[str]:
    """Return the modules that a task adds to a pretrained body, to be trained in full: opening an export would
    reinitialise them.
    """
    names = task_heads(model)
    for tensor_name in newly_initialised(model):
        module_name = tensor_name.rpartition(".")[0]
        is_inside_another = any(f"{module_name}.".startswith(f"{name}.") for name in names)
        if module_name and not is_inside_another:
            names.append(module_name)
    return names


def _require_modules(model: nn.Module, wanted_names: list[str]) -> None:
    """Raise UserError unless the model has a module of each name: peft would train nothing for it."""
    names = [name for name, _ in model.named_modules() if name]
    for wanted_name in wanted_names:
        # As peft matches them: by whole parts at the end of a name.
        is_in_model = any(f".{name}".endswith(f".{wanted_name}") for name in names)
        if not is_in_model:
            last_parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise UserError(
                f"adapter.train=[{wanted_name}]: {type(model).__name__} has no module of this name; it has "
                f"{listed(last_parts)}"
            )


def linear_layers(model: nn.Module) -> list[str]:
    """Return the layers to which `adapter.targets=auto` adds adapters. Raises UserError if there are none."""
    ids_in_blocks: set[int] = set()
    for block in blocks_of(model, "adapter.targets=auto"):
        ids_in_blocks.update(id(module) for module in block.modules() if _is_linear(module))

    # By their names in the whole model.
    names = [name for name, module in model.named_modules() if id(module) in ids_in_blocks]
    if not names:
        raise UserError(f"adapter.targets=auto: no linear layers in the blocks of {type(model).__name__}; name modules")
    return names


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"  # GPT-2's, with a transposed weight


def _peft_task(model: nn.Module) -> str | None:
    for suffix, task in _PEFT_TASKS.items():
        if type(model).__name__.endswith(suffix):
            return task
    return None


def _name_or_path(model: nn.Module) -> str | None:
    """Return where a Transformers model was loaded from."""
    config = getattr(model, "config", None)
    return getattr(config, "name_or_path", None) or None


@torch.no_grad()
def digest_of(parameters: Mapping[str, Tensor]) -> str:
    """Return a digest of names, dtypes, shapes and bits. Two passes over the memory: a second for 10 GB."""
    for parameter in parameters.values():
        if not has_values(parameter) or parameter.layout is not torch.strided:
            return ""

    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        description = f"{name} {parameter.dtype} {tuple(parameter.shape)}"
        digest.update(description.encode())
        digest.update(checksum(parameter).cpu().numpy().tobytes())
    return digest.hexdigest()


def require_same_base(model: nn.Module, saved_digest: str | None) -> None:
    """Raise UserError unless a checkpoint fits the model's base.

    Args:
        model: the model.
        saved_digest: of the checkpoint's base; None for a checkpoint of a whole model.
    """
    base = base_of(model)
    digest = None if base is None else base.digest
    if digest == saved_digest:
        return
    if saved_digest is None:
        raise UserError(
            "it holds a whole model; use adapter=none, or train adapters on it: export it, and set model.path to the "
            "export (for a Transformers model) or model.init_from to its model.safetensors"
        )
    content = "adapters, trained on another base model" if digest else "only adapters, trained on a base model"
    raise UserError(
        f"it holds {content}; use the same adapter settings and model.path (or model settings, train.seed and "
        "model.init_from), with unchanged files"
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

    # Replace peft's modules: a wrapper by the trained copy in it, a layer with an adapter by the layer itself, merged.
    for name, module in list(model.named_modules()):
        if isinstance(module, peft.utils.ModulesToSaveWrapper):
            model.set_submodule(name, module.modules_to_save["default"])
        elif isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            base_layer = module.get_base_layer()
            _untie(model, base_layer)
            module.merge()
            model.set_submodule(name, base_layer)

    # Nothing is frozen or adapted any more.
    _bases.pop(model, None)
    vars(model).pop("peft_config", None)


def _untie(model: nn.Module, layer: Any) -> None:
    """Give the layer a weight of its own if another layer shares it, which must stay as it is."""
    uses = sum(parameter is layer.weight for _, parameter in model.named_parameters(remove_duplicate=False))
    if uses > 1:
        copied_weight = layer.weight.detach().clone()
        layer.weight = nn.Parameter(copied_weight, requires_grad=False)


def exported_adapters(model: nn.Module, written: Collection[str] = ()) -> tuple[dict[str, Tensor], Any]:
    """Return the adapters and the modules trained beside them, by the names that `PeftModel.from_pretrained` reads, and
    their peft configuration. A warning names other tensors that may have changed, such as BatchNorm's statistics.

    Args:
        model: the model.
        written: names of frozen parameters that forwards have written.
    """
    import peft

    state_dict = model.state_dict(keep_vars=True)
    # Otherwise peft would ask the hub about the base's embeddings.
    trained = peft.get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)

    # All that the export lacks and that training may have changed: trained or written tensors, and buffers.
    saved_or_unchanged = {id(tensor) for tensor in trained.values()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in written:
            saved_or_unchanged.add(id(parameter))
    left_out = [name for name, tensor in state_dict.items() if id(tensor) not in saved_or_unchanged]
    if left_out:
        log.warning(
            "the export has the adapters and the modules in adapter.train; for %s, peft uses the base's values. "
            "If training has changed them, use export.merge=true",
            listed(left_out),
        )
    tensors = {f"base_model.model.{name}": tensor for name, tensor in trained.items()}
    return tensors, model.peft_config["default"]

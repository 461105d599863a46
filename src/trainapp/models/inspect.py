"""Inspecting a model of any class, and its evaluation mode.

The blocks of a Transformers model are the layers that Transformers itself would checkpoint, or its list of equal
modules. The package is imported only if such a model exists.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from trainapp.config.schema import Model
from trainapp.errors import UserError
from trainapp.torch_private import BatchNorm
from trainapp.units import listed

# By model: configurations whose `use_cache` is off, and its own value.
_caches: "weakref.WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def evaluation_mode(roots: Collection[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside the block, by the roots' own `train`, which may keep parts of them in training mode;
    afterwards each module's mode is restored, since parts may be in evaluation mode permanently.
    """
    modes = [(module, module.training) for root in roots for module in root.modules()]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def batchnorms(model: nn.Module) -> list[str]:
    """The names of modules that normalise over the samples of a micro-batch."""
    return [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]


def untrained_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are all frozen, and all their parts, such as dropout and BatchNorm without
    parameters. A module without parameters that is no part of such a module is not among them.
    """
    modules: dict[nn.Module, None] = {}  # in order, each once
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            modules |= dict.fromkeys(module.modules())
    return list(modules)


def per_sample_buffers(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the full names of the buffers and attributes that modules declare, by an attribute `per_sample_buffers`
    with their names, to hold a row per sample: a recurrent state [B, hidden], say.

    modules: the outermost ones, by the first part of their buffers' names.
    """
    return {name for name, _, _ in _per_sample_attributes(modules)}


def per_sample_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the values of the `per_sample_buffers` that are single tensors, by their full names."""
    tensors = {}
    for name, module, attribute in _per_sample_attributes(modules):
        value = getattr(module, attribute, None)
        if isinstance(value, Tensor):
            tensors[name] = value
    return tensors


def _per_sample_attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the full name of each of the `per_sample_buffers`, its module and its name there."""
    for root, top in modules.items():
        for path, module in top.named_modules():
            declared = getattr(module, "per_sample_buffers", ())
            prefix = f"{root}.{path}" if path else root
            for attribute in [declared] if isinstance(declared, str) else declared:
                yield f"{prefix}.{attribute}", module, attribute


def rows_written(before: Tensor, after: Tensor, rows: Collection[int]) -> int:
    """Return the number of rows of a tensor that have changed. Waits for the device.

    0: none has, the tensor has another shape now, or no dimension has one of these numbers of `rows`; if several have,
    the smallest number that changed in one of them.
    """
    if before.shape != after.shape:
        return 0
    is_changed = before != after
    numbers = []
    for dim, size in enumerate(is_changed.shape):
        if size in rows:
            numbers.append(int(is_changed.movedim(dim, 0).flatten(1).any(1).sum()))
    return min(numbers, default=0)


def instead_of_batchnorm(model_settings: Model) -> str:
    """The remedy for a model with BatchNorm: its setting if it has one, otherwise a change of the model."""
    has_setting = "norm" in model_settings.arguments and model_settings.target.startswith("trainapp.models.")
    return "GroupNorm (model.norm=group)" if has_setting else "GroupNorm in its place in the model"


def smallest_micro_batch(model: nn.Module) -> int:
    """The model's own, otherwise 2 with BatchNorm1d, which cannot train on a single sample of shape [1, C]."""
    with_norm = any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    return getattr(model, "smallest_micro_batch", 2 if with_norm else 1)


def lazy_modules(model: nn.Module) -> list[str]:
    """The names of modules whose parameters get their shapes from the first forward, such as LazyLinear."""
    lazy: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, LazyModuleMixin)]
    return [name for name, module in lazy if module.has_uninitialized_params()]


def blocks_of(model: nn.Module, setting: str) -> list[nn.Module]:
    """The repeated blocks: from the model's method `blocks()`, or of a Transformers model. Raises UserError for any
    other model; a submodule named `blocks` is not that method.
    """
    method = getattr(model, "blocks", None)
    if not callable(method) or isinstance(method, nn.Module):
        if blocks := _blocks_of_transformers(model):
            return blocks
        raise UserError(
            f"{setting}: {type(model).__name__} does not declare its blocks; give it a method "
            "`blocks(self) -> list[nn.Module]`"
        )
    return list(method())


def last_layer(model: nn.Module) -> tuple[Callable[..., Any], nn.Module] | None:
    """The model's `features` and `head`, or those of a Transformers model; None for any other. Its forward should be
    `head(features(inputs))`, which the caller must check.
    """
    given: Any = model
    features, head = getattr(given, "features", None), getattr(given, "head", None)
    if callable(features) and isinstance(head, nn.Module):
        return features, head
    if not is_of_transformers(model):
        return None
    head, base = given.get_output_embeddings(), given.base_model
    if head is None or base is model:
        return None

    def hidden(inputs: Tensor, **others: Tensor) -> Any:
        return base(inputs, **others).last_hidden_state

    return hidden, head


# --- models of Transformers


def is_of_transformers(model: nn.Module) -> bool:
    """Whether the model is an instance of a Transformers class, or of one derived from it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def without_cache(model: nn.Module) -> None:
    """Switch off a Transformers model's cache of keys and values, which only generation reads.

    With the cache, a checkpointed layer would append to it again when recomputed, and packed documents would see each
    other: the models look for document borders only without a cache.
    """
    if not is_of_transformers(model):
        return
    config: Any = model.config
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    _caches[model] = [(part, part.use_cache) for part in parts if getattr(part, "use_cache", None) is not None]
    for part, _ in _caches[model]:
        part.use_cache = False


def restore_cache(model: nn.Module) -> None:
    """Undo `without_cache`, for a model that is published."""
    for part, value in _caches.pop(model, []):
        part.use_cache = value


def _blocks_of_transformers(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated layers; none for other models."""
    if not is_of_transformers(model):
        return []
    layers = sys.modules.get("transformers.modeling_layers")
    kind = () if layers is None else layers.GradientCheckpointingLayer
    found = [module for module in model.modules() if isinstance(module, kind)]
    if found:
        inside = {part for layer in found for part in layer.modules() if part is not layer}
        return [layer for layer in found if layer not in inside]
    lists = [[*module] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    alike = [members for members in lists if len({type(member) for member in members}) == 1]
    return max(alike, key=lambda members: sum(p.numel() for m in members for p in m.parameters()), default=[])


def heads(model: nn.Module) -> list[str]:
    """The names of modules beside the model's body that a pretrained body lacks, such as a classifier. Empty if the
    last layer is the language model's own.
    """
    if not is_of_transformers(model):
        return []
    given: Any = model
    base = given.base_model
    if base is model or given.get_output_embeddings() is not None:
        return []
    return [
        name for name, child in model.named_children() if child is not base and any(True for _ in child.parameters())
    ]


def positions_of(config: Any) -> int | None:
    """The longest sequence that a model reads; None without a limit (XLNet: -1)."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


# --- what a loss depends on


@contextlib.contextmanager
def checked_gradients(model: nn.Module, loss: Tensor) -> Iterator[None]:
    """Use around the backward that completes a step's gradients, in the first step of a process: walking the graph
    takes some milliseconds.

    Raises UserError for parameters that receive a gradient but are not the model's, since nothing would ever train
    them.
    """
    leaves = list(parameters_behind(loss))
    yield
    # After the backward, when FSDP2's gathered parameters can be distinguished: their gradients have moved into the
    # shards.
    own = {id(p) for p in model.parameters()}
    foreign = [p for p in leaves if id(p) not in own and p.grad is not None]
    if foreign:
        shapes = listed(str(list(p.shape)) for p in foreign)
        raise UserError(
            f"the loss depends on {len(foreign)} parameters that are not among model.parameters() (of shape "
            f"{shapes}), which nothing would train: make the module that owns them a submodule of the model, "
            "not a global, or in a plain list or an attribute of the task; or freeze them with requires_grad_(False)"
        )


def parameters_behind(loss: Tensor) -> Iterator[nn.Parameter]:
    """The parameters that a backward from `loss` reaches."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # only nodes that accumulate into leaves have one
        if isinstance(variable, nn.Parameter):
            yield variable
        nodes += [following for following, _ in node.next_functions]

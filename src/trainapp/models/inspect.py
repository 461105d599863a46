"""Inspecting a model of any class, and its evaluation mode.

The blocks of a Transformers model are the layers that Transformers itself would checkpoint, or its list of equal
modules. The package is imported only if such a model exists.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from trainapp.config.schema import Model
from trainapp.errors import UserError
from trainapp.state.stateful import Stateful
from trainapp.torch_private import BatchNorm
from trainapp.units import listed

# By model: the configurations whose `use_cache` is switched off, each with its value before.
_caches: "weakref.WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def evaluation_mode(roots: Collection[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode inside the block, by the roots' own `train`, which may keep parts of them in
    training mode; afterwards restore each module's mode, since parts may be in evaluation mode permanently.
    """
    modes: list[tuple[nn.Module, bool]] = []
    for root in roots:
        for module in root.modules():
            modes.append((module, module.training))
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def batchnorms(model: nn.Module) -> list[str]:
    """Return the names of the modules that normalise over the samples of a micro-batch."""
    return [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]


def batchnorms_of_task(stateful: Stateful, root_name: str) -> dict[str, nn.Module]:
    """Return the same modules of a task, by their paths in it.

    Args:
        stateful: has the modules outside of the model.
        root_name: names the task among its roots.
    """
    layers = {}
    for module_name, module in stateful.modules.items():
        root, _, path_of_module = module_name.partition(".")
        if root != root_name:
            continue
        for path in batchnorms(module):
            layers[".".join(filter(None, (path_of_module, path)))] = module.get_submodule(path)
    return layers


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

    Args:
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
            attributes = getattr(module, "per_sample_buffers", ())
            if isinstance(attributes, str):  # a single name
                attributes = [attributes]
            prefix = f"{root}.{path}" if path else root
            for attribute in attributes:
                yield f"{prefix}.{attribute}", module, attribute


def rows_written(before: Tensor, after: Tensor, rows: Collection[int]) -> int:
    """Return the number of rows of a tensor that have changed. Waits for the device.

    0: none has, the tensor has another shape or dtype now, or no dimension has one of these numbers of `rows`; if
    several have, the smallest number that changed in one of them.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return 0

    # Any dimension of such a size may hold the rows.
    is_changed = changed_elements(before, after)
    changed_rows = []
    for dim, size in enumerate(is_changed.shape):
        if size in rows:
            elements_by_row = is_changed.movedim(dim, 0).reshape(size, -1)  # also of a single dimension
            changed_rows.append(int(elements_by_row.any(1).sum()))
    return min(changed_rows, default=0)


def changed_elements(before: Tensor, after: Tensor) -> Tensor:
    """Return which elements have changed, of two tensors of one shape and dtype. Bit for bit: NaN is a value, and so is
    -0.0.
    """
    return (_bytes_of(before) != _bytes_of(after)).any(-1)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, in a last dimension."""
    return tensor.detach().unsqueeze(-1).contiguous().view(torch.uint8)


def instead_of_batchnorm(model_settings: Model) -> str:
    """Return the remedy for a model with BatchNorm: its setting if it has one, otherwise a change of the model."""
    is_built_in = model_settings.target.startswith("trainapp.models.")
    if is_built_in and "norm" in model_settings.arguments:
        return "GroupNorm (model.norm=group)"
    return "GroupNorm in its place in the model"


def smallest_micro_batch(model: nn.Module) -> int:
    """Return the fewest samples the model can train on: its attribute of this name, otherwise 2 with BatchNorm1d, which
    refuses a single sample of shape [1, C].
    """
    has_batchnorm1d = any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    fewest = 2 if has_batchnorm1d else 1
    return getattr(model, "smallest_micro_batch", fewest)


def lazy_modules(model: nn.Module) -> list[str]:
    """Return the names of modules whose parameters get their shapes from the first forward, such as LazyLinear."""
    lazy: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, LazyModuleMixin)}
    return [name for name, module in lazy.items() if module.has_uninitialized_params()]


def blocks_of(model: nn.Module, setting: str) -> list[nn.Module]:
    """Return the repeated blocks: from the model's method `blocks()`, or of a Transformers model.

    Raises UserError for any other model; a submodule named `blocks` is not that method.

    Args:
        model: the model.
        setting: the setting that needs them, for the message.
    """
    method = getattr(model, "blocks", None)
    if callable(method) and not isinstance(method, nn.Module):
        return list(method())
    if is_of_transformers(model):
        blocks = _blocks_of_transformers(model)
        if blocks:
            return blocks
    model_name = type(model).__name__
    if isinstance(method, nn.Module):  # the model's forward would find a method of this name in its place
        raise UserError(
            f"{setting}: {model_name} does not declare its blocks: its attribute `blocks`, a {type(method).__name__}, "
            "is not the method of this name that does; wrap the model in a module whose forward calls it, with a "
            "method `blocks(self) -> list[nn.Module]` that returns `list(self.model.blocks)`, or rename the attribute "
            "and add the method"
        )
    raise UserError(
        f"{setting}: {model_name} does not declare its blocks; give it a method `blocks(self) -> list[nn.Module]`"
    )


def last_layer(model: nn.Module) -> tuple[Callable[..., Any], nn.Module] | None:
    """Return the model's `features` and `head`, or those of a Transformers model; None for any other. Its forward
    should be `head(features(inputs))`, which the caller must check.
    """
    features = getattr(model, "features", None)
    head = getattr(model, "head", None)
    if callable(features) and isinstance(head, nn.Module):
        return features, head
    if is_of_transformers(model):
        return _last_layer_of_transformers(model)
    return None


# --- models of Transformers


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether the model is an instance of a Transformers class, or of one derived from it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def without_cache(model: nn.Module) -> None:
    """Switch off a Transformers model's cache of keys and values, which only generation reads.

    With the cache, a checkpointed layer would append to it again when recomputed, and packed documents would see each
    other: the models look for document borders only without a cache.
    """
    if not is_of_transformers(model):
        return

    # A model of several parts has a configuration for each.
    model_config: Any = model.config
    configs = [model_config]
    for name in getattr(model_config, "sub_configs", ()):
        configs.append(getattr(model_config, name, None))

    values_before = []
    for config in configs:
        use_cache = getattr(config, "use_cache", None)
        if use_cache is not None:
            values_before.append((config, use_cache))
    _caches[model] = values_before
    for config, _ in values_before:  # only now: two names may be of one configuration
        config.use_cache = False


def restore_cache(model: nn.Module) -> None:
    """Undo `without_cache`, for a model that is published."""
    for config, use_cache in _caches.pop(model, []):
        config.use_cache = use_cache


def _blocks_of_transformers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers that Transformers would checkpoint, or else its list of equal modules."""
    modeling_layers = sys.modules.get("transformers.modeling_layers")
    if modeling_layers is not None:
        layer_class = modeling_layers.GradientCheckpointingLayer
        layers = [module for module in model.modules() if isinstance(module, layer_class)]
        if layers:
            return _outermost(layers)
    return _largest_list_of_one_class(model)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner: set[nn.Module] = set()
    for module in modules:
        inner.update(part for part in module.modules() if part is not module)
    return [module for module in modules if module not in inner]


def _largest_list_of_one_class(model: nn.Module) -> list[nn.Module]:
    """Return the ModuleList of several modules of one class that has the most parameters; empty if there is none."""
    largest: list[nn.Module] = []
    most_parameters = -1
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        classes = {type(member) for member in module}
        if len(classes) > 1:
            continue

        parameters = sum(_parameter_count(member) for member in module)
        if parameters > most_parameters:
            largest = list(module)
            most_parameters = parameters
    return largest


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _last_layer_of_transformers(model: Any) -> tuple[Callable[..., Any], nn.Module] | None:
    body = model.base_model
    head = model.get_output_embeddings()
    if head is None or body is model:
        return None

    def features(inputs: Tensor, **model_arguments: Tensor) -> Any:
        return body(inputs, **model_arguments).last_hidden_state

    return features, head


def task_heads(model: Any) -> list[str]:
    """Return the names of modules that a Transformers model has beside its body, such as a classifier.

    A pretrained body lacks them. Empty if the last layer is the language model's own, and for other models.
    """
    if not is_of_transformers(model):
        return []
    body = model.base_model
    if body is model or model.get_output_embeddings() is not None:
        return []
    names = []
    for name, child in model.named_children():
        has_parameters = next(iter(child.parameters()), None) is not None
        if child is not body and has_parameters:
            names.append(name)
    return names


def positions_of(config: Any) -> int | None:
    """Return the longest sequence that a Transformers model reads; None without a limit (XLNet: -1)."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


# --- what a loss depends on


@contextlib.contextmanager
def checked_gradients(model: nn.Module, loss: Tensor) -> Iterator[None]:
    """Raise UserError after the block for parameters that receive a gradient but are not the model's, since nothing
    would ever train them.

    Use around the backward that completes a step's gradients, in the first step of a process: walking the graph takes
    some milliseconds.
    """
    reached = list(parameters_behind(loss))
    yield

    # After the backward, when FSDP2's gathered parameters can be distinguished: their gradients have moved into the
    # shards.
    ids = {id(p) for p in model.parameters()}
    foreign = [p for p in reached if id(p) not in ids and p.grad is not None]
    if foreign:
        shapes = listed(str(list(p.shape)) for p in foreign)
        raise UserError(
            f"the loss depends on {len(foreign)} parameters that are not among model.parameters() (of shape "
            f"{shapes}), which nothing would train: make the module that owns them a submodule of the model, "
            "not a global, or in a plain list or an attribute of the task; or freeze them with requires_grad_(False)"
        )


def parameters_behind(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters that a backward from `loss` reaches."""
    # Walk the graph of operations back from the loss; parameters are at its leaves.
    nodes_to_visit = [loss.grad_fn]
    visited = set()
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)  # only nodes that accumulate into leaves have one
        if isinstance(variable, nn.Parameter):
            yield variable
        nodes_to_visit.extend(next_node for next_node, _ in node.next_functions)

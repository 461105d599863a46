"""The model: constructed by its class, made ready on its device, and its sizes compared with those of the data."""

import contextlib
import inspect
import logging
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import Resources
from trainapp.checkpoint.checkpointer import weights_in
from trainapp.checkpoint.directory import names_checkpoint, resolve
from trainapp.config.schema import Config, Model
from trainapp.config.targets import Spec, Written, construct
from trainapp.data.batch import map_tensors
from trainapp.errors import UserError
from trainapp.losses.losses import CheckedTask, classification, next_token, unchecked
from trainapp.models import recurrent
from trainapp.models.adapters import base_of
from trainapp.models.huggingface import require_documents_apart
from trainapp.models.inspect import is_of_transformers, lazy_modules, untrained_modules, without_cache
from trainapp.models.weights import load_tensors, load_weights
from trainapp.optim import emulated_kernels
from trainapp.optim.groups import match_names
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.state.contents import Contents
from trainapp.training.session import InitialWeights
from trainapp.trials.probe import lacks_gradients, recorded_gradients

CONTEXT = "context_length"  # the size of a model and of the data that is a length of sequences
log = logging.getLogger(__name__)


class BuiltModel(NamedTuple):
    """A model, with what its class took from the data."""

    model: nn.Module
    filled: dict[str, Any]  # settings filled in from the data's `spec`, by their names, such as `model.num_classes`


def build_model(config: Config, resources: Resources, is_meta: bool = False) -> BuiltModel:
    """Return the model in training mode on its device: constructed, its lazy modules given their shapes, its parameters
    frozen and cast as the configuration says. Nothing calls `train()` later.

    Args:
        config: the run's.
        resources: opened for it.
        is_meta: build it on the meta device.
    """
    device = resources.device

    # Construct it, on its device in the end unless its values come later (`meta_init`).
    initial_device = "meta" if is_meta else resources.initial_device
    device_context = torch.device(initial_device) if initial_device else contextlib.nullcontext()
    with device_context:
        model, filled = _construct_model(config, resources)
    if not is_meta and not _is_on(device, model):
        model.to(device)
    model.train()
    materialise(model, resources, device, is_meta)

    # Adapt its modules and parameters to training.
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.sparse = False
            log.info("the gradient of %s is made dense: clipping and most optimizers do not support sparse ones", name)
    if device.type == "cuda":
        recurrent.train_without_cudnn(model)
    _freeze(model, config.model)
    resources.numerics.cast_parameters(model)
    for dtype in {parameter.dtype for parameter in model.parameters()}:  # a model may be in 16 bits by itself
        emulated_kernels.install_for(device, dtype)
    return BuiltModel(model, filled)


def _is_on(device: torch.device, model: nn.Module) -> bool:
    tensors = (*model.parameters(), *model.buffers())
    return all(tensor.device.type == device.type for tensor in tensors)


def _construct_model(config: Config, resources: Resources) -> BuiltModel:
    """Return the model as constructed by its class. Raises UserError for a model that cannot read the data."""
    targets = resources.targets
    spec = Spec(targets.spec)
    _require_arguments(config, targets, spec)
    model: Any = construct(targets.model, config.model.arguments, "model", config.user_packages, spec=spec)
    _require_training_switch(model)
    _compare_sizes(config, targets, spec)
    without_cache(model)
    if spec.values.get("packed") and is_of_transformers(model):
        require_documents_apart(model)
    return BuiltModel(model, spec.filled)


def _require_arguments(config: Config, targets: ResolvedTargets, spec: Spec) -> None:
    """Raise UserError if the model's class needs an argument that neither the user nor the data has."""
    lacking = []
    for name, parameter in inspect.signature(targets.model).parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_required and name not in config.model.arguments and name not in spec.values:
            lacking.append(name)
    if lacking:
        available = ", ".join(spec.values) or "no spec"
        raise UserError(
            f"model={config.model.target} cannot read data={config.data.target}: it needs {', '.join(lacking)}, and "
            f"the data has {available}; choose a model for this kind of data"
        )


def _require_training_switch(model: nn.Module) -> None:
    """Raise UserError for a module whose `train` is another function than torch's, such as a training loop."""
    for name, module in model.named_modules():
        signature = inspect.signature(module.train)
        try:
            signature.bind(True)
        except TypeError:
            module_text = f"its module {name}" if name else "it"
            raise UserError(
                f"model: {module_text} ({type(module).__name__}) has a method train{signature}, which "
                "replaces torch's train(mode=True), by which models are switched between training and evaluation; give "
                "it another name"
            ) from None


def materialise(model: nn.Module, resources: Resources, device: torch.device, is_meta: bool = False) -> None:
    """Give lazy modules their shapes by a forward of two samples, equal on every rank. Raises UserError for modules
    that it does not reach.

    Args:
        model: on the device.
        resources: have the samples and the tasks.
        device: of the forward.
        is_meta: whether the model has no values to compute with.
    """
    if not is_meta and lazy_modules(model):
        model.eval()  # so that no statistics are updated
        for task in resources.targets.training_tasks:
            _call_with_two_samples(task, model, resources, device)
        model.train()
    still_lazy = lazy_modules(model)
    if still_lazy:
        reason = "parallel.fsdp.meta_init=true" if is_meta else "a forward of the first two samples"
        raise UserError(
            f"model: the shapes of {', '.join(still_lazy)} are lazy and {reason} does not give them; set them"
        )


def _call_with_two_samples(task: CheckedTask, model: nn.Module, resources: Resources, device: torch.device) -> None:
    """Call a task without a graph, and with one if it needs gradients."""

    def call() -> None:
        batch = map_tensors(lambda tensor: tensor.to(device), resources.batches.example(2))
        with resources.numerics.autocast:
            task(model, batch)

    contents = Contents(task=task.unchecked)
    try:
        with torch.no_grad():
            call()
        return
    except RuntimeError as error:
        if not lacks_gradients(error):
            raise
    finally:
        contents.restore()
    with recorded_gradients([model, task.unchecked]):
        call()
    contents.restore()


def _freeze(model: nn.Module, settings: Model) -> None:
    """Freeze the parameters that `model.freeze` names, and put modules into evaluation mode if `model.freeze_mode` says
    so. Raises UserError if there are none.
    """
    for name in match_names(model, settings.freeze, "model.freeze"):  # any name of a tied weight freezes it
        model.get_parameter(name).requires_grad_(False)
    if settings.freeze_mode is None:
        return
    modules = untrained_modules(model)
    if not modules:
        raise UserError(
            "model.freeze_mode=eval: no module has only frozen parameters, so none would be in evaluation mode; name "
            "whole modules in model.freeze, such as [body]"
        )
    for module in modules:
        module.eval()


def load_initial_weights(config: Config, resources: Resources, model: nn.Module, ranks: Ranks) -> InitialWeights | None:
    """Load `model.init_from` into the model, whole or in shards. Return what was loaded; None if it is not set, or if a
    checkpoint of the run will be restored. Raises UserError for weights that do not fit.
    """
    source = config.model.init_from
    if source is None or resources.resumes:
        return None
    strict = config.model.init_strict
    prefix = config.model.init_prefix
    adapters_base = base_of(model)
    names = {name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if names_checkpoint(source):
        path = answered_by_rank_zero(ranks, lambda: resolve(source, "model.init_from"))
        weights = weights_in(path, model)
        # A checkpoint of adapters does not have the values of their base, which has been loaded from its source.
        loaded_before = frozenset() if adapters_base is None else adapters_base.names.difference(weights)
        names -= loaded_before
        fresh_names = load_tensors(model, weights, strict, f"model.init_from={source}", loaded_before, prefix)
        log.info("starting from the weights of %s", path)
    elif adapters_base is None:
        fresh_names = load_weights(model, source, strict, prefix)
    else:  # a file has been loaded into the base already
        return InitialWeights(source, None, len(adapters_base.names), [])
    # Old files lack BatchNorm's counter, which matters only to `momentum=None`.
    counted_names = [name for name in names if not name.endswith("num_batches_tracked")]
    loaded = len(counted_names) - len(fresh_names)
    return InitialWeights(source, loaded, len(counted_names), fresh_names)


# --- sizes that the user has set, beside those of the data


def _compare_sizes(config: Config, targets: ResolvedTargets, spec: Spec) -> None:
    """Log the model's sizes that differ from the data's, one line each. Raises UserError if a built-in loss has targets
    for which the model has no output.
    """
    differing = [written for written in spec.written if _differs(written, spec)]

    # What would fail: positions beyond the model's longest sequence, targets beyond its outputs.
    if config.activity.computes_loss:
        if config.model.target.startswith("trainapp.models."):
            _require_context(spec)
        for task in (targets.task, *targets.training_tasks):
            _require_outputs(task, differing, spec)

    # What may be meant.
    if config.mode != "export":  # it reads no batch
        for written in differing:
            _log_difference(written, spec.values[written.name])


def _differs(written: Written, spec: Spec) -> bool:
    """Return whether the user's value is not the data's. 0 counts as unset: it means a model without a head."""
    value = written.value
    size_in_data = spec.values[written.name]
    if not (_is_plain(value) and _is_plain(size_in_data)):
        return False
    if written.name == CONTEXT:
        return _is_less(value, size_in_data)  # a model may take longer sequences than those of the data
    return value != 0 and _as_list(value) != _as_list(size_in_data)


def _is_plain(value: Any) -> bool:
    """Return whether the value is one that YAML may hold: a `spec` may also have tensors, say."""
    return isinstance(value, (int, float, str, list, tuple))


def _as_list(value: Any) -> Any:
    """Return a tuple as the list that YAML has for it."""
    return list(value) if isinstance(value, tuple) else value


def _require_outputs(task: Any, differing: list[Written], spec: Spec) -> None:
    """Raise UserError if the size that bounds the task's targets is too small wherever the model has it. (One of them
    may be, such as that of an encoder with its own vocabulary.)

    Args:
        task: the task.
        differing: sizes of the user's that are not the data's.
        spec: all sizes.
    """
    name = _size_that_bounds_targets(task)
    if name is None or any(setting.endswith(f".{name}") for setting in spec.filled):
        return
    needed: Any = spec.values.get(name)

    # Where the model has several sizes of this name, one that is large enough may be the output's.
    sizes_of_this_name = [written for written in spec.written if written.name == name]
    too_small = [written for written in differing if written.name == name and _is_less(written.value, needed)]
    if too_small and len(too_small) == len(sizes_of_this_name):
        settings = ", ".join(f"{written.setting}={written.value}" for written in too_small)
        pronoun = "it" if len(too_small) == 1 else "them"
        raise UserError(
            f"{settings}: the data has {name}={needed}, so a target of {needed - 1} would be out of range; remove "
            f"{pronoun} to use the data's size, or set at least {needed}"
        )


def _require_context(spec: Spec) -> None:
    """Raise UserError if the data's sequences are longer than the model's longest."""
    for written in spec.written:
        if written.name == CONTEXT and _differs(written, spec):
            raise UserError(
                f"{written.setting}={written.value}: the data has sequences of {spec.values[CONTEXT]} tokens; remove "
                f"it to use the data's size, or lower data.{CONTEXT}"
            )


def _size_that_bounds_targets(task: Any) -> str | None:
    """Return the size by name; None for a task of the user's own, whose targets may mean anything."""
    if unchecked(task) is classification:
        return "num_classes"
    if unchecked(task) is next_token:
        return "vocab_size"
    return None


def _is_less(value: Any, other: Any) -> bool:
    """Return whether both are integers, and the first is the smaller one."""
    return isinstance(value, int) and isinstance(other, int) and value < other


def _log_difference(written: Written, size_in_data: Any) -> None:
    setting = f"{written.setting}={written.value}"
    in_data = f"the data's {written.name}={size_in_data}"
    if _is_less(size_in_data, written.value):  # such as a vocabulary padded to a multiple of 64
        log.info("%s is larger than %s", setting, in_data)
    elif _is_less(written.value, size_in_data):
        log.warning("%s is smaller than %s: larger indices are out of range", setting, in_data)
    else:
        log.warning("%s differs from %s", setting, in_data)

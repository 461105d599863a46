"""The optimizer: built with the fused kernel where available, its state allocated before the first step.

The optimizer's parameter groups are in `groups`.
"""

import copy
import functools
import inspect
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config import targets
from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
from trainapp.optim.emulated_kernels import install_for
from trainapp.optim.groups import build_groups, options_of, passes_on
from trainapp.optim.muon import Muon
from trainapp.optim.on_host import HostCopies
from trainapp.torch_private import step_optimizer
from trainapp.units import listed

_FUSED_DEVICES = ("cuda", "cpu", "mps")
# Options that are not per group: torch chooses one kernel for all groups; the others affect how it is called.
_NOT_PER_GROUP = ("fused", "foreach", "capturable", "differentiable")

_REQUIRES_CLOSURE = (
    "its step requires a closure, which evaluates the loss again, several times per step; here a step's gradients are "
    "accumulated over micro-batches once, and then applied; use an optimizer without a closure, such as "
    "torch.optim.AdamW, or minimise the loss over all data outside of trainapp, as with "
    "scipy.optimize.minimize(method='L-BFGS-B'); for SAM see docs/porting.md"
)


def build_optimizer(
    settings: Optimizer,
    model: nn.Module,
    device: torch.device,
    user_packages: Sequence[str],
    blocks: Sequence[nn.Module] = (),
    setting: str = "optimizer",
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that require gradients.

    Its state is already allocated, so that the first step needs no more memory than later ones. Raises UserError for a
    class that is not allowed or cannot take a step here, for arguments that it does not take, and for groups that match
    nothing, only frozen parameters, or parameters of another group.

    Args:
        settings: the optimizer's settings.
        model: the model.
        device: of the parameters.
        user_packages: packages from which the optimizer's class may come.
        blocks: the model's blocks, for `layer_decay`.
        setting: name of the settings' section, for messages.
    """
    # The class must suit the model, and have the kernel that is asked for.
    kind = targets.locate(settings.target, f"{setting}._target_", user_packages)
    has_fused_kernel = "fused" in inspect.signature(kind).parameters
    _require_trained_parameters(model)
    _require_suited(kind, model, f"{setting}._target_={settings.target}")
    if settings.fused is True and not has_fused_kernel:
        raise UserError(f"{setting}.fused=true: {settings.target} has no fused kernel; use {setting}.fused=auto")

    step_device = torch.device(device.type)
    if settings.offload:
        step_device = torch.device("cpu")
    build = functools.partial(_build, kind, settings, model, step_device, user_packages, blocks, setting)
    if settings.fused == "auto":
        is_fused = has_fused_kernel and _is_shipped(kind) and step_device.type in _FUSED_DEVICES
    else:
        is_fused = settings.fused

    # The fused kernel leaves dampened momentum unwritten when the first step overflows, and `materialise_state` cannot
    # create it beforehand.
    if is_fused and not settings.arguments.get("dampening"):
        try:
            return build(fused=True)
        except UserError:
            if settings.fused != "auto":
                raise
            # Otherwise torch has no such kernel for these parameters, such as SGD's for FSDP2 shards.
    return build()  # with new groups: an optimizer writes its settings into those that it is given


def _require_trained_parameters(model: nn.Module) -> None:
    """Raise UserError for a model in which nothing can be trained."""
    if next(iter(model.parameters()), None) is None:
        raise UserError(
            f"model: {type(model).__name__} has no parameters, so there is nothing to train; keep layers in "
            "attributes, an nn.ModuleList or an nn.ModuleDict: those in a plain list or dict are not found"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model: {type(model).__name__} has no parameter that requires a gradient, so there is nothing to train; "
            "unfreeze some parameters"
        )


def _require_suited(kind: Any, model: nn.Module, setting: str) -> None:
    """Raise UserError for an optimizer whose step needs more than dense gradients of parameters of any shape.

    Args:
        kind: the optimizer's class.
        model: the model.
        setting: the setting that names the class, with its value, for messages.
    """
    closure = None  # the parameter of `step`
    if hasattr(kind, "step"):
        closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(f"{setting}: {_REQUIRES_CLOSURE}")
    if inspect.isclass(kind) and issubclass(kind, torch.optim.SparseAdam):
        raise UserError(
            f"{setting}: takes sparse gradients only, but here all gradients are dense, those of embeddings too; use "
            "torch.optim.AdamW"
        )
    not_matrices = [p for p in model.parameters() if p.requires_grad and p.ndim != 2]
    if kind is torch.optim.Muon and not_matrices:
        shapes = dict.fromkeys(str(list(p.shape)) for p in not_matrices)
        raise UserError(
            f"{setting}: takes matrices only, but {type(model).__name__} has other parameters, of shapes "
            f"{listed(shapes)}; use optimizer=muon, which gives those to AdamW"
        )


def _build(
    kind: Any,
    settings: Optimizer,
    model: nn.Module,
    step_device: torch.device,
    user_packages: Sequence[str],
    blocks: Sequence[nn.Module],
    setting: str,
    **kernel: bool,
) -> torch.optim.Optimizer:
    """Return the optimizer with this choice of a kernel (`fused`), and its state. Raises UserError if there is none."""
    groups = build_groups(kind, settings, model, blocks, setting)
    copies = None
    if settings.offload:
        copies = HostCopies()
        groups = copies.of_groups(groups)
    provided: dict[str, Any] = {"params": groups}
    if settings.lr is not None:
        provided["lr"] = settings.lr
    arguments = settings.arguments | kernel | _arguments_passed_on(kind, settings)
    optimizer = targets.construct(kind, arguments, setting, user_packages, provided)
    _require_known_options(settings, optimizer, setting)

    # Rates by layer.
    rate_per_layer = settings.layer_decay or 1
    for group in optimizer.param_groups:
        layers_after = group.pop("layers_after", 0)
        group["lr"] *= rate_per_layer**layers_after

    # The state, before the first step.
    if isinstance(optimizer, (torch.optim.Muon, Muon)):  # they multiply in bf16, whatever the precision
        install_for(step_device, torch.bfloat16)
    _allocate_state(optimizer, settings, setting)
    if copies is not None:
        copies.attach(optimizer)
    return optimizer


def _arguments_passed_on(kind: Any, settings: Optimizer) -> dict[str, Any]:
    """Return rate and weight decay, if they are set, for a class that passes them on to another optimizer."""
    values = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    return {name: value for name, value in values.items() if value is not None and passes_on(kind, name)}


def _require_known_options(settings: Optimizer, optimizer: torch.optim.Optimizer, setting: str) -> None:
    """Raise UserError for group options that the optimizer lacks, or does not read per group: torch accepts any key."""
    options = [name for name in optimizer.defaults if name not in _NOT_PER_GROUP]
    for number, group in enumerate(settings.groups):
        for name in options_of(group):
            if name not in options:
                advice = "; parameters are frozen by model.freeze" if name == "freeze" else ""
                raise UserError(
                    f"{setting}.groups.{number}.{name}: {type(optimizer).__name__} has no group option {name}; its "
                    f"options are {', '.join(options)}, those of the `defaults` that the class passes to "
                    f"super().__init__{advice}"
                )


# --- state before the first step


def _allocate_state(optimizer: torch.optim.Optimizer, settings: Optimizer, setting: str) -> None:
    """Allocate the state. Raises UserError for an optimizer that fails with this model's gradients."""
    try:
        materialise_state(optimizer)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        optimizer.zero_grad(set_to_none=True)
        raise UserError(
            f"{setting}._target_={settings.target}: it cannot take a plain step on this model's gradients ({error}); "
            "choose another, such as torch.optim.AdamW"
        ) from error


def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that torch's optimizers otherwise create in their first step.

    Not possible for state that is not zero after a step without effect (Rprop's step sizes), for SGD's dampened
    momentum, whose first step differs, and for optimizers that neither torch nor trainapp ships.
    """
    is_dampened = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    has_state = bool(optimizer.state)  # Adagrad's constructor creates it
    if is_dampened or has_state or not _is_shipped(type(optimizer)):
        return

    step_without_effect(optimizer)
    if _has_nonzero_state(optimizer):
        optimizer.state.clear()


def _has_nonzero_state(optimizer: torch.optim.Optimizer) -> bool:
    for state in optimizer.state.values():
        for name, value in state.items():
            # As bool, since `any` of uint8 is uint8, and a plan answers reads by dtype.
            if name != "step" and torch.is_tensor(value) and value.any().bool():
                return True
    return False


def uses_foreach(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer's step runs kernels over lists of tensors, which need a temporary copy of all
    parameters. Unless they are told, torch's optimizers do so on a GPU only.
    """
    options = optimizer.defaults
    if "foreach" not in inspect.signature(type(optimizer)).parameters:
        return False
    if options.get("foreach") is None:
        return device.type == "cuda" and not options.get("fused")
    return bool(options["foreach"])


def _is_shipped(kind: Any) -> bool:
    """Return whether torch or trainapp ships this class: a step of any other class may change anything."""
    package = str(getattr(kind, "__module__", "")).partition(".")[0]
    return package in ("torch", "trainapp")


@torch.no_grad()
def step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with zero gradients, rate and decay, which changes no parameter. Step counts are reset to zero.

    Leaves the optimizer's state allocated, ready to load a checkpoint into.
    """
    # With zero gradients, rate and decay, torch's optimizers change nothing but their state. One of the user's may
    # count its steps in an attribute, which no state dict has.
    attributes_before = _plain_attributes(optimizer)
    groups_before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for name in ("lr", "weight_decay"):
            if name in group:
                group[name] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    # Restore the options and attributes; the step does not count.
    for name in _plain_attributes(optimizer).keys() - attributes_before.keys():
        delattr(optimizer, name)
    vars(optimizer).update(attributes_before)
    for group, group_before in zip(optimizer.param_groups, groups_before, strict=True):
        group.update(group_before)
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            if torch.is_tensor(state["step"]):
                state["step"].zero_()
            else:
                state["step"] = 0


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the attributes that are numbers, strings or containers of these: no state, no groups."""
    copies = {}
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults") and _is_plain(value):
            copies[name] = copy.deepcopy(value)
    return copies


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str))


# --- a step that fails for want of a closure


def require_no_closure(optimizer: torch.optim.Optimizer, error: Exception, setting: str) -> None:
    """Raise UserError if a step has failed because it had no closure: by its error's message, or the line that raised
    it, as of a bare `assert closure is not None`.

    Args:
        optimizer: whose step has failed.
        error: what it has raised.
        setting: name of the optimizer's settings, for the message.
    """
    lines = [str(frame.line) for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    if any("closure" in text for text in (str(error), *lines)):
        kind = type(optimizer)
        raise UserError(f"{setting}._target_={kind.__module__}.{kind.__qualname__}: {_REQUIRES_CLOSURE}") from error


# --- one parameter at a time, as soon as its gradient is complete: LOMO's method (arXiv:2306.09782), for any optimizer
# whose update of a parameter needs only that parameter's gradient


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer that may need several gradients at once, or count its calls."""
    kind = type(optimizer)
    is_separable = _is_shipped(kind) or getattr(kind, "updates_parameters_alone", False)
    if not is_separable:
        raise UserError(
            f"optimizer.in_backward=true with {kind.__name__}: it is called once per parameter, but may need all "
            "gradients at once; if it does not, declare `updates_parameters_alone = True` in its class, otherwise use "
            "optimizer.in_backward=false"
        )


def step_parameter(optimizer: torch.optim.Optimizer, parameter: Tensor, parameter_group: dict[str, Any]) -> None:
    """Take a step that updates only this parameter.

    Args:
        optimizer: the optimizer.
        parameter: the parameter.
        parameter_group: the group of the optimizer in which it is.
    """
    # During the step, the parameter is the only one in the groups.
    groups = optimizer.param_groups
    all_parameters = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [parameter] if group is parameter_group else []
    try:
        step_optimizer(optimizer)
    finally:
        for group, parameters in zip(groups, all_parameters, strict=True):
            group["params"] = parameters

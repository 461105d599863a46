"""Builds the optimizer: its parameter groups, the fused kernel where available, state allocated before the first step.

Groups are by name (`optimizer.groups`) and by layer (`optimizer.layer_decay`, as in BEiT, arXiv:2106.08254): the rate
of each block is the next one's times a factor. Modules registered before the first block, such as an embedding, count
as a layer before it; modules outside the blocks after that, such as the head, have the full rate.
"""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config import targets
from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
from trainapp.optim.emulated_kernels import install_for
from trainapp.optim.muon import Muon
from trainapp.optim.on_host import HostCopies
from trainapp.torch_private import step_optimizer
from trainapp.units import listed

_FUSED_DEVICES = ("cuda", "cpu", "mps")
# Options that are not per group: torch chooses one kernel for all groups; the others affect how it is called.
_OF_THE_WHOLE = ("fused", "foreach", "capturable", "differentiable")


def build_optimizer(
    settings: Optimizer,
    model: nn.Module,
    device: torch.device,
    user_packages: Sequence[str],
    blocks: Sequence[nn.Module] = (),
    setting: str = "optimizer",
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that require gradients, with its state already allocated, so that the first step
    needs no more memory than later ones.

    blocks: the model's blocks, for `layer_decay`. setting: name of the section, for messages.
    Raises UserError for a class that is not allowed or cannot take a step here, for arguments that it does not take,
    and for groups that match nothing, only frozen parameters, or parameters of another group.
    """
    kind = targets.locate(settings.target, f"{setting}._target_", user_packages)
    takes = inspect.signature(kind).parameters
    if next(model.parameters(), None) is None:
        raise UserError(
            f"model: {type(model).__name__} has no parameters, so there is nothing to train; keep layers in "
            "attributes, an nn.ModuleList or an nn.ModuleDict: those in a plain list or dict are not found"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model: {type(model).__name__} has no parameter that requires a gradient, so there is nothing to train; "
            "unfreeze some parameters"
        )
    _require_suited(kind, model, f"{setting}._target_={settings.target}")
    if settings.fused is True and "fused" not in takes:
        raise UserError(f"{setting}.fused=true: {settings.target} has no fused kernel; use {setting}.fused=auto")
    is_auto, place = settings.fused == "auto", "cpu" if settings.offload else device.type
    is_fused = "fused" in takes and _is_known(kind) and place in _FUSED_DEVICES if is_auto else settings.fused

    def ready(**kernel: bool) -> torch.optim.Optimizer:
        # Rebuilt, because an optimizer writes its settings into the groups it is given.
        groups = _groups(kind, settings, model, blocks, setting)
        copies = HostCopies() if settings.offload else None
        provided: dict[str, Any] = {"params": groups if copies is None else copies.of_groups(groups)}
        provided |= {} if settings.lr is None else {"lr": settings.lr}
        optimizer = targets.construct(kind, settings.arguments | kernel, setting, user_packages, provided)
        _require_known(settings, optimizer, setting)
        for group in optimizer.param_groups:
            group["lr"] *= (settings.layer_decay or 1) ** group.pop("layers_after", 0)
        if isinstance(optimizer, (torch.optim.Muon, Muon)):  # they multiply in bf16, whatever the precision
            install_for(torch.device(place), torch.bfloat16)
        _allocate_state(optimizer, settings, setting)
        if copies is not None:
            copies.attach(optimizer)
        return optimizer

    # The fused kernel leaves dampened momentum unwritten when the first step overflows, and `materialise_state` cannot
    # create it beforehand.
    if is_fused and not settings.arguments.get("dampening"):
        try:
            return ready(fused=True)
        except UserError:
            if not is_auto:
                raise  # else: torch has no such kernel for these parameters, such as SGD's for FSDP2 shards
    return ready()


# --- parameters by name


def all_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters under each of their names: tied weights have several."""
    return dict(model.named_parameters(remove_duplicate=False))


def matching(model: nn.Module, patterns: Sequence[str], setting: str) -> list[str]:
    """The names of the model's parameters that the patterns of a setting match. A pattern is a parameter, a module for
    all of its parameters, or shell wildcards, whose `*` also matches dots. Raises UserError for one without a match.
    """
    names, found = list(all_names(model)), list[str]()
    for pattern in patterns:
        own = [name for name in names if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)]
        if not own:
            modules = listed(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UserError(
                f"{setting}=[{pattern}]: {type(model).__name__} has no parameter or module of this name; its top-level "
                f"modules are {modules or 'none'}; name one of them, a parameter such as "
                f"{names[0] if names else 'weight'}, or use wildcards"
            )
        found += own
    return list(dict.fromkeys(found))


def divided(model: nn.Module, patterns_of: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The names matched by the patterns of each setting, which divide the parameters among optimizers or their groups.

    Raises UserError for a pattern that matches nothing, a parameter matched by two settings, and a setting that matches
    only frozen parameters.
    """
    parameters, found = all_names(model), dict[str, list[str]]()
    setting_of: dict[int, str] = {}  # by the parameter's id
    for setting, patterns in patterns_of.items():
        found[setting] = matching(model, patterns, setting)
        for name in found[setting]:
            if (other := setting_of.setdefault(id(parameters[name]), setting)) != setting:
                raise UserError(f"{setting}: {name} is also matched by {other}; each parameter may be in only one")
        if not any(parameters[name].requires_grad for name in found[setting]):
            raise UserError(
                f"{setting}: nothing that it matches ({listed(found[setting])}) is trained by this optimizer; remove "
                "it, or unfreeze parameters"
            )
    return found


# --- parameter groups


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights with two or more dimensions decay, norms and biases (at most one dimension) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _groups(
    kind: Any, settings: Optimizer, model: nn.Module, blocks: Sequence[nn.Module], setting: str
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    parameter = inspect.signature(kind).parameters.get("weight_decay")
    if parameter is not None:
        weight_decay = parameter.default if settings.weight_decay is None else settings.weight_decay
        # An optimizer may define its own groups.
        groups = getattr(kind, "parameter_groups", parameter_groups)(model, weight_decay)
        if settings.decay == "all":
            for group in groups:
                group["weight_decay"] = weight_decay
    elif settings.weight_decay:
        raise UserError(
            f"{setting}.weight_decay={settings.weight_decay}: {settings.target} has no weight decay; use "
            f"{setting}.weight_decay=null"
        )
    parameters = all_names(model)
    names = divided(model, {f"{setting}.groups.{n}.match": own["match"] for n, own in enumerate(settings.groups)})
    for own, matches in zip(settings.groups, names.values(), strict=True):
        ids = {id(parameters[name]) for name in matches}
        groups = _split_off(groups, ids, _options(own), ",".join(own["match"]))
    if settings.layer_decay is not None:
        for layer, ids in enumerate(_layers(model, blocks)):
            groups = _split_off(groups, ids, {"layers_after": len(blocks) + 1 - layer}, f"layer_{layer}")
    return groups


def _split_off(
    groups: list[dict[str, Any]], ids: set[int], options: dict[str, Any], label: str
) -> list[dict[str, Any]]:
    """The groups, with these options for the parameters with these ids, in groups of their own. label: for the log."""
    has_matrices = any(p.ndim >= 2 for group in groups for p in group["params"] if id(p) in ids)
    split = []
    for group in groups:
        own = [p for p in group["params"] if id(p) in ids]
        others = [p for p in group["params"] if id(p) not in ids]
        if others:
            split.append({**group, "params": others})
        if own:
            label_of_own = f"{group['label']}:{label}" if "label" in group else label
            split.append({**group, **options, "params": own, "label": label_of_own})
            if has_matrices and all(p.ndim < 2 for p in own) and "weight_decay" in group:
                split[-1]["weight_decay"] = group["weight_decay"]  # not for norms and biases, unless they are alone
    return split


def _layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[set[int]]:
    """Ids of the parameters before the first block, in each block, and of the rest."""
    layers: list[set[int]] = [set() for _ in range(len(blocks) + 2)]
    for layer, block in zip(layers[1:], blocks, strict=False):
        layer |= {id(p) for p in block.parameters()}.difference(*layers)
    of_blocks = set().union(*layers)
    outside = layers[0]
    for parameter in model.parameters():
        if id(parameter) in of_blocks:
            outside = layers[-1]
        else:
            outside.add(id(parameter))
    return layers


def _require_suited(kind: Any, model: nn.Module, setting: str) -> None:
    """Raises UserError for an optimizer whose step needs more than dense gradients of parameters of any shape.

    setting: the setting that names it, with its value, for messages.
    """
    closure = inspect.signature(kind.step).parameters.get("closure") if hasattr(kind, "step") else None
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"{setting}: its step requires a closure, which evaluates the loss again, several times per step; here a "
            "step's gradients are accumulated over micro-batches once, and then applied; use an optimizer without a "
            "closure, such as torch.optim.AdamW, or minimise the loss over all data outside of trainapp, as with "
            "scipy.optimize.minimize(method='L-BFGS-B')"
        )
    if inspect.isclass(kind) and issubclass(kind, torch.optim.SparseAdam):
        raise UserError(
            f"{setting}: takes sparse gradients only, but here all gradients are dense, those of embeddings too; use "
            "torch.optim.AdamW"
        )
    shapes = dict.fromkeys(str(list(p.shape)) for p in model.parameters() if p.requires_grad and p.ndim != 2)
    if kind is torch.optim.Muon and shapes:
        raise UserError(
            f"{setting}: takes matrices only, but {type(model).__name__} has other parameters, of shapes "
            f"{listed(shapes)}; use optimizer=muon, which gives those to AdamW"
        )


def _require_known(settings: Optimizer, optimizer: torch.optim.Optimizer, setting: str) -> None:
    """Raises UserError for group options that the optimizer does not have, or does not read per group: torch accepts
    any key.
    """
    options = [name for name in optimizer.defaults if name not in _OF_THE_WHOLE]
    for number, group in enumerate(settings.groups):
        if unknown := [name for name in _options(group) if name not in options]:
            frozen = "; parameters are frozen by model.freeze" if unknown[0] == "freeze" else ""
            raise UserError(
                f"{setting}.groups.{number}.{unknown[0]}: {type(optimizer).__name__} has no group option {unknown[0]}; "
                f"its options are {', '.join(options)}{frozen}"
            )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "match"}


# --- state before the first step


def _allocate_state(optimizer: torch.optim.Optimizer, settings: Optimizer, setting: str) -> None:
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
    if is_dampened or optimizer.state or not _is_known(type(optimizer)):  # Adagrad's constructor creates it
        return
    step_without_effect(optimizer)
    values = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    # As bool, since `any` of uint8 is uint8, and a plan answers reads by dtype.
    if any(torch.is_tensor(value) and value.any().bool() for name, value in values if name != "step"):
        optimizer.state.clear()


def _is_known(kind: Any) -> bool:
    """Whether torch or trainapp ships this class: a step of any other class may change anything."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] in ("torch", "trainapp")


@torch.no_grad()
def step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with zero gradients, rate and decay, which changes no parameter. Step counts are reset to zero.

    Leaves the optimizer's state allocated, ready to load a checkpoint into.
    """
    kept = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {name: 0.0 for name in ("lr", "weight_decay") if name in group}
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            state["step"] = state["step"].zero_() if torch.is_tensor(state["step"]) else 0


# --- one parameter at a time, as soon as its gradient is complete: LOMO's method (arXiv:2306.09782), for any optimizer
# whose update of a parameter needs only that parameter's gradient


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer that may need several gradients at once, or count its calls."""
    kind = type(optimizer)
    if not (_is_known(kind) or getattr(kind, "updates_parameters_alone", False)):
        raise UserError(
            f"optimizer.in_backward=true with {kind.__name__}: it is called once per parameter, but may need all "
            "gradients at once; if it does not, declare `updates_parameters_alone = True` in its class, otherwise use "
            "optimizer.in_backward=false"
        )


def step_alone(optimizer: torch.optim.Optimizer, parameter: Tensor, own: dict[str, Any]) -> None:
    """Update only this parameter. own: its group."""
    groups = optimizer.param_groups
    all_parameters = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [parameter] if group is own else []
    try:
        step_optimizer(optimizer)
    finally:
        for group, parameters in zip(groups, all_parameters, strict=True):
            group["params"] = parameters

"""`optimizer.groups` and `optimizer.layer_decay`: parameters that are frozen, or trained with options of their own.

Layer-wise decay is that of BEiT (arXiv:2106.08254): the learning rate of each block is the next one's times a factor.
What is registered before the first block, such as an embedding, counts as a layer before it; what comes after the
first block and is in none, such as the head, has the full rate.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.config import targets
from trainapp.config.parameter_groups import OWN
from trainapp.config.schema import Optimizer
from trainapp.config.validation import check_arguments
from trainapp.errors import UserError
from trainapp.optim.patterns import all_names, matching
from trainapp.units import listed

# Torch chooses one kernel for all groups; the others of these are about how it is called.
_OF_THE_WHOLE = ("fused", "foreach", "capturable", "differentiable")


class Own(NamedTuple):
    """What a parameter has of its own. group: its place in `optimizer.groups`, None for none; layer: its number."""

    group: int | None = None
    layer: int | None = None


def freeze(parameters: Mapping[str, nn.Parameter], settings: Optimizer, owner: str, setting: str = "optimizer") -> None:
    """Freeze the parameters that groups with `freeze: true` match. Call before the model is spread over ranks.

    owner: the model's name, and setting: where the settings are from, for messages. Raises UserError for a pattern that
    matches nothing.
    """
    for number, group in enumerate(settings.groups):
        if group.get("freeze"):
            for name in _names(group, number, parameters, setting, owner):
                parameters[name].requires_grad_(False)


def split(
    groups: list[Any],
    model: nn.Module,
    settings: Optimizer,
    kind: Any,
    blocks: Sequence[nn.Module],
    setting: str = "optimizer",
) -> list[dict[str, Any]]:
    """The parameter groups, or parameters, of an optimizer of class `kind`, split by what is said of each parameter.

    blocks: of the model, in order, for `layer_decay`. Raises UserError for a pattern that matches nothing or only
    frozen parameters, for parameters that two groups match, and for options that the class does not have.
    """
    of_group = _by_parameter(model, settings, setting)
    layers = layer_numbers(model, blocks) if settings.layer_decay is not None else {}
    base = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    found: dict[tuple[int, Own], dict[str, Any]] = {}
    for position, group in enumerate(base):
        for parameter in group["params"]:
            own = Own(of_group.get(id(parameter)), layers.get(id(parameter)))
            entry = found.setdefault((position, own), {**group, "params": []})
            entry["params"].append(parameter)
    with_matrices = {own.group for (_, own), entry in found.items() if any(p.ndim >= 2 for p in entry["params"])}
    rate = _rate(settings, kind)
    for (_, own), entry in found.items():
        _give_options(entry, own, settings, rate, len(blocks), own.group in with_matrices)
    return list(found.values())


def layer_numbers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, int]:
    """By the id of each parameter: 0 before the first block, 1 to N in the N blocks, N + 1 for the rest."""
    of_blocks: dict[int, int] = {}
    for number, block in enumerate(blocks, start=1):
        for parameter in block.parameters():
            of_blocks.setdefault(id(parameter), number)
    layers: dict[int, int] = {}
    outside = 0
    for parameter in model.parameters():
        layers[id(parameter)] = of_blocks.get(id(parameter), outside)
        outside = len(blocks) + 1 if id(parameter) in of_blocks else outside
    return layers


def require_options(
    settings: Optimizer, kind: Any, arguments: dict[str, Any], user_packages: Sequence[str], setting: str = "optimizer"
) -> None:
    """Raises UserError for groups whose options the class does not have, or refuses."""
    takes = inspect.signature(kind).parameters
    errors = []
    for number, group in enumerate(settings.groups):
        place, options = f"{setting}.groups.{number}", _options(group)
        errors += check_arguments(kind, options, place, takes)
        errors += [
            f"{place}.{name}: this is a setting of the whole optimizer; set {setting}.{name}, or leave it out"
            for name in _OF_THE_WHOLE
            if name in options
        ]
    if errors:
        raise UserError("\n".join(errors))
    if hasattr(kind, "parameter_groups"):
        return  # it may refuse a parameter that is none of the model's
    for number, group in enumerate(settings.groups):
        # An optimizer judges the values that its constructor is given, but none of a group's.
        options = {"lr": settings.lr, **arguments, **_options(group)}
        options = {name: value for name, value in options.items() if name in takes and value is not None}
        place, trial = f"{setting}.groups.{number}", nn.Parameter(torch.zeros(2, 2))
        targets.construct(kind, options, place, user_packages, {"params": [trial]})


def require_known(settings: Optimizer, optimizer: torch.optim.Optimizer, setting: str = "optimizer") -> None:
    """Raises UserError for options of groups that the optimizer reads for all parameters alike."""
    for number, group in enumerate(settings.groups):
        unread = [name for name in _options(group) if name not in optimizer.defaults]
        if unread:
            raise UserError(
                f"{setting}.groups.{number}.{unread[0]}: {type(optimizer).__name__} has one {unread[0]} for all "
                f"parameters; a group may have {', '.join(n for n in optimizer.defaults if n not in _OF_THE_WHOLE)}"
            )


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rates, as they are logged: `lr` of what is in no group, and `lr/NAME` of each group."""
    groups = optimizer.param_groups
    plain = next((group for group in groups if "label" not in group), groups[0])
    return {"lr": plain["lr"]} | {f"lr/{group['label']}": group["lr"] for group in groups if "label" in group}


def _names(
    group: dict[str, Any], number: int, parameters: Mapping[str, nn.Parameter], setting: str, owner: str
) -> list[str]:
    return [
        name
        for pattern in group["match"]
        for name in matching(pattern, parameters, f"{setting}.groups.{number}.match={pattern}", owner)
    ]


def _by_parameter(model: nn.Module, settings: Optimizer, setting: str) -> dict[int, int]:
    """By the id of each parameter that a group matches, the number of that group."""
    parameters = all_names(model)
    found: dict[int, int] = {}
    for number, group in enumerate(settings.groups):
        names = _names(group, number, parameters, setting, type(model).__name__)
        for name in names:
            other = found.setdefault(id(parameters[name]), number)
            if other != number:
                raise UserError(
                    f"{setting}.groups: {name} is matched by group {other} ({listed(settings.groups[other]['match'])}) "
                    f"and by group {number} ({listed(group['match'])}); each parameter may be in one of them"
                )
        if not group.get("freeze") and not any(parameters[name].requires_grad for name in names):
            raise UserError(
                f"{setting}.groups.{number}: nothing that {listed(group['match'])} matches is trained by this "
                f"optimizer ({listed(names)}): it is frozen, or another update's; leave the group out, or change "
                "model.freeze"
            )
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in OWN}


def _rate(settings: Optimizer, kind: Any) -> float:
    if settings.lr is not None:
        return settings.lr
    default = inspect.signature(kind).parameters["lr"].default if "lr" in inspect.signature(kind).parameters else None
    return float(default) if isinstance(default, (int, float)) else 1.0


def _give_options(
    entry: dict[str, Any], own: Own, settings: Optimizer, rate: float, blocks: int, has_matrices: bool
) -> None:
    """Put the options into a group, in place, and the name that it is logged under."""
    labels = []
    if own.group is not None:
        group = settings.groups[own.group]
        options = _options(group)
        if has_matrices and all(p.ndim < 2 for p in entry["params"]):
            options.pop("weight_decay", None)  # not for norms and biases, unless the group has nothing else
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        entry.update({name: float(value) if name == "lr" else value for name, value in options.items()})
        labels.append(",".join(group["match"]))
    if own.layer is not None and settings.layer_decay is not None:
        entry["lr"] = entry.get("lr", rate) * settings.layer_decay ** (blocks + 1 - own.layer)
        labels.append(f"layer_{own.layer}")
    if labels:
        entry["label"] = ":".join(labels)


def changed_members(
    saved: Sequence[Iterable[str]], own: Sequence[Iterable[str]]
) -> tuple[list[list[str]], list[list[str]]]:
    """Of two lists of groups, each with the names of its parameters: those that only the first has, and vice versa."""
    before, now = [sorted(group) for group in saved], [sorted(group) for group in own]
    return [group for group in before if group not in now], [group for group in now if group not in before]

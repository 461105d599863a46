"""`optimizer.groups` and `optimizer.layer_decay`: parameters that are frozen, or trained with options of their own.

Layer-wise decay is that of BEiT (arXiv:2106.08254): the learning rate of each block is the next one's times a factor.
What is registered before the first block, such as an embedding, counts as a layer before it; what comes after the
first block and is in none, such as the head, has the full rate.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
from trainapp.optim.group_options import own_options
from trainapp.optim.patterns import all_names, matching
from trainapp.units import listed


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
    entries: dict[tuple[int, Own], dict[str, Any]] = {}
    for position, group in enumerate(base):
        for parameter in group["params"]:
            own = Own(of_group.get(id(parameter)), layers.get(id(parameter)))
            entry = entries.setdefault((position, own), {**group, "params": []})
            entry["params"].append(parameter)
    with_matrices = {own.group for (_, own), entry in entries.items() if any(p.ndim >= 2 for p in entry["params"])}
    rate = _rate(settings, kind)
    for (_, own), entry in entries.items():
        _give_options(entry, own, settings, rate, len(blocks), own.group in with_matrices)
    return list(entries.values())


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
    group_of: dict[int, int] = {}
    for number, group in enumerate(settings.groups):
        names = _names(group, number, parameters, setting, type(model).__name__)
        for name in names:
            other = group_of.setdefault(id(parameters[name]), number)
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
    return group_of


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
        options = own_options(group)
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

"""Parameters by name: what `model.freeze`, `updates` and `optimizer.groups` match; and `optimizer.layer_decay`.

Layer-wise decay is that of BEiT (arXiv:2106.08254): the learning rate of each block is the next one's times a factor.
What is registered before the first block, such as an embedding, counts as a layer before it; what comes after the
first block and is in none, such as the head, has the full rate.
"""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
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
        options = _own_options(group)
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


def require_known(settings: Optimizer, optimizer: torch.optim.Optimizer, setting: str = "optimizer") -> None:
    """Raises UserError for options of groups that the optimizer does not have, or reads for all parameters alike."""
    options = [name for name in optimizer.defaults if name not in _OF_THE_WHOLE]
    for number, group in enumerate(settings.groups):
        for name in _own_options(group):
            if name not in options:
                raise UserError(
                    f"{setting}.groups.{number}.{name}: {type(optimizer).__name__} has no {name} of a group; it may "
                    f"have {', '.join(options)}"
                )


def _own_options(group: dict[str, Any]) -> dict[str, Any]:
    """What a group sets of its optimizer."""
    return {name: value for name, value in group.items() if name not in ("match", "freeze")}


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a parameter: by its name, by that of a module that holds it, or by shell wildcards, whose
    `*` matches dots, too.
    """
    return name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def all_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters under each of their names: tied weights have several."""
    return dict(model.named_parameters(remove_duplicate=False))


def matching(pattern: str, parameters: Mapping[str, nn.Parameter], setting: str, owner: str) -> list[str]:
    """The names that the pattern matches. Raises UserError where there is none.

    setting: that the pattern comes from, and owner: whose parameters these are, for the message.
    """
    named = [name for name in parameters if matches(pattern, name)]
    if not named:
        modules = listed(dict.fromkeys(name.partition(".")[0] for name in parameters))
        raise UserError(
            f"{setting}: {owner} has no parameter or module of this name; at the top are {modules or 'none'}; name one "
            f"of them, a parameter such as {next(iter(parameters), 'weight')}, or use wildcards"
        )
    return named

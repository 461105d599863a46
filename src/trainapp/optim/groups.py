"""Parameters by name: what `model.freeze`, `updates` and `optimizer.groups` match; and `optimizer.layer_decay`.

Layer-wise decay is that of BEiT (arXiv:2106.08254): the learning rate of each block is the next one's times a factor.
What is registered before the first block, such as an embedding, counts as a layer before it; what comes after the
first block and is in none, such as the head, has the full rate.
"""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
from trainapp.units import listed

# Torch chooses one kernel for all groups; the others of these are about how it is called.
_OF_THE_WHOLE = ("fused", "foreach", "capturable", "differentiable")


def all_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters under each of their names: tied weights have several."""
    return dict(model.named_parameters(remove_duplicate=False))


def matching(pattern: str, parameters: Mapping[str, nn.Parameter], setting: str, owner: str) -> list[str]:
    """The names that a pattern matches: a parameter's, those in a module, or by shell wildcards, whose `*` matches
    dots, too. Raises UserError for a pattern that names nothing.

    setting: with the pattern, and owner: the model's name, for the message.
    """
    named = [name for name in parameters if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)]
    if not named:
        modules = listed(dict.fromkeys(name.partition(".")[0] for name in parameters))
        raise UserError(
            f"{setting}: {owner} has no parameter or module of this name; at the top are {modules or 'none'}; name one "
            f"of them, a parameter such as {next(iter(parameters), 'weight')}, or use wildcards"
        )
    return named


def freeze_matching(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze what the patterns of `model.freeze` name: a parameter, a module with all that is in it, or shell
    wildcards, whose `*` matches dots too. A tensor with several names (tied weights) is frozen by each of them.

    Raises UserError for a pattern that names nothing.
    """
    parameters = all_names(model)
    for pattern in patterns:
        for name in matching(pattern, parameters, f"model.freeze=[{pattern}]", type(model).__name__):
            parameters[name].requires_grad_(False)


def freeze(parameters: Mapping[str, nn.Parameter], settings: Optimizer, owner: str, setting: str = "optimizer") -> None:
    """Freeze the parameters that groups with `freeze: true` match. Call before the model is spread over ranks.

    owner: the model's name, and setting: where the settings are from, for messages. Raises UserError for a pattern that
    matches nothing.
    """
    for number, group in enumerate(settings.groups):
        if group.get("freeze"):
            for name in _names(group, f"{setting}.groups.{number}", parameters, owner):
                parameters[name].requires_grad_(False)


def split(
    groups: list[Any],
    model: nn.Module,
    settings: Optimizer,
    kind: Any,
    blocks: Sequence[nn.Module],
    setting: str = "optimizer",
) -> list[dict[str, Any]]:
    """The parameter groups, or parameters, of an optimizer of class `kind`, split by what is said of each parameter,
    with the `label` that each is logged under.

    blocks: of the model, in order, for `layer_decay`. Raises UserError for a pattern that matches nothing or only
    frozen parameters, and for parameters that two groups match.
    """
    number_of = _numbers(model, settings, setting)
    layer_of = layer_numbers(model, blocks) if settings.layer_decay is not None else {}
    base = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    parts: dict[tuple[int, int | None, int | None], dict[str, Any]] = {}
    for position, group in enumerate(base):
        for parameter in group["params"]:
            key = position, number_of.get(id(parameter)), layer_of.get(id(parameter))
            parts.setdefault(key, {**group, "params": []})["params"].append(parameter)
    with_matrices = {number for (_, number, _), part in parts.items() if any(p.ndim >= 2 for p in part["params"])}
    for (_, number, layer), part in parts.items():
        labels = []
        if number is not None:
            options = _options(settings.groups[number])
            if number in with_matrices and all(p.ndim < 2 for p in part["params"]):
                options.pop("weight_decay", None)  # not for norms and biases, unless the group has nothing else
            part.update(options)
            labels.append(",".join(settings.groups[number]["match"]))
        if layer is not None and settings.layer_decay is not None:
            part["lr"] = part.get("lr", _rate(settings, kind)) * settings.layer_decay ** (len(blocks) + 1 - layer)
            labels.append(f"layer_{layer}")
        if labels:
            part["label"] = ":".join(labels)
    return list(parts.values())


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


def require_known(settings: Optimizer, optimizer: torch.optim.Optimizer, setting: str = "optimizer") -> None:
    """Raises UserError for options of groups that the optimizer does not have, or reads for all parameters alike: torch
    takes any.
    """
    options = [name for name in optimizer.defaults if name not in _OF_THE_WHOLE]
    for number, group in enumerate(settings.groups):
        if unknown := [name for name in _options(group) if name not in options]:
            raise UserError(
                f"{setting}.groups.{number}.{unknown[0]}: {type(optimizer).__name__} has no {unknown[0]} of a group; "
                f"it may have {', '.join(options)}"
            )


def _numbers(model: nn.Module, settings: Optimizer, setting: str) -> dict[int, int]:
    """By the id of each parameter that a group matches, the number of that group."""
    parameters = all_names(model)
    number_of: dict[int, int] = {}
    for number, group in enumerate(settings.groups):
        names = _names(group, f"{setting}.groups.{number}", parameters, type(model).__name__)
        for name in names:
            other = number_of.setdefault(id(parameters[name]), number)
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
    return number_of


def _names(group: dict[str, Any], setting: str, parameters: Mapping[str, nn.Parameter], owner: str) -> list[str]:
    named = (matching(pattern, parameters, f"{setting}.match={pattern}", owner) for pattern in group["match"])
    return [name for names in named for name in names]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a group sets of its optimizer."""
    options = {name: value for name, value in group.items() if name not in ("match", "freeze")}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return options | ({"lr": float(options["lr"])} if "lr" in options else {})


def _rate(settings: Optimizer, kind: Any) -> float:
    """The configured rate, or the class's own."""
    parameter = inspect.signature(kind).parameters.get("lr")
    default = 1.0 if parameter is None or not isinstance(parameter.default, (int, float)) else parameter.default
    return settings.lr if settings.lr is not None else default

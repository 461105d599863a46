"""Parameters by name, and the parameter groups of an optimizer.

Groups are by name (`optimizer.groups`) and by layer (`optimizer.layer_decay`, as in BEiT, arXiv:2106.08254): the rate
of each block is the next one's times a factor. Modules registered before the first block, such as an embedding, count
as a layer before it; modules outside the blocks after that, such as the head, have the full rate.
"""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
from trainapp.units import listed

Group = dict[str, Any]  # the parameters ("params") and their options, as torch's optimizers take them


# --- parameters by name


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters under each of their names: tied weights have several."""
    return dict(model.named_parameters(remove_duplicate=False))


def match_names(model: nn.Module, patterns: Sequence[str], setting: str) -> list[str]:
    """Return the names of the model's parameters that the patterns of a setting match.

    A pattern is a parameter, a module for all of its parameters, or shell wildcards, whose `*` also matches dots.
    Raises UserError for a pattern without a match.
    """
    names = list(parameters_by_name(model))
    matches: dict[str, None] = {}  # in the order of the patterns, without duplicates
    for pattern in patterns:
        is_matched = False
        for name in names:
            if name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern):
                matches[name] = None
                is_matched = True
        if not is_matched:
            modules = listed(dict.fromkeys(name.partition(".")[0] for name in names))
            example = names[0] if names else "weight"
            raise UserError(
                f"{setting}=[{pattern}]: {type(model).__name__} has no parameter or module of this name; its top-level "
                f"modules are {modules or 'none'}; name one of them, a parameter such as {example}, or use wildcards"
            )
    return list(matches)


def divide_names(model: nn.Module, patterns_by_setting: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return by setting the names that its patterns match: a division among optimizers, or among groups of one.

    Raises UserError for a pattern that matches nothing, a parameter matched by two settings, and a setting that matches
    only frozen parameters.
    """
    parameters = parameters_by_name(model)
    names_by_setting: dict[str, list[str]] = {}
    setting_by_id: dict[int, str] = {}  # of the parameters: tied weights have one id
    for setting, patterns in patterns_by_setting.items():
        # No parameter may be matched by an earlier setting.
        names = match_names(model, patterns, setting)
        for name in names:
            first_setting = setting_by_id.setdefault(id(parameters[name]), setting)
            if first_setting != setting:
                raise UserError(
                    f"{setting}: {name} is also matched by {first_setting}; each parameter may be in only one"
                )

        is_trained = any(parameters[name].requires_grad for name in names)
        if not is_trained:
            raise UserError(
                f"{setting}: nothing that it matches ({listed(names)}) is trained by this optimizer; remove it, or "
                "unfreeze parameters"
            )
        names_by_setting[setting] = names
    return names_by_setting


# --- groups


def build_groups(
    kind: Any, settings: Optimizer, model: nn.Module, blocks: Sequence[nn.Module], setting: str
) -> list[Group]:
    """Return the groups of the parameters that require gradients.

    With `layer_decay`, a group has `layers_after`: the number of layers between it and the full rate. Raises UserError
    as `divide_names` does, and for a weight decay that the optimizer does not have.

    Args:
        kind: the optimizer's class. It may define its groups by a static method `parameter_groups`.
        settings: the optimizer's settings.
        model: the model.
        blocks: the model's blocks, for `layer_decay`.
        setting: name of the settings' section, for messages.
    """
    groups = _groups_by_decay(kind, settings, model, setting)

    # Options by name.
    parameters = parameters_by_name(model)
    patterns_by_setting = {}
    for number, group in enumerate(settings.groups):
        patterns_by_setting[f"{setting}.groups.{number}.match"] = group["match"]
    names_by_setting = divide_names(model, patterns_by_setting)
    for group, names in zip(settings.groups, names_by_setting.values(), strict=True):
        ids = {id(parameters[name]) for name in names}
        label = ",".join(group["match"])
        groups = _split_off(groups, ids, options_of(group), label)

    # Rates by layer.
    if settings.layer_decay is not None:
        for number, ids in enumerate(_ids_by_layer(model, blocks)):
            layers_after = len(blocks) + 1 - number
            groups = _split_off(groups, ids, {"layers_after": layers_after}, f"layer_{number}")
    return groups


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group in the settings: all but `match`."""
    return {name: value for name, value in group.items() if name != "match"}


def _groups_by_decay(kind: Any, settings: Optimizer, model: nn.Module, setting: str) -> list[Group]:
    """Return the groups by weight decay; one group for an optimizer without it."""
    parameter = inspect.signature(kind).parameters.get("weight_decay")
    is_passed_on = passes_on(kind, "weight_decay") and settings.weight_decay is not None
    if parameter is None and not is_passed_on:
        if settings.weight_decay:
            raise UserError(
                f"{setting}.weight_decay={settings.weight_decay}: {settings.target} has no weight decay; use "
                f"{setting}.weight_decay=null"
            )
        trained = [p for p in model.parameters() if p.requires_grad]
        return [{"params": trained}]

    # Divided by the optimizer's class, if it can, or as `parameter_groups` says.
    weight_decay: Any = settings.weight_decay
    if weight_decay is None and parameter is not None:
        weight_decay = parameter.default
    make_groups = getattr(kind, "parameter_groups", parameter_groups)
    groups: list[Group] = make_groups(model, weight_decay)
    if settings.decay == "all":
        for group in groups:
            group["weight_decay"] = weight_decay
    return groups


def passes_on(kind: Any, argument: str) -> bool:
    """Return whether an optimizer's class may pass an argument on that it does not name: it takes any keywords, as SAM
    does for its base optimizer.
    """
    parameters = inspect.signature(kind).parameters
    takes_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_keywords and argument not in parameters


def parameter_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Return two groups: weights with two or more dimensions decay; norms and biases (at most one) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trained if p.ndim >= 2]
    norms_and_biases = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": norms_and_biases, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _split_off(groups: list[Group], ids: set[int], options: dict[str, Any], label: str) -> list[Group]:
    """Return the groups with some parameters in new groups, which have other options.

    Args:
        groups: the groups so far.
        ids: of the parameters.
        options: of the new groups.
        label: name of the new groups in the log, after the name that their group has.
    """
    # Another weight decay is not for norms and biases, unless nothing else is selected.
    all_selected: list[nn.Parameter] = []
    for group in groups:
        all_selected.extend(p for p in group["params"] if id(p) in ids)
    spares_norms_and_biases = not _are_norms_and_biases(all_selected)

    all_groups = []
    for group in groups:
        selected = [p for p in group["params"] if id(p) in ids]
        remaining = [p for p in group["params"] if id(p) not in ids]
        if remaining:
            all_groups.append({**group, "params": remaining})
        if selected:
            full_label = f"{group['label']}:{label}" if "label" in group else label
            new_group = {**group, **options, "params": selected, "label": full_label}
            if spares_norms_and_biases and _are_norms_and_biases(selected) and "weight_decay" in group:
                new_group["weight_decay"] = group["weight_decay"]
            all_groups.append(new_group)
    return all_groups


def _are_norms_and_biases(parameters: list[nn.Parameter]) -> bool:
    return all(p.ndim < 2 for p in parameters)


def _ids_by_layer(model: nn.Module, blocks: Sequence[nn.Module]) -> list[set[int]]:
    """Return the ids of the parameters before the first block, in each block, and of the remaining ones."""
    in_blocks: set[int] = set()
    by_block: list[set[int]] = []
    for block in blocks:
        ids = {id(p) for p in block.parameters()} - in_blocks  # a parameter that blocks share belongs to the first
        by_block.append(ids)
        in_blocks |= ids

    before_blocks: set[int] = set()
    remaining: set[int] = set()
    outside = before_blocks
    for parameter in model.parameters():
        if id(parameter) in in_blocks:
            outside = remaining
        else:
            outside.add(id(parameter))
    return [before_blocks, *by_block, remaining]

"""Attributes that a model has put on its parameters, such as a factor of the learning rate.

FSDP replaces parameters by shards, and `to_empty` replaces those on the meta device: the attributes would be lost to an
optimizer that reads them, without an error.
"""

from typing import Any

from torch import nn

from trainapp.optim.patterns import all_names

_PLAIN = (bool, int, float, complex, str, tuple)


def of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By name, the attributes of each parameter that has any."""
    tags = {name: _own(parameter) for name, parameter in all_names(model).items()}
    return {name: attributes for name, attributes in tags.items() if attributes}


def _own(parameter: nn.Parameter) -> dict[str, Any]:
    """A subclass of Tensor keeps its own parts in attributes, too: of one, only plain values are the model's."""
    if type(parameter) is nn.Parameter:
        return dict(vars(parameter))
    return {name: value for name, value in vars(parameter).items() if name[0] != "_" and isinstance(value, _PLAIN)}


def put_back(model: nn.Module, tags: dict[str, dict[str, Any]]) -> None:
    """Give parameters of these names the attributes that they lack."""
    parameters = all_names(model) if tags else {}
    for name, attributes in tags.items():
        own = vars(parameters[name])
        own.update({attribute: value for attribute, value in attributes.items() if attribute not in own})

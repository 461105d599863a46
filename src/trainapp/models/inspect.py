"""What the program reads from a model of any class, and its evaluation mode."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from trainapp.config.schema import Model
from trainapp.errors import UserError
from trainapp.models import transformers_models
from trainapp.torch_private import BatchNorm


@contextlib.contextmanager
def evaluation_mode(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside the block, for each module its own mode after it: a part of a model may be in evaluation
    mode for good.
    """
    modes = [(module, module.training) for root in roots for module in root.modules()]
    try:
        for module, _ in modes:
            module.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model normalises over the samples of a micro-batch."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def instead_of_batchnorm(model_settings: Model) -> str:
    """The remedy for a model that has BatchNorm: the setting where it has one, else a change of the model."""
    has_setting = "norm" in model_settings.arguments and model_settings.target.startswith("trainapp.models.")
    return "GroupNorm (model.norm=group)" if has_setting else "GroupNorm in its place in the model"


def belongs_to_trainapp(model: nn.Module) -> bool:
    """Whether its class is one of trainapp's own, in which samples do not interact in evaluation mode."""
    return type(model).__module__.startswith("trainapp.models.")


def lazy_modules(model: nn.Module) -> list[str]:
    """The names of modules whose parameters get their shapes from the first forward, such as LazyLinear."""
    lazy: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, LazyModuleMixin)]
    return [name for name, module in lazy if module.has_uninitialized_params()]


def blocks_of(model: nn.Module, setting: str) -> list[nn.Module]:
    """The repeated blocks that a model's `blocks()` returns, and those of a model of Transformers. Raises UserError for
    another model without that method: a module of that name can be called, too, but is none. Also for a block that is
    no module of the model: nothing calls it.
    """
    method = getattr(model, "blocks", None)
    if not callable(method) or isinstance(method, nn.Module):
        if blocks := transformers_models.blocks(model):
            return blocks
        raise UserError(
            f"{setting}: {type(model).__name__} does not say what its blocks are; give it a method "
            "`blocks(self) -> list[nn.Module]`"
        )
    blocks = list(method())
    own = {id(module) for module in model.modules()}
    if foreign := [number for number, block in enumerate(blocks) if id(block) not in own]:
        raise UserError(
            f"{setting}: blocks() of {type(model).__name__} returns a {type(blocks[foreign[0]]).__name__} (number "
            f"{foreign[0]} of {len(blocks)}) that is no module of the model, so that the model never calls it; return "
            "the modules that its forward calls, such as `list(self.layers)`"
        )
    return blocks


class LastLayer(NamedTuple):
    """A model in two parts, whose forward is `head(features(inputs))`: to be checked on some inputs."""

    features: Callable[..., Any]
    head: nn.Module


def last_layer(model: nn.Module) -> LastLayer | None:
    """From a model's `features` and `head`, or those of a model of Transformers; None for another."""
    features, head = getattr(model, "features", None), getattr(model, "head", None)
    if callable(features) and isinstance(head, nn.Module):
        return LastLayer(features, head)
    parts = transformers_models.features_and_head(model)
    return None if parts is None else LastLayer(*parts)

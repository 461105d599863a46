"""The section `lr_find` of the schema, and its rules. Imports no torch."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainapp.config.parallel_settings import STRICT
from trainapp.config.validation import PositiveFloat

if TYPE_CHECKING:
    from trainapp.config.schema import Config  # which builds on this module


@dataclass(config=STRICT)
class LrFind:
    min: PositiveFloat = 1e-7
    max: PositiveFloat = 10.0
    steps: Annotated[int, Field(ge=10, strict=True)] = 100
    diverges: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0


def conflicts(config: "Config") -> list[str]:
    """What `mode=lr_find` does not go with."""
    errors: list[str] = []
    own, resume = config.lr_find, config.checkpointing.resume
    if config.mode != "lr_find":
        return errors
    if own.min >= own.max:
        errors.append(f"lr_find.min={own.min:g}: must be below lr_find.max={own.max:g}")
    if config.parallel.strategy != "single":
        errors.append(
            f"mode=lr_find with parallel.strategy={config.parallel.strategy}: the rate is that of the global batch, "
            "which one process finds as well; use parallel=single"
        )
    if config.updates:
        errors.append(
            "mode=lr_find with updates: the losses of several optimizers depend on each other's rates, so that no "
            "curve tells which is good; try rates by a sweep, such as -m optimizer.lr=1e-4,1e-3"
        )
    if resume not in ("auto", "none"):
        errors.append(
            f"mode=lr_find with checkpointing.resume={resume}: it begins with initial weights; to begin with trained "
            "ones, write them with mode=export and set model.init_from=FILE"
        )
    if config.optimizer.lr is None and any("lr" in group for group in config.optimizer.groups):
        errors.append(
            "mode=lr_find with a rate in optimizer.groups and none in optimizer.lr: groups keep their ratio to it; set "
            "optimizer.lr"
        )
    return errors

"""The sections `predict` and `generate` of the schema, and their rules. Imports no torch."""

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from trainapp.config.parallel_settings import STRICT
from trainapp.config.rules import Auto, Seed
from trainapp.config.validation import NonNegativeFloat, NonNegativeInt, PositiveInt, Str

if TYPE_CHECKING:
    from trainapp.config.schema import Config  # which builds on this module

INFERENCE = ("predict", "generate")  # modes
WITHOUT_NUMBERS = (*INFERENCE, "export")  # modes that leave files, and nothing to plot


@dataclass(config=STRICT)
class Predict:
    output: Str | None = None
    split: Str = "val"
    batch_size: PositiveInt = 64


@dataclass(config=STRICT)
class Generate:
    prompts: list[Str | list[NonNegativeInt]] = field(default_factory=list)
    output: Str | None = None
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    seed: Seed = 0
    end_of_text: Auto | NonNegativeInt | None = "auto"
    batch_size: PositiveInt = 16


def with_own_batches(config: "Config") -> "Config":
    """For these modes, with their own batch size in place of evaluation's."""
    if config.mode not in INFERENCE:
        return config
    size = config.predict.batch_size if config.mode == "predict" else config.generate.batch_size
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, eval_micro_size=size))


def conflicts(config: "Config") -> list[str]:
    """What the modes do not go with."""
    errors = []
    strategy = config.parallel.strategy
    if config.mode == "generate" and strategy != "single":
        errors.append(
            f"mode=generate with parallel={strategy}: it runs in one process, which loads checkpoints of any number of "
            "ranks; use parallel=single"
        )
    if config.mode == "predict" and strategy not in ("single", "ddp"):
        errors.append(
            f"mode=predict with parallel={strategy}: each rank predicts with the whole model, from checkpoints of any "
            "number of ranks; use parallel=ddp or parallel=single"
        )
    if config.mode == "generate" and not config.generate.prompts:
        errors.append(
            "mode=generate with generate.prompts=[]: there is nothing to continue; give texts, as in "
            "'generate.prompts=[\"import \"]'"
        )
    empty = [number for number, prompt in enumerate(config.generate.prompts) if not prompt]
    if config.mode == "generate" and empty:
        errors.append(f"generate.prompts[{empty[0]}]: is empty; a prompt has at least one token to continue")
    return errors

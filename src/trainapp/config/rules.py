"""Types of settings that have a rule of their own. Imports no torch."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from trainapp.config import durations, micro_schedule, parameter_groups, updates
from trainapp.config.validation import Str
from trainapp.units import parse_memory_size


def _duration(value: int | str) -> int | str:
    durations.parse(value)
    return value


def _memory_size(value: int | float | str) -> int | float | str:
    parse_memory_size(value, total=1)
    return value


def _byte_count(value: int | float | str) -> int | float | str:
    try:
        if parse_memory_size(value, total=0):  # a fraction of nothing is none
            return value
    except ValueError:
        pass
    raise ValueError("must be bytes, or a size such as 6GiB or 500MB")


def _objective(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"(min|max) \S+", value):
        raise ValueError("must be auto, or like 'max accuracy' or 'min loss'")
    return value


def _eval_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise ValueError("must be letters, digits, _ and -: it becomes part of the names of metrics")
    if value in ("val", "train"):
        raise ValueError("must be another name: predict.split means the data's own split by val and train")
    return value


Duration = Annotated[int | str, AfterValidator(_duration)]
MemorySize = Annotated[int | float | str, AfterValidator(_memory_size)]
ByteCount = Annotated[int | float | str, AfterValidator(_byte_count)]
MicroSchedule = Annotated[dict[Any, Any], PlainValidator(micro_schedule.check)]
ParameterGroups = Annotated[list[dict[str, Any]], PlainValidator(parameter_groups.check)]
UpdateName = Annotated[str, AfterValidator(updates.check_name)]
EvalName = Annotated[Str, AfterValidator(_eval_name)]
Goal = Annotated[str, AfterValidator(_objective)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # data sets may still add to it, below 2**64
Auto = Literal["auto"]

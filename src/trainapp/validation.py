"""Annotated types with which constructors of models and data sets, yours too, state their rules.

`def __init__(self, depth: PositiveInt, dropout: Fraction = 0.0)` is both the signature and what a value in the YAML
files or on the command line is checked against.
"""

from typing import Annotated

from pydantic import Field

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Str = Annotated[str, Field(strict=True)]

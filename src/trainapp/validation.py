"""Annotated types for the arguments of models and data sets, including yours.

With `def __init__(self, depth: PositiveInt, dropout: Fraction = 0.0)`, values in the YAML files and on the command line
are checked against the signature.
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

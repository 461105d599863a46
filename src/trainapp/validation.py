"""The annotated types with which constructors of users' models and data sets state their rules."""

from trainapp.config.validation import (
    Bool,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Str,
)

__all__ = ["Bool", "Fraction", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt", "Str"]

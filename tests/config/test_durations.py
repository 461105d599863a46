"""Durations in every unit, converted to steps."""

import pytest

from trainapp.config.durations import RunLength, parse, to_steps

RUN = RunLength(steps_per_epoch=23, global_size=64, total_steps=276)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (10, 10),
        ("10 steps", 10),
        ("10", 10),
        ("1 step", 1),
        (0, 0),
        ("0 epochs", 0),
        (None, 0),
        ("2 epochs", 46),
        ("1 epoch", 23),
        ("0.5 epochs", 12),  # 11.5: rounds to the nearest, halves up
        ("0.01 epochs", 1),  # never to zero
        ("640 samples", 10),
        ("10000 samples", 156),  # 156.25
        ("10032 samples", 157),  # 156.75
        ("5 percent", 14),  # 13.8
        ("100 percent", 276),
        (" 3epochs ", 69),
    ],
)
def test_duration_in_steps(value, steps):
    assert to_steps(value, RUN) == steps


@pytest.mark.parametrize(
    "value", ["often", "", "3 weeks", "-1", -1, "1 epochs 2", "epochs", True, "1e3", "101 percent"]
)
def test_anything_else_is_refused_with_the_rule(value):
    with pytest.raises(ValueError, match=r"must (not )?be"):
        parse(value)


def test_percent_needs_an_end():
    with pytest.raises(ValueError, match="5 percent needs a run whose end is known"):
        to_steps("5 percent", RunLength(steps_per_epoch=23, global_size=64, total_steps=None))
    assert to_steps("1 epochs", RunLength(steps_per_epoch=23, global_size=64, total_steps=None)) == 23

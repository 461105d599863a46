"""Sizes and lists in words; durations in every unit, converted to steps."""

import pytest

from trainapp.units import RunLength, bytes_text, listed, parse_duration, parse_time, to_steps


def test_bytes_as_text():
    texts = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5.25 * 2**30: "5.2 GiB", 2**43: "8192.0 GiB", -2048: "-2.0 KiB"}
    assert {count: bytes_text(count) for count in texts} == texts


def test_long_lists_say_how_many_more():
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed((name for name in "abcde"), most=2) == "a, b and 3 more"


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
    assert to_steps("every.log", value, RUN) == steps


@pytest.mark.parametrize(
    "value", ["often", "", "3 weeks", "-1", -1, "1 epochs 2", "epochs", True, "1e3", "101 percent"]
)
def test_anything_else_is_refused_with_the_rule(value):
    with pytest.raises(ValueError, match=r"must (not )?be"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("11h50m", 42_600),
        ("90 minutes", 5400),
        ("1.5 hours", 5400),
        ("45s", 45),
        ("1 second", 1),
        ("2 days 3h", 183_600),
        (" 30min ", 1800),
    ],
)
def test_time_in_seconds(value, seconds):
    assert parse_time(value) == seconds


@pytest.mark.parametrize(
    "value", [None, 10, "10", "2 epochs", "5 percent", "0s", "1h 2 epochs", "-1h", "h", "1.2.3s", ""]
)
def test_anything_else_is_no_time(value):
    assert parse_time(value) is None

import json
import math

import pytest

from trainapp.files import strict_json


def strict(text: str):
    """As a reader that follows the standard."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_with_the_reason():
    value = {"a": 1.5, "b": math.nan, "c": {"d": [math.inf, 2], "e": -math.inf}, 3: (1, math.nan)}
    assert strict(strict_json(value)) == {
        "a": 1.5, "b": None, "b_note": "nan", "c": {"d": [None, 2], "e": None, "e_note": "-inf"}, "3": [1, None],
    }  # fmt: skip
    with pytest.raises(AssertionError):  # what Python does by itself
        strict(json.dumps(value))


def test_a_note_of_its_own_stays():
    assert strict(strict_json({"b": math.nan, "b_note": "why"})) == {"b": None, "b_note": "why"}


def test_what_is_finite_is_unchanged():
    value = {"a": [1, 2.5, "x", None, True], "b": {"c": -0.0}}
    assert strict_json(value, indent=1) == json.dumps(value, indent=1)
    assert list(strict(strict_json({"z": 1, "a": 2}))) == ["z", "a"]

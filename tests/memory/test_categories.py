import json

import pytest

from trainapp.memory.categories import Category


@pytest.mark.parametrize("kind", Category)
def test_one_name_for_files_and_one_for_people(kind):
    """A metric name, a JSON key and a dict key all equal the value, on every version of Python."""
    assert f"memory/{kind}" == f"memory/{kind.value}"
    assert json.loads(json.dumps({kind: 1})) == {kind.value: 1}
    assert {kind: 1}[kind.value] == 1
    assert " " not in kind.value
    assert "_" not in kind.label
    assert kind.label.split() == kind.value.split("_")

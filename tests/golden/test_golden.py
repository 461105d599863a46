"""What runs print and write is what it was. The runs: `scenarios`. To renew what is expected: `record.py`."""

import copy
import json

import pytest

from golden import recording
from golden.scenarios import SCENARIOS


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_as_before(scenario, tmp_path):
    for package in scenario.needs:
        pytest.importorskip(package, reason=f"needs the extra with {package}")
    expected = recording.read_expected(scenario.name)
    if (version := recording.torch_version()) != expected["torch"]:
        pytest.skip(f"recorded with torch {expected['torch']}, not {version}")
    folder = tmp_path / "work"
    found = list(recording.differences(expected, recording.record(scenario, folder)))
    if scenario.is_continued:
        uninterrupted = json.loads((recording.FOLDER_BEFORE / recording.UNINTERRUPTED).read_text())
        found += recording.differences(uninterrupted, recording.logs_below(folder), "uninterrupted")
    if found:
        pytest.fail("\n".join([f"{len(found)} differences in {scenario.name}:", *found]), pytrace=False)


def test_every_scenario_has_a_record():
    assert {path.stem for path in recording.EXPECTED.iterdir()} == {scenario.name for scenario in SCENARIOS}


# Negative controls: each of these changes is found, in its place.


def changed(record, *path, to=None):
    """A copy of a record in which the value at a path is another one; None: it is removed."""
    copied = copy.deepcopy(record)
    *parents, last = path
    node = copied
    for key in parents:
        node = node[key]
    if to is None:
        del node[last]
    else:
        node[last] = to
    return copied


@pytest.fixture(scope="module")
def search():
    return recording.read_expected("search")


RESULT = ("files", "run/result.json")
LOSS = ("files", "run/metrics.jsonl", "loss", 2)
CHECKPOINT = ("files", "run/checkpoints", "step_00000012")
LINE = ("commands", 0, "stderr", 0)


def test_a_changed_key_is_found(search):
    renamed = changed(changed(search, *RESULT, "oom_restarts"), *RESULT, "ooms", to=3)
    missing, new = recording.differences(search, renamed)
    assert missing == "/files/run/result.json/oom_restarts: missing; expected 3"
    assert new == "/files/run/result.json/ooms: not expected; got 3"
    (missing,) = recording.differences(search, changed(search, *CHECKPOINT, "values.progress", "consumed"))
    assert missing.startswith("/files/run/checkpoints/step_00000012/values.progress/consumed: missing")
    (missing,) = recording.differences(search, changed(search, *CHECKPOINT, "tensors", "model.norm.weight"))
    assert missing.startswith("/files/run/checkpoints/step_00000012/tensors/model.norm.weight: missing")


def test_a_changed_word_and_a_changed_line_are_found(search):
    line = search["commands"][0]["stderr"][0]
    (difference,) = recording.differences(search, changed(search, *LINE, to=line.replace("epoch", "period")))
    assert difference.startswith("/commands[1]/stderr[1]:\n  expected GPT with 3.12k parameters")
    (difference,) = recording.differences(search, changed(search, *LINE))
    assert f"got {len(search['commands'][0]['stderr']) - 1}:\n  - {line}" in difference


def test_a_changed_number_is_found(search):
    loss = search["files"]["run/metrics.jsonl"]["loss"][2]
    assert list(recording.differences(search, changed(search, *LOSS, to=loss * 1.001))) == []  # other roundings
    (difference,) = recording.differences(search, changed(search, *LOSS, to=loss * 1.01))
    assert difference.startswith("/files/run/metrics.jsonl/loss[3]:\n")
    (difference,) = recording.differences(search, changed(search, *RESULT, "peak_memory_bytes", to=1))
    assert difference.startswith("/files/run/result.json/peak_memory_bytes:\n")
    (difference,) = recording.differences(search, changed(search, *RESULT, "seconds", to=1))  # no longer a float
    assert difference.startswith("/files/run/result.json/seconds:\n")


@pytest.mark.parametrize(
    ("expected", "got", "is_alike"),
    [
        ("loss 2.2716 of step 4", "loss 2.2717 of step 4", True),
        ("loss 2.2716 of step 4", "loss 2.3716 of step 4", False),
        ("loss 2.2716 of step 4", "loss 2.2716 of step 5", False),
        ("loss 2.2716", "losses 2.2716", False),
        ("lr 0.1", "lr 0.2", False),
        ("step_00000004", "step_00000005", False),
        ("1e-09", "1.001e-09", True),
        ("nan", "0.5", False),
    ],
)
def test_texts_are_equal_up_to_rounded_numbers(expected, got, is_alike):
    assert (list(recording.differences(expected, got)) == []) is is_alike


def test_what_varies_is_named(tmp_path):
    text = recording.Normalised(tmp_path)
    printed = (
        f"step 1/4 | loss 2.3 | samples/s 245 | 00:01 left\ntime         2.2 s\noutputs      {tmp_path}/run\n"
        "W1129 21:00:00.1 77 torch/x.py:1] noise\nTraceback (most recent call last):\n  File x\nValueError: not good\n"
    )
    assert text.lines(printed) == [
        "step 1/4 | loss 2.3 | <speed> | <time> left",
        "time  <time>",
        "outputs  <folder>/run",
        "<traceback>",
        "ValueError: not good",
    ]
    facts = {"seconds": 2.0, "host": False, "checkpoint": None, "samples_per_second": 5.5, "steps": 4}
    varying = {"seconds": "<seconds>", "samples_per_second": "<samples_per_second>"}
    assert text.value(facts) == {**facts, **varying}

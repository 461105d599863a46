"""The out-of-memory benchmark keeps its promises at a tiny size, and the example of docs/oom.md runs as printed."""

import importlib.util
import json
import logging
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment

from trainapp.memory.live_tensors import LiveTensors

BENCHMARKS = ROOT / "benchmarks"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What the quick benchmark printed, and its rows by trainer."""
    path = tmp_path_factory.mktemp("benchmark") / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "other_trainers.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    return done.stdout, found["job"], {row["trainer"]: row for row in found["trainers"]}


def test_an_out_of_memory_error_changes_nothing(quick):
    printed, job, rows = quick
    row = rows["trainapp"]
    steps = job["size"] // job["global_size"]
    assert re.search(rf"^\| trainapp .*{steps} / {steps} / {steps}", printed, re.MULTILINE)
    assert row["out_of_memory"] > 0  # otherwise nothing is tested
    assert row["undisturbed"]["out_of_memory"] == 0
    assert row["steps_done"] == row["steps_in_weights"] == row["steps_reported"] == steps
    assert row["samples_trained"] == row["samples_in_weights"] == job["size"]
    assert (row["repeated"], row["skipped"], row["global_batch"]) == (0, 0, [job["global_size"]])
    assert row["eval_loss"] == pytest.approx(row["undisturbed"]["eval_loss"], abs=1e-4)
    assert job["limit"] < row["undisturbed"]["peak"]


@pytest.mark.parametrize(("trainer", "packages"), [("accelerate", 1), ("transformers", 2)])
def test_the_others_take_part_where_they_are_installed(quick, trainer, packages):
    _, job, rows = quick
    row = rows[trainer]
    names = ["transformers", "accelerate"][-packages:]
    if any(importlib.util.find_spec(name) is None for name in names):
        assert row["missing"].startswith("pip install ")
        return
    # Both perform more steps than they report.
    assert row["out_of_memory"] > 0
    assert row["steps_done"] > row["steps_reported"]
    assert row["samples_trained"] > job["size"]
    assert row["undisturbed"]["steps_done"] == row["undisturbed"]["steps_reported"]


def test_the_ledger_tells_repeated_and_skipped_samples(monkeypatch):
    """A trainer that repeats or drops an aborted step's samples does not pass."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import oom_job
    import other_trainers

    draw_record = oom_job.DrawRecord()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*micro_batches):
        optimizer.zero_grad()
        for ids in micro_batches:
            draw_record.saw(model, torch.tensor(ids))
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    draw_record.saw(model, torch.tensor([9]))  # aborted before its backward: belongs to no step
    step([0, 1], [2])
    step([2], [3])
    row = other_trainers.findings(draw_record, {"size": 6}, 2, 0.0, 0.0, 0, 0)
    assert [samples for _, samples in draw_record.steps] == [[0, 1, 2], [2, 3]]
    assert (row["steps_done"], row["samples_trained"], row["repeated"], row["skipped"]) == (2, 5, 1, 2)


def test_the_example_in_the_documentation_runs(caplog):
    """The plain PyTorch script of docs/oom.md, under a real limit."""
    text = (ROOT / "docs" / "oom.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with caplog.at_level(logging.WARNING), LiveTensors(limit=8 * 2**20):
        exec(compile(script, "docs/oom.md", "exec"), {"__name__": "script"})
    tried = [re.search(r"with batch size (\d+).*trying (\d+)$", message).groups() for message in caplog.messages]
    assert tried == [("512", "256"), ("256", "128")]

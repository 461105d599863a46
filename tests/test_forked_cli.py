"""A run in a fork is what it is when started by itself; see `forked_cli`."""

import sys

import forked_cli
import helpers
import pytest
import runs

pytestmark = pytest.mark.slow


def test_same_weights_and_output(tmp_path):
    words = [*runs.MODELS["mlp"], "train.max_steps=3"]
    real = [sys.executable, "-B", "-m", "trainapp"]  # not the command that is forked
    forked = helpers.train(tmp_path / "forked", *words)
    started = helpers.train(tmp_path / "started", *words, command=real)
    assert runs.differences(runs.saved(tmp_path / "forked", 3), runs.saved(tmp_path / "started", 3)) == []
    shown = [[line.partition(" ")[0] for line in done.stdout.splitlines()] for done in (forked, started)]
    assert shown[0] == shown[1]
    assert len(shown[0]) > 5


def test_only_for_the_environment_of_the_imports(monkeypatch):
    def can_fork(command=helpers.PROGRAM, **changes):
        return forked_cli.can_fork(command, helpers.environment(changes))

    plain = forked_cli._lasting(helpers.environment())  # an earlier test may have begun in another one
    monkeypatch.setattr(forked_cli, "_plain", lambda: plain)
    assert can_fork()
    assert can_fork(TRAINAPP_CACHE="elsewhere")
    assert not can_fork(OMP_NUM_THREADS="2")
    assert not can_fork([*helpers.PROGRAM[:2], "pytest"])
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert not can_fork()

"""`mode=lr_find`: the loop's own steps at growing rates, a curve, a suggestion, and nothing else."""

import csv
import itertools
import math

import pytest
import runs
from helpers import LR_FIND_FILES, files, run_cli

from trainapp.config import compose
from trainapp.errors import TrainingStopped
from trainapp.launch import launch
from trainapp.run import lr_find

MLP = (*runs.MODELS["mlp"], "batch.global_size=16", "memory.guard=false", "train.device=cpu")
FOUND = {"lr_find.csv", "lr_find.png"}


def find(run_dir, *overrides):
    """The suggested rate, and the curve's rows as numbers."""
    rate = launch.launch(compose.from_command_line([*MLP, "mode=lr_find", *overrides], str(run_dir)))
    with (run_dir / "lr_find.csv").open() as file:
        return rate, [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    done = run_cli(*MLP, "mode=lr_find", "lr_find.steps=60", "hydra.run.dir=found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "found") == FOUND | LR_FIND_FILES
    last = done.stdout.splitlines()[-1]
    name, _, rate = last.partition("=")
    assert name == "optimizer.lr"
    assert 1e-5 < float(rate) < 1
    assert run_cli(*MLP, last, "--cfg", "job", cwd=tmp_path).returncode == 0
    assert (tmp_path / "found/lr_find.png").read_bytes().startswith(b"\x89PNG")


def test_rates_grow_exponentially_and_losses_are_those_of_the_loop(tmp_path):
    """The same losses in pieces; another experiment's in the control."""
    rate, rows = find(tmp_path / "a", "lr_find.steps=20", "lr_find.max=0.1", "lr_find.min=1e-5")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[0]["lr"] == pytest.approx(1e-5)
    assert rows[-1]["lr"] == pytest.approx(0.1)
    ratios = {round(b["lr"] / a["lr"], 6) for a, b in itertools.pairwise(rows)}
    assert ratios == {round(1e4 ** (1 / 19), 6)}
    chosen = ("lr_find.steps=20", "lr_find.max=0.1", "lr_find.min=1e-5")
    same, in_pieces = find(tmp_path / "b", *chosen, "batch.micro_size=5", "schedule.warmup=3", "train.max_epochs=1")
    assert same == rate
    assert [row["loss"] for row in in_pieces] == pytest.approx([row["loss"] for row in rows], rel=1e-4)
    _, other = find(tmp_path / "c", *chosen, "train.seed=1")
    assert [row["loss"] for row in other] != pytest.approx([row["loss"] for row in rows], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["train.grad_clip=1.0"], "the loss diverges"),
        (["train.grad_clip=null", "lr_find.diverges=1e30"], "the loss or a gradient is not finite"),
    ],
)
def test_it_stops_where_the_loss_diverges(tmp_path, capsys, settings, why):
    rates = ("optimizer=sgd", "lr_find.min=1e-2", "lr_find.max=1e25", "lr_find.steps=300")
    rate, rows = find(tmp_path, *rates, *settings)
    assert files(tmp_path) == FOUND
    assert f"{rows[-1]['lr']:.2g}, where {why}" in capsys.readouterr().out
    assert 10 < len(rows) < 300
    assert 1e-2 <= rate < 10
    assert all(math.isfinite(row["loss"]) for row in rows)


@pytest.mark.slow
def test_the_command_line_writes_nothing_over_a_run(tmp_path):
    """Hydra would write its configuration and log over the run's. Another run may follow there."""
    run = (*MLP, "train.max_epochs=null", "train.max_steps=2", "hydra.run.dir=run")
    assert run_cli(*run, cwd=tmp_path).returncode == 0
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    assert {".hydra/config.yaml", "trainapp.log"} <= before.keys()
    done = run_cli(*run, "mode=lr_find", "lr_find.steps=20", "lr_find.min=1e-3", "lr_find.max=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "run") == before.keys() | FOUND | LR_FIND_FILES
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_it_recovers_from_an_out_of_memory_error(tmp_path):
    few = ("model=resnet", "data=digits", "mode=lr_find", "lr_find.steps=10", "lr_find.min=1e-4", "lr_find.max=1e-2")
    limited = run_cli(*few, "memory.limit=48MiB", "hydra.run.dir=a", cwd=tmp_path)
    assert limited.returncode == 0, limited.stderr
    assert "out of memory" in limited.stderr
    assert files(tmp_path / "a") == FOUND | LR_FIND_FILES


def test_groups_keep_their_ratio(tmp_path):
    groups = "optimizer.groups=[{match: head, lr: 5e-3}, {match: stem, eps: 1e-6}]"
    config = compose.from_command_line([*MLP, "mode=lr_find", "optimizer.lr=1e-3", groups])
    changed = lr_find.configured(config, str(tmp_path), tmp_path / "rates")
    assert changed.optimizer.lr == config.lr_find.max == 10.0
    assert [group.get("lr") for group in changed.optimizer.groups] == [pytest.approx(50.0), None]


# What the curve says


def test_the_suggestion_of_a_known_curve():
    rates = [10 ** (-6 + 0.1 * step) for step in range(70)]  # up to 10
    curve = [2 - math.tanh(2 * (math.log10(rate) + 3)) + 50 * rate**2 for rate in rates]
    found = lr_find.suggestion(rates, curve, 1e-6)
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    assert found.lowest == pytest.approx(0.015, rel=0.5)
    assert found.rate == found.steepest
    with pytest.raises(TrainingStopped, match=r"the loss falls at no rate from lr_find.min=1e-06 on"):
        lr_find.suggestion(rates, sorted(curve), 1e-6)


def test_the_smoothed_loss_has_no_bias():
    assert lr_find.smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert lr_find.smoothed([1.0, 0.0])[1] == pytest.approx(0.9 * 0.1 / 0.19)

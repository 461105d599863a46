"""`mode=lr_find`: the loop's own steps at growing rates, a curve, a suggestion, and nothing else."""

import itertools
import math

import pytest
import runs
from helpers import files, run_cli

from trainapp.config import compose
from trainapp.errors import TrainingStopped
from trainapp.launch import launch
from trainapp.run import lr_find

MLP = (*runs.MODELS["mlp"], "batch.global_size=16", "memory.guard=false", "train.device=cpu")
FOUND = {"lr_find.png"}


@pytest.fixture
def find(monkeypatch):
    """A function that runs the test: the suggested rate, and the curve's rates and losses."""
    drawn = []
    draw = lr_find._draw
    monkeypatch.setattr(lr_find, "_draw", lambda *curve: drawn.append(curve) or draw(*curve))

    def found(run_dir, *overrides):
        rate = launch.launch(compose.from_command_line([*MLP, "mode=lr_find", *overrides], str(run_dir)))
        return rate, *drawn[-1][1:3]

    return found


@pytest.mark.slow
def test_from_the_command_line_it_writes_nothing_over_a_run(tmp_path):
    """Hydra would write its configuration and log over the run's. Another run may follow there."""
    run = (*MLP, "train.max_epochs=null", "train.max_steps=2", "hydra.run.dir=run")
    assert run_cli(*run, cwd=tmp_path).returncode == 0
    before = {name: (tmp_path / "run" / name).read_bytes() for name in files(tmp_path / "run")}
    assert {".hydra/config.yaml", "trainapp.log"} <= before.keys()
    done = run_cli(*run, "mode=lr_find", "lr_find.steps=60", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "run") == before.keys() | FOUND | {"lr_find.log"}
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    last = done.stdout.splitlines()[-1]
    name, _, rate = last.partition("=")
    assert name == "optimizer.lr"
    assert 1e-5 < float(rate) < 1
    assert run_cli(*MLP, last, "--cfg", "job", cwd=tmp_path).returncode == 0
    assert (tmp_path / "run/lr_find.png").read_bytes().startswith(b"\x89PNG")


def test_rates_grow_exponentially_and_losses_are_those_of_the_loop(tmp_path, find):
    """The same losses in pieces; another experiment's in the control."""
    chosen = ("lr_find.steps=20", "lr_find.max=0.1", "lr_find.min=1e-5")
    rate, rates, losses = find(tmp_path / "a", *chosen)
    assert len(rates) == 20
    assert rates[0] == pytest.approx(1e-5)
    assert rates[-1] == pytest.approx(0.1)
    assert {round(b / a, 6) for a, b in itertools.pairwise(rates)} == {round(1e4 ** (1 / 19), 6)}
    same, _, in_pieces = find(tmp_path / "b", *chosen, "batch.micro_size=5", "schedule.warmup=3", "train.max_epochs=1")
    assert same == rate
    assert in_pieces == pytest.approx(losses, rel=1e-4)
    _, _, other = find(tmp_path / "c", *chosen, "train.seed=1")
    assert other != pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["train.grad_clip=1.0"], "the loss diverges"),
        (["train.grad_clip=null", "lr_find.diverges=1e30"], "the loss or a gradient is not finite"),
    ],
)
def test_it_stops_where_the_loss_diverges(tmp_path, capsys, find, settings, why):
    rates = ("optimizer=sgd", "lr_find.min=1e-2", "lr_find.max=1e25", "lr_find.steps=300")
    rate, tried, losses = find(tmp_path, *rates, *settings)
    assert files(tmp_path) == FOUND
    assert f"{tried[-1]:.2g}, where {why}" in capsys.readouterr().out
    assert 10 < len(tried) < 300
    assert 1e-2 <= rate < 10
    assert all(map(math.isfinite, losses))


def test_a_loss_that_falls_at_no_rate_leaves_its_curve(tmp_path, find):
    rates = ("optimizer=sgd", "train.grad_clip=null", "lr_find.min=1e3", "lr_find.max=1e25", "lr_find.steps=20")
    with pytest.raises(TrainingStopped, match=r"the loss falls at no rate from lr_find\.min=1000 on"):
        find(tmp_path, *rates)
    assert files(tmp_path) == FOUND


@pytest.mark.slow
def test_it_recovers_from_an_out_of_memory_error(tmp_path):
    few = ("model=resnet", "data=digits", "mode=lr_find", "lr_find.steps=10", "lr_find.min=1e-4", "lr_find.max=1e-2")
    limited = run_cli(*few, "memory.limit=48MiB", "hydra.run.dir=a", cwd=tmp_path)
    assert limited.returncode == 0, limited.stderr
    assert "out of memory" in limited.stderr
    assert files(tmp_path / "a") == FOUND | {"lr_find.log"}


def test_groups_keep_their_ratio(tmp_path):
    groups = "optimizer.groups=[{match: head, lr: 5e-3}, {match: stem, eps: 1e-6}]"
    config = compose.from_command_line([*MLP, "mode=lr_find", "optimizer.lr=1e-3", groups])
    changed = lr_find.configured(config, str(tmp_path))
    assert changed.optimizer.lr == config.lr_find.max == 10.0
    assert [group.get("lr") for group in changed.optimizer.groups] == [pytest.approx(50.0), None]


def test_the_suggestion_of_a_known_curve():
    rates = [10 ** (-6 + 0.1 * step) for step in range(70)]  # up to 10
    curve = [2 - math.tanh(2 * (math.log10(rate) + 3)) + 50 * rate**2 for rate in rates]
    found = lr_find.suggestion(rates, curve)
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    assert found.lowest == pytest.approx(0.015, rel=0.5)
    assert found.rate == found.steepest
    assert lr_find.suggestion(rates, sorted(curve)) is None


def test_the_smoothed_loss_has_no_bias():
    assert lr_find.smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert lr_find.smoothed([1.0, 0.0])[1] == pytest.approx(0.9 * 0.1 / 0.19)

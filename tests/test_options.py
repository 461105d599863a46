"""What options do. That each one composes, is built and trains: test_pairs.py."""

import json
import math

import pytest
import runs
import torch
from helpers import evaluations, metrics, run_cli, train
from runs import MODELS

# LBFGS needs to call the model again, SparseAdam needs sparse gradients, Muon takes only matrices.
UNSUITED = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in UNSUITED
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer_by_its_name(tmp_path, name):
    arguments = [f"~optimizer.{key}" for key in ("betas", "eps")]
    run = runs.prepare(tmp_path, *MODELS["mlp"], f"optimizer._target_=torch.optim.{name}", *arguments)
    before = runs.weights(run.state.model)
    try:
        assert type(run.state.optimizer).__name__ == name
        for _ in range(2):
            runs.loop.train_step(run)
    finally:
        run.tracker.close()
    change = (runs.weights(run.state.model) - before).abs().max()
    assert run.state.progress.step == 2
    assert 0 < change < 1


# 10 steps, a warm-up of 2, down to a tenth at the end: the multipliers of the rate, worked out by hand.
FACTORS = {
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.5, 1] + [1 - 0.9 * k / 8 for k in range(8)],
    "cosine": [0.5, 1] + [0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(8)],
    "wsd": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1 - 0.9 * 0.5**0.5],
}
FOLLOWS_EVALUATIONS = {"plateau"}  # optim/test_schedules.py


@pytest.mark.parametrize("shape", sorted(set(runs.options("schedule")) - FOLLOWS_EVALUATIONS))
def test_rates_of_every_schedule(tmp_path, shape):
    """One step of the schedule per optimizer step, regardless of the number of micro-batches."""
    factors = FACTORS[shape]
    final = "+schedule.final=0.1" if shape == "constant" else "schedule.final=0.1"
    settings = ("schedule.warmup=2", final, "train.max_steps=10", "optimizer.lr=0.01", "batch.micro_size=4")
    runs.run(tmp_path, *MODELS["mlp"], f"schedule={shape}", *settings)
    assert [line["lr"] for line in metrics(tmp_path)] == pytest.approx([0.01 * f for f in factors], rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (10, 1)),
        (["batch.micro_size=4"], (4, 3)),  # 4, 4, 2
        (["accumulation=fixed", "accumulation.steps=3"], (4, 3)),  # 4, 4, 2
        (["accumulation=fixed"], (3, 4)),  # 3, 3, 2, 2
    ],
)
def test_accumulation_fixed_and_auto(tmp_path, overrides, expected):
    ended = runs.run(tmp_path, *MODELS["mlp"], "train.max_steps=1", "batch.global_size=10", *overrides)
    assert (ended.micro_size, ended.accumulation) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["mlp", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("resnet", "gpt"))]
)
def test_compiled_model_learns_as_the_plain_one(tmp_path, model):
    overrides = (*MODELS[model], "train.max_steps=2", "every.eval=2")
    if model == "gpt":
        overrides += ("model.dropout=0",)  # compiled dropout draws different random numbers
    torch.compiler.reset()
    for name in ("false", "true"):
        runs.run(tmp_path / name, *overrides, f"train.compile={name}")
    plain, compiled = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_checkpointing_off_writes_none(tmp_path):
    for option, exists in (("standard", True), ("off", False)):
        ended = runs.run(tmp_path / option, *MODELS["mlp"], f"checkpointing={option}", "train.max_steps=1")
        assert (tmp_path / option / "checkpoints").exists() is exists
        assert (ended.checkpoint is not None) is exists
        assert json.loads((tmp_path / option / "result.json").read_text())["checkpoint"] == ended.checkpoint


@pytest.mark.slow
def test_debug_fast_goes_through_everything(tmp_path):
    train(tmp_path / "run", "debug=fast", *MODELS["mlp"])
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert [line["step"] for line in evaluations(tmp_path / "run")] == [2, 4]
    assert {path.name for path in (tmp_path / "run/checkpoints").glob("step_*")} == {"step_00000002", "step_00000004"}


@pytest.mark.slow
def test_debug_nonfinite_names_the_operation_behind_a_non_finite_value(tmp_path):
    (tmp_path / "bad.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(64, 10)\n"
        "    def forward(self, images):\n"
        "        shifted = self.linear(images.flatten(1)) * 0\n"
        "        return shifted.sqrt()  # finite; its gradient is infinite, and times 0 that is nan\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/bad.yaml").write_text("_target_: bad.Net\n")
    user = ("--config-dir=.", "model=bad", "user_packages=[bad]", "train.max_steps=1")
    plain = run_cli(*user, cwd=tmp_path)
    assert plain.returncode == 1
    assert "shifted = self.linear" not in plain.stderr
    traced = run_cli(*user, "debug=nonfinite", cwd=tmp_path)
    assert traced.returncode == 1
    assert "MulBackward0" in traced.stderr
    assert "shifted = self.linear(images.flatten(1)) * 0" in traced.stderr

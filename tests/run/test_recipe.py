"""The recipe: what a run says of itself when it starts."""

import dataclasses
import json

import pytest
import runs
import torch

from trainapp.optim.precision import has_tf32
from trainapp.run import recipe, recipe_text

MLP = runs.MODELS["mlp"]
PARTS = {"a": "head", "b": "layers"}  # names of updates, and of parameters


def ramp(step, warmup):
    return min(1.0, (step + 1) / warmup)


def half(step):
    return 0.5


def recipe_of(run_dir, *overrides, checks=None):
    run = runs.closed(run_dir, *overrides)
    if checks is not None:
        run.checks = checks
    facts = recipe.recipe_of(run)
    return facts.to_dict(), dict(line.partition(": ")[::2] for line in recipe_text.lines_of(facts)[1:])


def test_it_has_six_lines_and_names_the_defaults_that_a_plain_script_does_not_have(tmp_path):
    facts, lines = recipe_of(tmp_path, *MLP, "train.max_steps=40", "schedule.warmup=4", "optimizer.weight_decay=0.05")
    assert list(lines) == ["data", "optimizer", "schedule", "precision", "checks"]
    assert "weight decay 0.05 except on 3 norms and biases; gradients clipped to a norm of 1" in lines["optimizer"]
    assert lines["schedule"] == "cosine, towards 0 x lr after step 40, with 4 steps of warm-up"
    assert "task classification, best checkpoint by max accuracy" in lines["data"]
    (optimizer,) = facts["optimizers"]
    assert [len(group["names"]) for group in optimizer["groups"]] == [3, 3]
    assert all(name.endswith("bias") for name in optimizer["groups"][1]["names"])


@pytest.mark.parametrize(
    ("overrides", "line", "text"),
    [
        (("optimizer.weight_decay=0",), "optimizer", "no weight decay"),
        (("train.grad_clip=null",), "optimizer", "gradients are not clipped"),
        (
            ("train.ema=0.99", "every.eval=2"),
            "optimizer",
            "; weights are averaged (train.ema=0.99) for evaluations, the best checkpoint and exports",
        ),
        (("optimizer._target_=torch.optim.Rprop", "optimizer.lr=0.01"), "optimizer", "Rprop, lr 0.01; gradients"),
        (("optimizer.groups=[{match: head, lr: 1e-4}]", "optimizer.lr=1e-3"), "optimizer", "lr 0.0001 to 0.001"),
        (
            ("optimizer.groups=[{match: head, betas: [0.5, 0.9]}]",),
            "optimizer",
            "betas (0.9, 0.999) for layers.0.0.weight and 3 more, [0.5, 0.9] for head.weight and 1 more",
        ),
        (("optimizer=sgd",), "optimizer", "SGD, lr 0.1, momentum 0.9, nesterov"),
        (("optimizer.betas=[0.8,0.9]",), "optimizer", "betas (0.8, 0.9)"),
        (("schedule=constant",), "schedule", "constant"),
        (
            ("schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=10"),
            "schedule",
            "torch.optim.lr_scheduler.StepLR(step_size=10), advanced in every step",
        ),
        (
            ("schedule._target_=test_recipe.ramp", "schedule.warmup=8", "user_packages=[test_recipe]"),
            "schedule",
            "test_recipe.ramp(warmup=8), advanced in every step, no warm-up added to its own",
        ),
        (
            ("schedule._target_=test_recipe.half", "schedule.warmup=8", "user_packages=[test_recipe]"),
            "schedule",
            "test_recipe.half, advanced in every step, with 8 steps of warm-up",
        ),
        (
            ("schedule._target_=torch.optim.lr_scheduler.OneCycleLR", "schedule.max_lr=1.0"),
            "optimizer",
            "AdamW, begins at lr 0.04, betas (0.95, 0.999)",
        ),
        (
            ("schedule=plateau", "schedule.patience=1", "every.eval=2"),
            "schedule",
            "min_lr=0.0), advanced by max accuracy after each evaluation",
        ),
        (
            ("schedule._target_=test_recipe.half", "user_packages=[test_recipe]", "optimizer.lr=0.1"),
            "optimizer",
            "AdamW, lr 0.1, begins at 0.05, betas",
        ),
        (
            ("schedule._target_=torch.optim.lr_scheduler.LinearLR", "optimizer.lr=0.3", "schedule.warmup=2"),
            "optimizer",
            "AdamW, lr 0.3, begins at 0.05, betas",
        ),
        (
            ("stopping.patience=3", "every.eval=2"),
            "schedule",
            "; the run ends after 3 evaluations in a row without an improvement of max accuracy",
        ),
        (
            ("stopping={patience: 1, min_delta: 0.01, metric: min loss}", "every.eval=2"),
            "schedule",
            "; the run ends after 1 evaluation without an improvement of min loss by more than 0.01",
        ),
        (("precision=bf16",), "precision", "matmuls and convolutions in bf16 (autocast); weights in float32"),
    ],
)
def test_what_a_setting_changes_is_said(tmp_path, overrides, line, text):
    _, lines = recipe_of(tmp_path, *MLP, *overrides)
    assert text in lines[line]


def test_the_precision_is_that_of_the_models_weights(tmp_path):
    own = ("model._target_=own_tasks.in_double", "task=own_tasks.cross_entropy_in_double", "user_packages=[own_tasks]")
    facts, lines = recipe_of(tmp_path, "data=digits", *own)
    first, *_ = recipe_text.lines_of(recipe.recipe_of(runs.closed(tmp_path, "data=digits", *own)))
    assert " parameters on cpu, float64; " in first
    assert lines["precision"] == "no autocast: as the model's weights, in float64"
    assert facts["precision"]["computes_in"] == "float64"
    assert "task own_tasks.cross_entropy_in_double," in lines["data"]


def test_batchnorm_and_the_tasks_of_updates_are_named(tmp_path):
    _, lines = recipe_of(tmp_path / "norm", *runs.MODELS["resnet"])
    assert lines["checks"].endswith("; results depend on the micro-batch (20 BatchNorm layers)")
    updates = ", ".join(f"{{name: {name}, task: classification, parameters: [{part}]}}" for name, part in PARTS.items())
    _, lines = recipe_of(tmp_path / "updates", *MLP, f"updates=[{updates}]")
    assert "task classification for a, classification for b;" in lines["data"]


@pytest.mark.parametrize(
    ("cadence", "text", "steps"),
    [
        ("", "b: AdamW", [1, 2, 3, 4]),
        (", every: 5", "b (in steps 1, 5, 10, 15, ...): AdamW", [1, 5, 10, 15]),
        (
            ", every: 5, offset: 1",
            "b (in steps 1, 6, 11, 16, ...; every.log meets none of them): AdamW",
            [1, 6, 11, 16],
        ),
        (", every: 3, offset: 1", "b (in steps 1, 4, 7, 10, ...): AdamW", [1, 4, 7, 10]),
    ],
)
def test_the_steps_of_a_rare_update_are_named(tmp_path, cadence, text, steps):
    first, second = (f"{{name: {name}, task: classification, parameters: [{part}]" for name, part in PARTS.items())
    facts, lines = recipe_of(tmp_path, *MLP, "every.log=10", f"updates=[{first}}}, {second}{cadence}}}]")
    assert f"; {text}" in lines["optimizer"]
    assert facts["optimizers"][1]["first_steps"] == steps


def test_weights_of_samples_are_named(tmp_path):
    run = runs.closed(tmp_path, *MLP, "data.sampling.weights=balanced")
    facts = recipe.recipe_of(run)
    assert facts.training.batch.sampling_weights == "balanced"
    assert recipe_text.lines_of(facts)[0].endswith("drawn with replacement (data.sampling.weights=balanced)")


def test_batchnorm_that_stays_in_evaluation_mode_does_not_depend_on_the_micro_batch(tmp_path):
    run = runs.closed(tmp_path, *runs.MODELS["resnet"])
    for module in run.state.model.modules():
        module.training &= not isinstance(module, torch.nn.BatchNorm2d)
    facts = recipe.recipe_of(run)
    assert facts.training.batchnorm_layers == 0
    assert "micro-batch (" not in recipe_text.lines_of(facts)[-1]


def test_parameters_that_are_not_trained_are_counted(tmp_path):
    run = runs.closed(tmp_path, *MLP, "model.freeze=[head]")
    first, *_ = recipe_text.lines_of(recipe.recipe_of(run))
    assert "parameters are trained (" in first


@pytest.mark.parametrize(
    ("checks", "line"),
    [
        ({}, "none"),
        (
            dict.fromkeys(("draws", "draws in training", "loss", "loss in training"), "no check needed, since X"),
            "the loss and random draws in evaluation and training: no check needed, since X",
        ),
        (
            {"draws": "none", "draws in training": "none", "loss": "adds up over 4", "loss in training": "not X"},
            "the loss in evaluation adds up over 4; the loss in training is not X; "
            "no random draws in evaluation and training",
        ),
        (
            {"draws": "not tried: X", "draws in training": "all belong to samples", "loss in chunks": "is computed so"},
            "the loss in chunks is computed so; random draws in evaluation are not tried: X; "
            "random draws in training all belong to samples",
        ),
        (
            dict.fromkeys(("loss", "loss in training", "padding", "padding in training"), "adds up over 4"),
            "the loss in evaluation and training, also in padded halves, adds up over 4",
        ),
        (
            {"loss": "adds up over 4", "padding": "does not add up: X", "padding in training": "not compared: Y"},
            "the loss in evaluation adds up over 4; the loss in padded halves in evaluation does not add up: X; "
            "the loss in padded halves in training is not compared: Y",
        ),
        (
            {"loss": "is", "loss of update a": "A", "loss of update a in training": "A"},
            "the loss in evaluation: is; the loss of update a in evaluation, of update a in training: A",
        ),
    ],
)
def test_checks_are_told_in_plain_english(tmp_path, checks, line):
    _, lines = recipe_of(tmp_path, *MLP, checks=checks)
    assert lines["checks"] == line


def test_a_long_outcome_is_whole_on_wrapped_lines(tmp_path):
    text = "not compared: LookupError: " + 30 * "a long message "
    run = runs.closed(tmp_path, *MLP)
    run.checks = {"loss": text.strip(), "draws": "none"}
    facts = recipe.recipe_of(run)
    printed = recipe_text.printed_lines(facts)
    (start,) = (number for number, line in enumerate(printed) if line.startswith("checks: "))
    lines = printed[start:]
    assert max(map(len, lines)) <= 120 < len(" ".join(lines))
    assert {line[:8] for line in lines[1:]} == {" " * 8}
    whole = " ".join(line.strip() for line in lines)
    assert whole == f"checks: the loss in evaluation is {text.strip()}; no random draws in evaluation"


# --- weights that are loaded or frozen


def weights_line(run_dir, *overrides):
    _, lines = recipe_of(run_dir, *overrides)
    return lines.get("weights")


def test_initial_weights_are_counted_also_after_a_resume(tmp_path):
    torch.save(runs.closed(tmp_path / "first", *MLP).state.model.state_dict(), tmp_path / "w.pt")
    chosen = (*MLP, f"model.init_from={tmp_path / 'w.pt'}")
    assert weights_line(tmp_path / "none", *MLP) is None
    assert weights_line(tmp_path / "whole", *chosen) == f"6 of 6 tensors begin with model.init_from={tmp_path / 'w.pt'}"
    deeper = (*chosen, "model.depth=4", "model.init_strict=false")
    fresh = f"6 of 8 tensors begin with model.init_from={tmp_path / 'w.pt'}, left as initialised: "
    assert weights_line(tmp_path / "new", *deeper) == f"{fresh}layers.2.0.weight, layers.2.0.bias"
    run = runs.run(tmp_path / "run", *deeper, "train.max_steps=2")
    assert run.steps == 2
    facts, lines = recipe_of(tmp_path / "run", *deeper)  # resumed
    assert lines["weights"].startswith(fresh)
    assert facts["initial_weights"]["left_as_initialised"] == ["layers.2.0.weight", "layers.2.0.bias"]
    assert facts["resumes"] == [{"after_step": 2, "ranks": 1, "ranks_before": 1}]


def test_the_mode_of_frozen_layers_is_named(tmp_path):
    resnet = (*runs.MODELS["resnet"], "model.freeze=[conv1,bn1,layer1,layer2]")
    frozen = "30 of 62 parameter tensors are frozen"
    moving = (
        "in training mode: 10 BatchNorm layers (statistics move; model.freeze_mode=eval keeps them in evaluation mode)"
    )
    assert weights_line(tmp_path / "train", *resnet) == f"{frozen}, {moving}"
    assert weights_line(tmp_path / "eval", *resnet, "model.freeze_mode=eval") == frozen


def test_a_weight_average_is_recorded_where_it_is_set(tmp_path):
    facts, lines = recipe_of(tmp_path / "none", *MLP)
    assert "ema" not in facts
    assert "averaged" not in lines["optimizer"]
    facts, _ = recipe_of(tmp_path / "average", *MLP, "train.ema=0.99")
    assert facts["ema"] == 0.99


def test_early_stopping_is_recorded_where_it_is_set(tmp_path):
    facts, _ = recipe_of(tmp_path / "without", *MLP)
    assert "stopping" not in facts
    facts, _ = recipe_of(tmp_path / "with", *MLP, "stopping.patience=3", "every.eval=2")
    assert facts["stopping"] == {"patience": 3, "min_delta": 0.0, "metric": "max accuracy"}


def test_a_run_writes_it(tmp_path):
    runs.run(tmp_path, *MLP, "train.max_steps=1")
    written = json.loads((tmp_path / "recipe.json").read_text())
    assert written["schedule"]["total_steps"] == 1
    assert written["model"]["class"] == "MLP"
    assert written["grad_clip"] == 1.0


def test_what_a_gpu_computes_in_another_way(tmp_path):
    run = runs.closed(tmp_path, *MLP)
    facts = recipe.recipe_of(run)
    assert not {"tf32_is_unused", "without_cudnn"} & facts.to_dict().keys()  # on the CPU
    on_gpu = dataclasses.replace(facts, tf32_is_unused=True, without_cudnn=["encoder.lstm"])
    (line,) = [line for line in recipe_text.lines_of(on_gpu) if line.startswith("precision: ")]
    assert line == (
        "precision: fp32 throughout; precision=tf32 is faster on this GPU and rounds the operands of matmuls and "
        "convolutions to 11 bits; encoder.lstm without cuDNN, whose dropout no seed repeats"
    )


@pytest.mark.parametrize(
    ("capability", "hip", "expected"), [((8, 6), None, True), ((7, 5), None, False), ((9, 4), "6.2", False)]
)
def test_tf32(monkeypatch, capability, hip, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_tf32(torch.device("cuda", 0)) is expected
    assert not has_tf32(torch.device("cpu"))

"""Evaluations that `every.eval` does not ask for: before the first step, to check the objective, and at the run's end.
Neither schedule nor `stopping.patience` follows them.
"""

import logging

import helpers
import pytest
import runs
import weighted
from torch.nn import functional as F

OWN = ("user_packages=[test_unscheduled_evaluations]", "task=test_unscheduled_evaluations.constant", "every.eval=2")
# Without weights that the length of the run changes. No evaluation improves on the first.
CONSTANT = (*runs.MODELS["mlp"], *OWN, "objective=min same", "schedule.warmup=0", "every.save=1")
PLATEAU = ("schedule=plateau", "schedule.patience=0", "schedule.factor=0.5")
FIRST = (*weighted.OVERRIDES, "task=weighted.task", "objective=max third", "every.eval=2", "schedule.warmup=0")
SEEN: list[tuple[int, bool]] = []


def constant(model, batch):
    """Classification, with a metric that is the same at every evaluation."""
    logits = model(batch["inputs"])
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits), {"same": 0 * loss.detach() + len(logits)}


class Notes:
    """A callback that notes its evaluations."""

    def after_evaluation(self, view, metrics):
        SEEN.append((view.step, view.is_scheduled))


def evaluated_steps(run_dir) -> list[int]:
    return [line["step"] for line in helpers.evaluations(run_dir)]


def rates(run_dir) -> list[float]:
    return [line["lr"] for line in helpers.metrics(run_dir)]


def extended(folder, *overrides):
    """The results of a run of 12 steps, and of one of 5 steps that is extended to 12."""
    whole = runs.run(folder / "whole", *overrides, "train.max_steps=12")
    runs.run(folder / "extended", *overrides, "train.max_steps=5")
    assert evaluated_steps(folder / "extended") == [2, 4, 5]
    return whole, runs.run(folder / "extended", *overrides, "train.max_steps=12")


@pytest.mark.parametrize("own", [PLATEAU, ("schedule=constant", "stopping.patience=4")], ids=["plateau", "patience"])
def test_an_extended_run_is_the_undisturbed_one(tmp_path, own):
    whole, longer = extended(tmp_path, *CONSTANT, *own)
    assert evaluated_steps(tmp_path / "whole") == list(range(2, whole.steps + 1, 2))
    assert evaluated_steps(tmp_path / "extended") == sorted([*evaluated_steps(tmp_path / "whole"), 5])
    assert longer.steps == whole.steps
    assert rates(tmp_path / "extended") == rates(tmp_path / "whole")
    states = [runs.saved(tmp_path / name, whole.steps) for name in ("whole", "extended")]
    parts = [{name: state[name] for name in ("model", "optimizer", "schedule", "stateful")} for state in states]
    assert runs.differences(*parts) == []
    losses = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("whole", "extended")]
    assert losses[0] == losses[1]


def test_the_evaluation_at_the_runs_end_may_be_the_best(tmp_path):
    run = (*runs.MODELS["mlp"], "every.eval=3", "objective=min loss", "optimizer.lr=0.01", "train.max_steps=4")
    ended = runs.run(tmp_path, *run)
    at_3, at_4 = helpers.evaluations(tmp_path)
    assert at_4["loss"] < at_3["loss"]
    assert (ended.best_step, ended.objective) == (4, at_4["loss"])
    assert (tmp_path / "checkpoints/best").read_text().strip() == "step_00000004"


def test_the_evaluation_that_looks_for_the_objective_counts_for_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ended = runs.run(tmp_path, *FIRST, *PLATEAU, "stopping.patience=2", "train.max_steps=20")
    assert "so evaluating first" in caplog.text
    assert evaluated_steps(tmp_path) == [0, 2, 4, 6]
    assert (ended.steps, ended.best_step) == (6, 2)
    assert ended.ended.endswith("of step 2, since")
    whole, *parts = {rate: rates(tmp_path).count(rate) for rate in rates(tmp_path)}.items()
    assert whole[1] == 4  # the evaluation of step 4 is the first that improves on none
    assert parts == [(whole[0] / 2, 2)]


def test_callbacks_are_told(tmp_path):
    SEEN.clear()
    notes = "+callbacks.notes={_target_: test_unscheduled_evaluations.Notes}"
    own = ("user_packages=[weighted,test_unscheduled_evaluations]", notes, "train.max_steps=5")
    runs.run(tmp_path, *FIRST, *own)
    assert SEEN == [(0, False), (2, True), (4, True), (5, False)]

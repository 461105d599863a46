"""mode=eval and mode=export take from the checkpoint what its run is made of."""

import helpers
import own_hooks
import pytest
import runs

from trainapp.errors import UserError

GAN = (
    *("user_packages=[zoo]", "model._target_=zoo.gans.GAN", "data._target_=zoo.data.Vectors", "task=zoo.gans.distance"),
    "updates=[{name: discriminator, task: zoo.gans.discriminate, parameters: [discriminator]}, "
    "{name: generator, task: zoo.gans.generate, parameters: [generator], optimizer: {lr: 0.05}}]",
)
MLP = ("model=mlp", "model.width=16", "data=digits", "user_packages=[own_hooks]")


@pytest.mark.slow
def test_updates(tmp_path):
    trained = runs.run(tmp_path / "run", *GAN, "train.max_steps=2", "every.eval=2", "batch.micro_size=16")
    resumed = ("user_packages=[zoo]", f"checkpointing.resume={tmp_path / 'run'}")
    evaluated = runs.run(tmp_path / "eval", "mode=eval", *resumed)
    assert evaluated.objective == pytest.approx(trained.objective)
    runs.run(tmp_path / "out", "mode=export", *resumed)
    assert (tmp_path / "out/export/model.safetensors").stat().st_size > 0
    with pytest.raises(UserError, match="zoo"):  # which code is imported, a checkpoint does not choose
        runs.run(tmp_path / "none", "mode=eval", resumed[1])


def test_how_data_are_loaded_is_no_choice_of_data(tmp_path):
    """Else the checkpoint's own model would be left out, too, for the defaults."""
    trained = runs.run(tmp_path / "run", *MLP, "data.augment=true", "model.width=24", "every.eval=4")
    resumed = (f"checkpointing.resume={tmp_path / 'run'}",)
    evaluated = runs.run(tmp_path / "eval", "mode=eval", *resumed, "data.num_workers=0")
    assert evaluated.objective == pytest.approx(trained.objective)
    other = runs.run(tmp_path / "other", "mode=eval", *resumed, "data=digits")  # by the run's model, too
    assert other.objective == evaluated.objective


def test_validation_sets_and_metrics_with_the_objective_that_they_have(tmp_path):
    settings = (f"+metrics.own={{_target_: {own_hooks.Correct.__module__}.Correct}}", "objective=max hard/own/share")
    trained = runs.run(tmp_path / "run", *MLP, "+data@eval.hard=digits", *settings, "every.eval=4")
    assert trained.metric == "hard/own/share"
    resumed = ("user_packages=[own_hooks]", f"checkpointing.resume={tmp_path / 'run'}")
    evaluated = runs.run(tmp_path / "eval", "mode=eval", *resumed)
    assert (evaluated.metric, evaluated.objective) == ("hard/own/share", trained.objective)
    before, after = (helpers.evaluations(tmp_path / name)[-1] for name in ("run", "eval"))
    assert before["eval_hard/own/share"] == after["eval_hard/own/share"]
    runs.run(tmp_path / "out", "mode=export", *resumed)

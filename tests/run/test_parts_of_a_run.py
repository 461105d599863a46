"""What other modes than training take from the checkpoint: what its run is made of, but for what the command line
names. Single settings change the run's own data.
"""

import csv
import json

import helpers
import hf_files
import own_hooks
import pytest
import runs
from helpers import run_cli, train

from trainapp.errors import UserError
from trainapp.run import resume

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
    for name, other in (("train split", "data.augment=false"), ("chosen", "data=digits")):  # by the run's model, too
        assert runs.run(tmp_path / name, "mode=eval", *resumed, other).objective == evaluated.objective


def test_validation_sets_and_metrics_with_the_objective_that_they_have(tmp_path):
    settings = (f"+metrics.own={{_target_: {own_hooks.Correct.__module__}.Correct}}", "objective=max hard/own/share")
    trained = runs.run(tmp_path / "run", *MLP, "+data@eval.hard=digits", *settings, "every.eval=4")
    assert trained.metric == "hard/own/share"
    resumed = ("user_packages=[own_hooks]", f"checkpointing.resume={tmp_path / 'run'}")
    evaluated = runs.run(tmp_path / "eval", "mode=eval", *resumed)
    assert (evaluated.metric, evaluated.objective) == ("hard/own/share", trained.objective)
    before, after = (helpers.evaluations(tmp_path / name)[-1] for name in ("run", "eval"))
    assert before["hard/own/share"] == after["hard/own/share"]
    runs.run(tmp_path / "out", "mode=export", *resumed)


ROWS = [("the quick brown fox", "fox"), ("jumps over", "none"), ("the lazy dog", "dog")] * 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on digits that were enlarged, by a model of another width than the default's."""
    folder = tmp_path_factory.mktemp("trained")
    runs.run(folder, *runs.TINY, "model=mlp", "model.width=24", "data=digits", "data.augment=true", "train.max_steps=2")
    return folder


def of_run(trained, tmp_path, *overrides, mode="predict"):
    config = runs.configure(tmp_path, f"mode={mode}", f"checkpointing.resume={trained}", *overrides)
    return resume.as_saved(config, trained / "checkpoints/step_00000002")


def test_only_what_is_changed_differs_from_the_runs_data(trained, tmp_path):
    config = of_run(trained, tmp_path, "data.seed=3", "+data.more.deep=[1]", "data.num_workers=2")
    assert config.data.target == "trainapp.data.sets.digits.Digits"
    assert config.data.arguments == {"augment": True, "seed": 3, "more": {"deep": [1]}}
    assert (config.data.num_workers, config.data.drop_last) == (2, False)
    assert config.model.arguments["width"] == 24
    assert of_run(trained, tmp_path, "~data.augment").data.arguments == {}


def test_other_data_is_chosen_as_a_whole(trained, tmp_path):
    assert of_run(trained, tmp_path, "data=digits", "data.augment=false").data.arguments == {"augment": False}
    own = of_run(trained, tmp_path, "data._target_=mine.Data", "data.x=1").data
    assert (own.target, own.arguments) == ("mine.Data", {"x": 1})


def written(path, columns, rows):
    with path.open("w") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.mark.slow
def test_rows_without_labels_are_predicted(tmp_path):
    """Of a file that has no column for them, by the classes of the run, in their order."""
    pytest.importorskip("datasets", reason="needs the extra trainapp[hf]")
    tokenizer = hf_files.tokenizer_folder(tmp_path / "tokenizer")
    known = written(tmp_path / "known.csv", ["review", "kind"], ROWS)
    new = written(tmp_path / "new.csv", ["review"], [row[:1] for row in ROWS[:7]])
    model = ("model=hf", "model.task=sequence_classification", hf_files.BERT)
    data = ("data=hf", f"data.path={known}", "data.text=review", "data.label=kind", f"data.tokenizer={tokenizer}")
    train(tmp_path / "run", *runs.TINY, *model, *data, "train.max_steps=2", "batch.global_size=8")
    command = ("mode=predict", f"checkpointing.resume={tmp_path / 'run'}", f"data.path={new}", "data.val_split=train")
    lacking = run_cli(*command, cwd=tmp_path)
    assert "data.label=kind: there is no such column; columns: review" in lacking.stderr
    command += ("data.label=null", "predict.output=p.jsonl")
    done = run_cli(*command, "data.classes=[dog,fox,none]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(7))
    assert all(line["prediction_name"] == ["dog", "fox", "none"][line["prediction"]] for line in lines)
    wrong = run_cli(*command, "data.classes=[fox,dog,none]", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "dog (now fox)" in wrong.stderr
    refused = ("data.label=null", "data.classes=[dog,fox,none]", f"data.path={new}")
    with pytest.raises(UserError, match="the batches have no targets"):  # it cannot be trained on
        runs.run(tmp_path / "again", *model, *data, *refused, "train.max_steps=1", "batch.global_size=4")

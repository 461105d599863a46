"""Inference on other data than the run's: single settings on the command line change the run's data."""

import csv
import json
import shutil

import hf_files
import pytest
import runs
from helpers import run_cli, train

from trainapp.config import data_of_run
from trainapp.errors import UserError

ROWS = [("the quick brown fox", "fox"), ("jumps over", "none"), ("the lazy dog", "dog")] * 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on digits that were enlarged, by a model of another width than the default's."""
    folder = tmp_path_factory.mktemp("trained")
    runs.run(folder, *runs.TINY, "model=mlp", "model.width=24", "data=digits", "data.augment=true", "train.max_steps=2")
    return folder


def expanded(trained, *overrides, mode="predict"):
    return data_of_run.expanded([f"mode={mode}", f"checkpointing.resume={trained}", *overrides])


def test_only_what_is_changed_differs_from_the_runs_data(trained):
    checkpoint = trained / "checkpoints/step_00000002"
    for resume in (trained, checkpoint, f"'{trained}'"):
        _, _, target, *own, changed = expanded(resume, "data.seed=3")
        assert (target, changed) == ("data._target_=trainapp.data.sets.digits.Digits", "data.seed=3")
        assert "data.augment=true" in own


def test_every_name_of_a_checkpoint_is_known_and_copies_are_not(trained, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints/step_00000002", folder / "step_00000002")
    for name, seed in (("step_00000002_backup", 5), ("step_00000001", 7)):
        data = {"target": "trainapp.data.sets.digits.Digits", "arguments": {"seed": seed}}
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(json.dumps({"config": {"data": data}}))
    (folder / "best").write_text("step_00000001\n")
    (folder / "latest").write_text("step_00000002\n")
    for name in ("", "checkpoints", "checkpoints/latest", "checkpoints/step_00000002/manifest.json"):
        assert "data.augment=true" in expanded(tmp_path / name, "data.seed=3"), name
    assert "data.seed=7" in expanded(folder / "best", "data.augment=true")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.num_workers=0",),
        ("data.sampling.weights=[1]",),
        ("data=digits", "data.augment=false"),
        ("data._target_=mine.Data", "data.x=1"),
        ("experiment=mine", "data.augment=false"),
    ],
)
def test_what_stays_as_it_is(trained, overrides):
    assert expanded(trained, *overrides)[2:] == list(overrides)


def test_without_a_checkpoint_and_in_training_nothing_changes(trained, tmp_path):
    change = "data.augment=false"
    assert expanded(tmp_path, change)[2:] == [change]
    assert expanded(trained, change, mode="train")[2:] == [change]
    (tmp_path / "manifest.json").write_text("[1]")
    assert expanded(tmp_path, change)[2:] == [change]


@pytest.mark.parametrize("value", ["a'b", "${oc.env:HOME}", "x,y", "null", 'back\\slash "q"', "", "1"])
def test_texts_are_quoted_for_hydra(trained, tmp_path, value):
    folder = tmp_path / "checkpoints/step_00000001"
    folder.mkdir(parents=True)
    arguments = {"path": value, "more": [1, 2.5, None, True, value], "nested": {"a b": [value]}}
    data = {"target": "my.Data", "arguments": arguments}
    (folder / "manifest.json").write_text(json.dumps({"config": {"data": data}}))
    config = runs.configure(
        tmp_path / "out", "user_packages=[my]", *expanded(tmp_path, "data.new=1"), "predict.output=x"
    )
    assert config.data.arguments == {**arguments, "new": 1}


def test_an_evaluation_takes_the_model_from_the_run(trained, tmp_path):
    resumed = ("mode=eval", f"checkpointing.resume={trained}")
    plain = runs.run(tmp_path / "a", *resumed)
    changed = runs.run(tmp_path / "b", *resumed, "data.augment=false")  # of the training split alone
    chosen = runs.run(tmp_path / "c", *resumed, "data=digits")
    assert plain.objective == changed.objective == chosen.objective


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
    assert "data.label=kind: there is no such column; there are review; rows without labels" in lacking.stderr
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
    with pytest.raises(UserError, match="the batches have no 'targets'"):  # it cannot be trained on
        runs.run(tmp_path / "again", *model, *data, *refused, "train.max_steps=1", "batch.global_size=4")

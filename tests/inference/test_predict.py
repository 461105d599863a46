"""`mode=predict`: one line per sample, in order, each once, whatever happens meanwhile."""

import os
import shlex
import signal

import numpy as np
import pytest
import runs
import torch
from helpers import ROOT, evaluations, lines, result, run_cli
from markdown import commands
from own_inference import Pixels
from torch import nn
from torch.nn import functional as F

import trainapp
from trainapp.data.sets.digits import Digits
from trainapp.errors import UserError
from trainapp.hooks.predictions import dim_of_classes
from trainapp.inference import predict as module
from trainapp.inference.rows import RowFile
from trainapp.signals import TO_BE_CONTINUED

PAGE = ROOT / "docs/inference.md"
QUIET = ("train.device=cpu", "memory.guard=false", "tracker=[]")
OWN = ("user_packages=[own_inference]",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on digits, with a weight average."""
    folder = tmp_path_factory.mktemp("trained")
    evaluated = ("every.eval=10", "every.save=10", "objective=max loss")  # the best is not the newest
    runs.run(folder, *runs.MODELS["mlp"], "train.max_steps=20", "train.ema=0.9", "optimizer.lr=0.01", *evaluated)
    return folder


def predict(tmp_path, trained, *overrides, output="p.jsonl"):
    """The lines of a prediction with settings of the run's own."""
    return runs.infer("predict", tmp_path, trained, *overrides, output=output)


def expected(trained, weights):
    """Class and probability of each validation sample, by plain PyTorch."""
    model = trainapp.load(trained, which="last").eval()
    model.load_state_dict(runs.saved(trained, 20)[weights])
    with torch.no_grad():
        logits = model(Digits("val").__getitems__(range(360))["inputs"])
    probability, prediction = torch.softmax(logits, -1).max(-1)
    return pytest.approx(probability.tolist(), rel=1e-4), prediction.tolist()


def require_same(found, trained):
    """One prediction of each sample, by the average of the weights, not by the weights themselves."""
    probability, prediction = expected(trained, "average")
    assert [line["index"] for line in found] == list(range(360))
    assert [line["prediction"] for line in found] == prediction
    assert [line["probability"] for line in found] == probability
    assert [line["probability"] for line in found] != expected(trained, "model")[0]


def words(trained, number):
    """A command of the page, after `python -m trainapp`, with a run."""
    return [word.replace("RUN", str(trained)) for word in commands(PAGE)[number][3:]]


@pytest.mark.slow
def test_the_command_line(tmp_path, trained):
    """Without a word about model and data; the file appears as a whole."""
    done = run_cli(*words(trained, 0), "hydra.run.dir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "predictions of 360 samples" in done.stderr
    require_same(lines(tmp_path / "predictions.jsonl"), trained)
    assert len({line["prediction"] for line in lines(tmp_path / "predictions.jsonl")}) > 5
    assert {path.name for path in tmp_path.iterdir()} == {"predictions.jsonl", "out"}
    shown = done.stdout + done.stderr  # of a training run alone
    assert not any(word in shown for word in ("resumed", "steps per epoch", "eval accuracy", "TensorBoard"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".hydra", "trainapp.log"}


def test_the_best_checkpoint_and_the_training_split(tmp_path, trained):
    """The page's second command."""
    resume, *chosen = [word for word in words(trained, 1) if not word.startswith(("mode=", "predict.output="))]
    found = predict(tmp_path, resume.partition("=")[2], *chosen)
    assert len(found) == 1437
    assert result(trained)["best_step"] == 10
    assert found == predict(tmp_path, runs.checkpoint(trained, 10), "predict.split=train")
    assert found != predict(tmp_path, trained, "predict.split=train")


@pytest.mark.slow
def test_an_interrupted_process_is_continued(tmp_path, trained):
    """By the same command, with another batch size: nothing is predicted twice, and an unfinished line is cut off. A
    signal ends it after the batch at work, with the command that continues.
    """
    data = (*OWN, "data._target_=own_inference.Interrupted")
    command = ("mode=predict", f"checkpointing.resume={trained}", f"predict.output={tmp_path / 'p.jsonl'}", *QUIET)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/helpers")])}
    env |= {"SIGNAL_AT": "150", "SIGNAL": str(int(signal.SIGKILL))}
    killed = run_cli(*command, *data, "predict.batch_size=20", cwd=tmp_path, env=env)
    assert killed.returncode == -9, killed.stderr
    (partial,) = tmp_path.glob("p.jsonl.*.partial")
    assert not (tmp_path / "p.jsonl").exists()
    assert len(lines(partial)) == 140
    partial.write_text('{"kept": true, ' + partial.read_text()[1:] + '{"predic')
    env |= {"SIGNAL_AT": "250", "SIGNAL": str(int(signal.SIGTERM))}
    ended = run_cli(*command, *data, "predict.batch_size=7", cwd=tmp_path, env=env)
    assert ended.returncode == TO_BE_CONTINUED, ended.stderr
    assert "after the 140 rows in" in ended.stderr
    assert 240 <= len(lines(partial)) <= 252
    printed = shlex.split(ended.stdout.split("Resume with:\n")[1])
    assert set(printed) >= {*command, "predict.batch_size=7"}
    found = predict(tmp_path, trained, *data)
    assert found[0].pop("kept")
    require_same(found, trained)
    assert not list(tmp_path.glob("p.jsonl.*"))


@pytest.mark.slow
def test_memory_runs_out(tmp_path, trained, monkeypatch):
    """The size halves until it fits, after the lines that are written; each sample has one."""
    rows, sizes = module.Predictor.rows, []

    def fails(self, model, micro):
        sizes.append(micro.samples)
        if len(sizes) > 3 and micro.samples > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)")
        return rows(self, model, micro)

    monkeypatch.setattr(module.Predictor, "rows", fails)
    found = predict(tmp_path, trained, "predict.batch_size=64")
    require_same(found, trained)
    # One half tells that outputs have the samples first. Half after an error, a quarter after two in a row.
    assert sizes[:6] == [64, 32, 64, 64, 32, 8]
    assert max(sizes[5:]) <= 20
    assert len(list((tmp_path / "out/oom").glob("*.json"))) == 2


@pytest.mark.slow
def test_other_data_and_names_of_classes(tmp_path, trained):
    named = predict(tmp_path, trained, *OWN, "data._target_=own_inference.Named")
    assert {line["prediction_name"] for line in named if line["prediction"] == 3} == {"three"}
    unlabelled = predict(tmp_path, trained, *OWN, "data._target_=own_inference.Unlabelled")
    assert [line["prediction"] for line in unlabelled] == [line["prediction"] for line in named]
    assert len(predict(tmp_path, trained, "predict.split=train", "data.num_workers=0")) == 1437
    more = "+eval.more={_target_: trainapp.data.sets.digits.Digits, split: train}"
    assert len(predict(tmp_path, trained, more, "predict.split=more")) == 1437


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task=own_inference.Mean",), r"has shape \[10\]"),
        (("task=own_inference.Mean", "predict.batch_size=10"), r"its output for 5 samples has shape \[10\]"),
        (("task=own_inference.TimeFirst", "predict.batch_size=8"), r"its output for 4 samples has shape \[8, 4, 10\]"),
        (("predict.split=test",), "predict.split=test: there is no such data; choose val, train"),
        (("+eval.val={_target_: own_inference.Named}",), "eval.val.*: must consist of letters"),
        (("predict.output=/",), "predict.output=/: exists, and is not a file of rows"),
    ],
)
def test_one_message(tmp_path, trained, overrides, message):
    with pytest.raises(UserError, match=message):
        predict(tmp_path, trained, *OWN, *overrides)
    assert not (tmp_path / "p.jsonl").exists()


UNET = (*OWN, "data._target_=own_inference.Pixels", "model._target_=own_inference.UNet")


@pytest.mark.slow
def test_a_model_of_several_inputs_needs_a_task_that_predicts(tmp_path):
    pairs = (
        *runs.own_model("own_models.Pair"),
        "data=digits",
        "user_packages=[own_models]",
        "task=own_models.of_pairs",
    )
    runs.run(tmp_path / "run", *runs.TINY, *pairs, "train.max_steps=2", "every.save=2", "train.check_loss=false")
    with pytest.raises(
        UserError, match=r"Pair\.forward\(\) missing 1 required .* give the task a method `predict\(model, b"
    ):
        predict(tmp_path, tmp_path / "run", "user_packages=[own_models]")


@pytest.mark.parametrize("task", ["classification", "own_inference.per_pixel"])
def test_classes_of_pixels(tmp_path, task):
    """A segmentation: logits [B, classes, H, W]. Rows that do not count in the loss are predicted, too."""
    shown = ("callbacks=[predictions,confusion_matrix]", "every.eval=4")
    runs.run(tmp_path / "run", *UNET, f"task={task}", *shown)
    found = predict(tmp_path, tmp_path / "run", *OWN)
    model, data = trainapp.load(tmp_path / "run", which="last", user_packages=["own_inference"]), Pixels("val")
    with torch.no_grad():
        logits = model(data.images)
    probability, prediction = torch.softmax(logits, 1).max(1)
    assert [line["prediction"] for line in found] == prediction.tolist()
    assert torch.tensor([line["probability"] for line in found]).allclose(probability)
    rows = lines(tmp_path / "run/predictions/step_00000004.jsonl")
    assert [row["prediction"] for row in rows] == prediction[:8].tolist()
    assert [row["target"] for row in rows] == data.targets[:8].tolist()
    _, *table = (tmp_path / "run/confusion_matrix/step_00000004.csv").read_text().splitlines()
    counted = [[int(cell) for cell in line.split(",")[1:]] for line in table]
    of = data.targets
    expected = [[int(((of == i) & (prediction == j)).sum()) for j in range(3)] for i in range(3)]
    assert counted == expected
    if task == "classification":
        (evaluated,) = evaluations(tmp_path / "run")
        assert evaluated["accuracy"] == pytest.approx(sum(expected[i][i] for i in range(3)) / sum(map(sum, expected)))
        assert evaluated["loss"] == pytest.approx(F.cross_entropy(logits, of).item())


@pytest.mark.slow
def test_shapes_that_may_be_read_both_ways(tmp_path):
    """Eight classes of 8x8 pixels: a built-in task decides, and one of the user's own is asked."""
    cube = (*UNET, "+data.height=8", "+model.classes=8", "every.eval=4")
    runs.run(tmp_path / "run", *cube, "task=classification", "callbacks=predictions")
    images = Pixels("val", height=8).images
    with torch.no_grad():
        model = trainapp.load(tmp_path / "run", which="last", user_packages=["own_inference"])
        expected = model(images).argmax(1).tolist()
    assert [line["prediction"] for line in predict(tmp_path, tmp_path / "run", *OWN)] == expected
    shown = [row["prediction"] for row in lines(tmp_path / "run/predictions/step_00000004.jsonl")]
    assert shown == expected[:8]
    own = "task=own_inference.per_pixel"
    with pytest.raises(UserError, match=r"\[12, 8, 8, 8\].* dimension 1 or the last; .*return classes from a method"):
        predict(tmp_path, tmp_path / "run", *OWN, own)
    with pytest.raises(UserError, match=r"dimension 1 or the last; .*class_dim=1"):
        runs.run(tmp_path / "refused", *cube, own, "callbacks=predictions")
    runs.run(tmp_path / "given", *cube, own, "callbacks=predictions", "+metrics.predictions.class_dim=1")


@pytest.mark.parametrize(
    ("output", "targets", "expected"),
    [
        ((4, 3), (4,), -1),
        ((4, 4), (4,), -1),
        ((4, 1), (4,), None),  # the logit of yes or no: as classes, every sample would be of the only one
        ((4, 7, 3), (4, 7), -1),
        ((4, 3, 7), (4, 7), 1),
        ((4, 1, 7), (4, 7), None),
        ((4, 3, 5, 7), (4, 5, 7), 1),
        ((4, 5, 7, 3), (4, 5, 7), -1),
        ((4, 3, 2, 3), (4, 5, 7), None),
        ((4, 3), (4, 3), None),
    ],
)
def test_the_dimension_of_the_classes(output, targets, expected):
    assert dim_of_classes(torch.zeros(output), torch.zeros(targets, dtype=torch.int64)) == expected


class RandomPixels(nn.Module):
    """Looks at random pixels, the same for all samples: a draw without their dimension, as ProbSparse attention has."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear = nn.Linear(16, num_classes)

    def forward(self, inputs):
        pixels = torch.randint(64, (16,))
        return self.linear(inputs.flatten(1)[:, pixels])


def test_shared_draws_do_not_depend_on_the_batch_size(tmp_path):
    own = (*runs.own_model("test_predict.RandomPixels"), "data=digits", "user_packages=[test_predict]")
    runs.run(tmp_path / "run", *runs.TINY, *own, "every.save=4")
    package = "user_packages=[test_predict]"
    by_size = []
    for size in (43, 5):
        chosen = (package, f"predict.batch_size={size}")
        by_size.append(predict(tmp_path, tmp_path / "run", *chosen, output=f"{size}.jsonl"))
    first, second = by_size
    assert [line["prediction"] for line in first] == [line["prediction"] for line in second]
    assert [line["probability"] for line in first] == pytest.approx([line["probability"] for line in second])


class Diffuses:
    """A classification whose predictions are drawn in several steps, which its loss does not draw."""

    def __call__(self, model, batch):
        logits = model(batch["inputs"])
        return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}

    def predict(self, model, batch):
        logits = model(batch["inputs"])
        x = torch.randn(len(logits), 2, 3)
        for _ in range(3):
            x = 0.9 * x + 0.1 * torch.randn_like(x)
        return x


def test_draws_of_a_tasks_own_predict_do_not_depend_on_the_batch_size(tmp_path):
    """Before the first step, draws were learnt from the loss. Samples are the first dimension of its draws."""
    own = (*runs.MODELS["mlp"], "task=test_predict.Diffuses", "user_packages=[test_predict]")
    runs.run(tmp_path / "run", *own, "every.save=4")
    by_size = []
    for size in (43, 5):
        chosen = ("user_packages=[test_predict]", f"predict.batch_size={size}")
        rows = predict(tmp_path, tmp_path / "run", *chosen, output=f"{size}.jsonl")
        by_size.append([row["prediction"] for row in rows])
    first, second = map(torch.tensor, by_size)
    assert first.shape == (360, 2, 3)
    torch.testing.assert_close(first, second)
    assert len(first.flatten().unique()) == first.numel()  # each sample has its own


class DrawsByNumPy(Diffuses):
    """Its predictions are numbers of a generator that knows no samples."""

    def predict(self, model, batch):
        return torch.from_numpy(np.random.random(len(batch["inputs"])))


def test_numbers_of_batches_do_not_come_again_where_it_continues(tmp_path, monkeypatch):
    own = (*runs.MODELS["mlp"], "task=test_predict.DrawsByNumPy", "user_packages=[test_predict]")
    runs.run(tmp_path / "run", *own, "every.save=4")
    chosen = ("user_packages=[test_predict]", "predict.batch_size=40")
    write = RowFile.write
    written = []

    def write_two(self, rows):
        if len(written) == 2:
            raise OSError("injected")
        written.append(rows)
        write(self, rows)

    monkeypatch.setattr(RowFile, "write", write_two)
    with pytest.raises(OSError, match="injected"):
        predict(tmp_path, tmp_path / "run", *chosen)
    monkeypatch.setattr(RowFile, "write", write)
    rows = predict(tmp_path, tmp_path / "run", *chosen)
    numbers = [row["prediction"] for row in rows]
    assert len(set(numbers)) == len(numbers) == 360

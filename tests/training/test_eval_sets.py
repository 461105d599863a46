"""Several validation sets: each evaluated in turn, logged by name, and any of them the objective."""

import helpers
import own_hooks
import pytest
import runs
from faults import Fault
from harness import Recorded

from trainapp.data.eval_batches import EvalBatches
from trainapp.errors import UserError

MLP = (*runs.MODELS["mlp"], "every.eval=2")
TRAIN_SPLIT = "+eval.seen={_target_: trainapp.data.sets.digits.Digits, split: train}"
SHIFTED = "+eval.shifted={_target_: trainapp.data.sets.synthetic.SyntheticImages, image_shape: [1, 8, 8], val_size: 30}"
BOTH = (TRAIN_SPLIT, SHIFTED)


def test_each_is_evaluated_and_logged_by_its_name(tmp_path):
    runs.run(tmp_path / "one", *MLP)
    ended = runs.run(tmp_path / "three", *MLP, *BOTH)
    alone, lines = helpers.evaluations(tmp_path / "one"), helpers.evaluations(tmp_path / "three")
    names = {"loss", "accuracy"}
    assert [line["step"] for line in lines] == [2, 4]
    for line, other in zip(lines, alone, strict=True):
        assert set(line) - {"step", "samples"} == names | {f"{s}/{n}" for s in ("seen", "shifted") for n in names}
        assert {name: line[name] for name in names} == {name: other[name] for name in names}
    assert len({line["loss"] for line in lines} | {line["seen/loss"] for line in lines}) == 4
    tags = helpers.scalars(tmp_path / "three")
    assert set(tags["eval/seen/loss"]) == set(tags["eval/shifted/accuracy"]) == set(tags["eval/loss"]) == {2, 4}
    last = {name: value for name, value in lines[-1].items() if name not in ("step", "samples")}
    assert helpers.result(tmp_path / "three")["evaluation"] == pytest.approx(last)
    assert (ended.metric, ended.objective) == ("accuracy", last["accuracy"])
    trained = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("one", "three")]
    assert trained[0] == trained[1]


def test_mode_eval_prints_the_results_of_all_sets(tmp_path, capsys):
    runs.run(tmp_path / "run", *MLP, "train.max_steps=2", "every.save=2")
    capsys.readouterr()
    found = runs.run(tmp_path / "eval", *MLP, *BOTH, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    printed = capsys.readouterr().out.splitlines()
    assert len(found.evaluation) == 6
    assert printed[0].split()[:3] == ["eval", "accuracy", f"{found.objective:.4f}"]  # the objective first
    for name, value in found.evaluation.items():
        assert sum(line.split()[:3] == ["eval", name, f"{value:.4f}"] for line in printed) == 1


def test_out_of_memory_continues_where_it_was(tmp_path, monkeypatch):
    """In whichever set: those before it are not evaluated again, and each sample counts once."""
    overrides = (*MLP, *BOTH, "every.eval=4", "batch.eval_micro_size=90")
    runs.run(tmp_path / "a", *overrides)
    opened, from_sample = [], EvalBatches.from_sample
    noting = lambda own, *rest: opened.append(own) or from_sample(own, *rest)  # noqa: E731
    monkeypatch.setattr(EvalBatches, "from_sample", noting)
    recorded = Recorded(runs.configure(tmp_path / "b", *overrides), Fault("evaluate", 4, 45))
    assert len(recorded.failures) == 1
    names = [name for own in opened for name, batches in recorded.run.eval_sets.items() if own is batches]
    assert sorted(set(names)) == ["", "seen", "shifted"]
    assert names == sorted(names)  # in this order: none before the interrupted one is evaluated again
    assert len(names) == 4
    (a,), (b,) = (helpers.evaluations(tmp_path / name) for name in ("a", "b"))
    assert set(a) == set(b)
    assert all(b[name] == pytest.approx(a[name], rel=1e-6) for name in a)


def test_metrics_are_of_each_set_and_callbacks_of_all(tmp_path):
    """Sums that are not reset between sets would be those of all sets so far."""
    own_hooks.SEEN.clear()
    hooks = ("+metrics.mine={_target_: own_hooks.Correct}", "+callbacks.mine={_target_: own_hooks.Records}")
    chosen = (*MLP, *BOTH, *hooks, "callbacks=[confusion_matrix]", "every.eval=4", "user_packages=[own_hooks]")
    ended = runs.run(tmp_path, *chosen, "objective=max shifted/mine/total")
    (line,) = helpers.evaluations(tmp_path)
    sizes = {name: batches.samples for name, batches in runs.closed(tmp_path / "sizes", *chosen).eval_sets.items()}
    assert {line["mine/total"], line["seen/mine/total"], line["shifted/mine/total"]} == {*sizes.values()}
    assert ended.objective == line["shifted/mine/total"] == sizes["shifted"] == 30
    assert line["mine/share"] == pytest.approx(line["accuracy"])
    assert line["seen/mine/share"] == pytest.approx(line["seen/accuracy"])
    (seen,) = [call for call in own_hooks.SEEN if call[0] == "evaluation"]
    assert {"mine", "seen/mine", "shifted/mine", "seen/loss"} <= set(seen[2])
    tables = {path.name for path in (tmp_path / "confusion_matrix").glob("*.csv")}
    assert tables == {"step_00000004.csv", "seen_step_00000004.csv", "shifted_step_00000004.csv"}


def test_one_of_them_may_stop_the_run(tmp_path):
    """No evaluation improves by 10."""
    chosen = ("every.eval=1", "train.max_steps=9", "stopping.patience=2", "stopping.min_delta=10")
    ended = runs.run(tmp_path, *MLP, SHIFTED, *chosen, "stopping.metric=min shifted/loss")
    assert ended.steps == 3


def test_mode_eval(tmp_path):
    runs.run(tmp_path / "run", *MLP)
    out = tmp_path / "out"
    runs.run(out, *MLP, *BOTH, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    (line,) = helpers.evaluations(out)
    assert line["loss"] == helpers.evaluations(tmp_path / "run")[-1]["loss"]
    assert {"seen/loss", "shifted/loss"} < set(line)


def test_a_resumed_run_may_have_others(tmp_path):
    overrides = (*MLP, "train.max_steps=6")
    runs.run_until(tmp_path, 3, *overrides, TRAIN_SPLIT)
    runs.run(tmp_path, *overrides, *BOTH)
    lines = helpers.evaluations(tmp_path)
    assert [("shifted/loss" in line) for line in lines] == [False, True, True]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+eval.hard={_target_: os.system}", r"eval\.hard\._target_=os\.system: not among the packages"),
        (
            "+eval.hard={_target_: trainapp.data.sets.digits.Digits, augmnt: true}",
            r"eval\.hard\.augmnt: no such setting; did you mean 'augment'\?",
        ),
        ("+eval={a b: {_target_: os.system}}", r"eval\.a b=a b: must consist of letters, digits, _ and -"),
    ],
)
def test_mistakes(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path, *MLP, override)


def test_the_first_one_stays_the_objective(tmp_path):
    """Where the data has no split of its own, `auto` is of the first: another one has other numbers."""
    alone = ("user_packages=[own_models]", "data._target_=own_models.training_digits")
    runs.run(tmp_path, *MLP, *alone, SHIFTED, "every.save=2", "train.max_steps=2")
    assert helpers.result(tmp_path)["metric"] == "shifted/accuracy"
    assert runs.run(tmp_path, *MLP, *alone, SHIFTED, TRAIN_SPLIT).steps == 4
    ended = runs.run(tmp_path, *MLP, *alone, SHIFTED, "train.max_steps=6")
    assert ended.steps == 6


RECURRENT = (
    *runs.own_model("writing_models.Sums"),
    *("data={_target_: writing_models.Columns}", "task=writing_models.squares", "user_packages=[writing_models]"),
    *("batch.global_size=6", "every.eval=2", "train.check_loss=false", "objective=min loss"),
)


@pytest.mark.parametrize(
    ("settings", "samples", "rows"),
    [
        (("batch.eval_micro_size=auto",), 6, 3),
        pytest.param(("batch.eval_micro_size=5",), 5, 3, marks=pytest.mark.slow),
        (("+data.val_columns=1",), 6, 1),
        pytest.param(
            ("+model.width=6",), 6, 3, marks=pytest.mark.slow
        ),  # the number of hidden units is that of columns
    ],
)
def test_a_micro_batch_never_has_two_time_steps_of_a_sequence(tmp_path, caplog, settings, samples, rows):
    """Validation has fewer sequences than training: with a row for each, the state would be carried wrongly."""
    runs.run(tmp_path / "found", *RECURRENT, *settings)
    said = [text for text in caplog.messages if "per_sample_buffers" in text and "eval_micro_size" in text]
    caplog.clear()
    one_by_one = [text for text in settings if "eval_micro_size" not in text]
    runs.run(tmp_path / "set", *RECURRENT, *one_by_one, "batch.eval_micro_size=1")
    found, known = helpers.evaluations(tmp_path / "found"), helpers.evaluations(tmp_path / "set")
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in known], rel=1e-5)
    (text,) = said
    assert f"the first {samples} samples of the evaluation write to {rows} rows of model.hidden" in text
    assert text.endswith(f"as batch.eval_micro_size={rows} asks")
    assert "eval_micro_size" not in caplog.text
    assert helpers.metrics(tmp_path / "found")[-1]["batch/eval_micro_size"] == rows


@pytest.mark.parametrize(
    "settings", [("+data.val_columns=6",), ("+model.carries=false",), ("batch.eval_micro_size=3",)]
)
def test_samples_of_different_sequences_share_a_micro_batch(tmp_path, caplog, settings):
    """Or a model that carries no state in evaluation."""
    runs.run(tmp_path, *RECURRENT, *settings)
    assert "rows of model.hidden" not in caplog.text
    size = 3 if "batch.eval_micro_size=3" in settings else 6
    assert helpers.metrics(tmp_path)[-1]["batch/eval_micro_size"] == size


CHUNKS = (
    *runs.own_model("writing_models.Smooths"),
    *("data={_target_: writing_models.Chunks}", "task=writing_models.errors_of_chunks"),
    *(
        "user_packages=[writing_models]",
        "batch.global_size=6",
        "every.eval=3",
        "objective=min loss",
        "schedule=constant",
    ),
)


def test_a_set_keeps_its_samples_at_a_time_after_a_resume(tmp_path, caplog):
    """Six samples would be three chunks of each sequence, and then the fourth, which is shorter, beside the third. The
    state has one dimension.
    """
    lengths = ("train.max_steps=7", "train.max_steps=12")
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"
    runs.run(undisturbed, *CHUNKS, lengths[1])
    assert "2 rows of model.average" in caplog.text
    for length in lengths:
        runs.run(resumed, *CHUNKS, length)
    at_steps = {line["step"]: line["loss"] for line in helpers.evaluations(resumed)}
    for line in helpers.evaluations(undisturbed):
        assert at_steps[line["step"]] == pytest.approx(line["loss"], rel=1e-6)
    assert {line["batch/eval_micro_size"] for line in helpers.metrics(resumed)[3:]} == {2}

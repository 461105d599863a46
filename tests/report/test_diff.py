"""`trainapp diff`: which settings, logged values and weights of two runs differ, and the sentence about them."""

import json
import math
import shutil
import subprocess
import sys

import helpers
import pytest
import runs
from helpers import environment, run_cli, train

from trainapp.errors import UserError
from trainapp.report import diff, differences
from trainapp.report.diff import DIFFERENT, IDENTICAL, NOTHING_COMPARED
from trainapp.report.run_files import Curve
from trainapp.run import runner

pytestmark = pytest.mark.usefixtures("one_thread")
MLP = (*runs.MODELS["mlp"], "every.eval=2", "checkpointing.keep_last=9")
SCARCE = ("model.width=64", "train.max_steps=8", "batch.global_size=64", "batch.eval_micro_size=16")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of four steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("first") / "run"
    runs.run(folder, *MLP, "every.save=2")
    return folder


def shown(capsys, a, b, which=None) -> tuple[list[str], str, int]:
    """The lines of `trainapp diff`, its last sentence and its exit code."""
    capsys.readouterr()  # what the runs have printed
    code = diff.show(a, b, which)
    lines = capsys.readouterr().out.splitlines()
    return lines, lines[-1], code


def row(lines: list[str], name: str) -> list[str]:
    """The words of the first row with this name."""
    return next(line.split() for line in lines if line.split()[:1] == [name])


def test_the_same_run_again_is_identical(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP)
    lines, sentence, code = shown(capsys, first, tmp_path)
    assert sentence == "identical bit for bit: all logged values, weights and optimizer of step 4"
    assert code == IDENTICAL
    assert "  every.save  2 -> not set" in lines  # which changes no number
    assert "training: 4 steps logged by both, the last is 4" in lines
    assert "weights of step 4: 6 tensors equal bit for bit, 0 not" in lines
    assert not any("samples_per_second" in line or "memory/" in line for line in lines)


def test_another_seed_differs_from_the_first_logged_step_on(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP, "train.seed=1")
    lines, sentence, code = shown(capsys, first, tmp_path)
    assert sentence.startswith("different from step 1 on (loss, grad_norm, accuracy): look at the data")
    assert code == DIFFERENT
    assert "  train.seed  0 -> 1" in lines
    losses = [helpers.metrics(run)[0]["loss"] for run in (first, tmp_path)]
    relative = abs(losses[0] - losses[1]) / max(losses)
    assert row(lines, "loss")[:6] == ["loss", "step", "1", repr(losses[0]), repr(losses[1]), f"{relative:.2g}"]
    assert "weights of step 4: 0 tensors equal bit for bit, 6 not" in lines


def test_another_rate_differs_in_the_schedule_before_the_loss(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP, "optimizer.lr=0.002")
    lines, sentence, _ = shown(capsys, first, tmp_path)
    assert sentence == "different from step 1 on (lr): look at the learning rate and its schedule"
    assert "  optimizer.lr  0.003 -> 0.002" in lines
    assert row(lines, "lr")[:5] == ["lr", "step", "1", "0.003", "0.002"]
    assert row(lines, "loss")[:3] == ["loss", "step", "2"]


def test_another_update_is_named(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP, "optimizer.weight_decay=5")
    _, sentence, _ = shown(capsys, first, tmp_path)
    assert sentence.startswith("different from step 2 on (loss, grad_norm")
    assert "look at the update of step 1" in sentence


def test_where_steps_were_not_logged_the_cause_is_not_guessed(first, tmp_path, capsys):
    runs.run(tmp_path / "4", *MLP, "optimizer.weight_decay=5", "every.log=4")
    _, sentence, _ = shown(capsys, first, tmp_path / "4")
    assert sentence.endswith(": no earlier step was logged by both; rerun with every.log=1 to see the exact step")


def test_other_micro_batches_are_rounding_alone(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP, "batch.micro_size=5")
    lines, sentence, code = shown(capsys, first, tmp_path)
    assert sentence.startswith("the same up to rounding, ")
    assert 0 < float(sentence.rpartition(" ")[2]) < 1e-5
    assert code == DIFFERENT
    assert '  sizes by step  {"1": 16} -> {"1": 5}' in lines


def test_what_depends_on_the_micro_batch_is_the_cause(tmp_path, capsys):
    resnet = (*runs.MODELS["resnet"], "train.max_steps=2", "every.log=1", "batch.global_size=16")
    runs.run(tmp_path / "whole", *resnet)
    runs.run(tmp_path / "cut", *resnet, "batch.micro_size=4")
    _, sentence, _ = shown(capsys, tmp_path / "whole", tmp_path / "cut")
    assert (
        ": the sizes of the micro-batches differ from step 1 on, and in training, BatchNorm normalises each" in sentence
    )


def test_an_embedding_loss_whose_embed_mixes_samples_is_suspected(tmp_path, capsys):
    settings = (
        *(*runs.TINY, *runs.own_model("own_tasks.Net"), "data=digits", "train.check_loss=false", "every.eval=2"),
        *("user_packages=[own_tasks]", "task=own_tasks.MixesSamples", "train.max_steps=2"),
    )
    for size in (16, 4):
        runs.run(tmp_path / str(size), *settings, f"batch.micro_size={size}")
    runs.run(tmp_path / "seed", *settings, "batch.micro_size=4", "train.seed=1")
    lines, sentence, _ = shown(capsys, tmp_path / "16", tmp_path / "4")
    assert sentence.startswith("different from step 1 on (loss, grad_norm, own): ")
    assert "of the embedding loss, also at its embed and the model: a row must not depend on" in sentence
    assert (
        "  further state that differs: counts of steps and samples, or the objective and the best evaluation" in lines
    )
    _, sentence, _ = shown(capsys, tmp_path / "4", tmp_path / "seed")
    assert "look at the data" in sentence
    assert "embedding" not in sentence


# --- runs of which one was resumed

SIX = (*MLP, "train.max_steps=6")


def resumed(run_dir, *overrides, at=3, then=()):
    """A run that was resumed, then with other settings."""
    runs.run_until(run_dir, at, *overrides)
    runs.run(run_dir, *overrides, *then)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.run(folder, *SIX)
    return folder


def test_a_resumed_run_is_identical(whole, tmp_path, capsys):
    resumed(tmp_path, *SIX)
    lines, sentence, code = shown(capsys, whole, tmp_path)
    assert sentence == "identical bit for bit: all logged values, weights and optimizer of step 6"
    assert code == IDENTICAL
    assert any(line.startswith("B ") and line.endswith("finished, 6 steps, resumed after step 3") for line in lines)
    assert not any("resumes" in line for line in lines)


def test_other_sizes_after_a_resume_are_named_with_their_step(whole, tmp_path, capsys):
    resumed(tmp_path, *SIX, then=["batch.micro_size=5"])
    _, sentence, _ = shown(capsys, whole, tmp_path)
    assert sentence.startswith(
        "the same up to rounding, from step 4 on (loss); the sizes of the micro-batches differ from step 4 on; B was "
        "resumed after step 3; the largest relative difference"
    )


def test_a_difference_that_begins_with_a_resume_is_not_blamed_on_the_step_before(whole, tmp_path, capsys, monkeypatch):
    """The samples of step 4 are others: step 3, before the resume, is none of the causes."""
    runs.run_until(tmp_path, 3, *SIX)
    prepare = runner.prepare

    def with_other_samples(*arguments):
        session = prepare(*arguments)
        session.state.progress.consumed += 16
        return session

    monkeypatch.setattr(runner, "prepare", with_other_samples)
    runs.run(tmp_path, *SIX)
    _, sentence, _ = shown(capsys, whole, tmp_path)
    assert sentence.startswith("different from step 4 on (loss")
    assert sentence.endswith(
        ": B was resumed after step 3; all was equal up to step 3: look at what the resume changed, at state that is "
        "in no checkpoint, and at the samples of step 4"
    )


def test_a_lost_optimizer_is_seen_in_the_step_after_the_resume(whole, tmp_path, capsys, monkeypatch):
    runs.run_until(tmp_path, 3, *SIX)
    prepare = runner.prepare

    def with_other_moments(*arguments):
        session = prepare(*arguments)
        for state in session.state.optimizer.state.values():
            state["exp_avg"].zero_()
        return session

    monkeypatch.setattr(runner, "prepare", with_other_moments)
    runs.run(tmp_path, *SIX)
    _, sentence, _ = shown(capsys, whole, tmp_path)
    assert sentence.startswith("different from step 5 on (loss")
    assert ": B was resumed after step 3; look at the update of step 4 (the optimizer, its options)" in sentence


def test_small_differences_by_the_sizes_are_not_called_rounding(whole, tmp_path, capsys):
    """Where the runs know that results depend on the sizes. Sizes of later steps explain nothing."""
    for folder, size_of_step_5 in ((tmp_path / "a", 16), (tmp_path / "b", 8)):
        shutil.copytree(whole, folder)
        facts = helpers.result(folder)
        facts |= {"micro_schedule": {"1": 16, "5": size_of_step_5}, "depends_on_micro_batch": ["BatchNorm does"]}
        (folder / "result.json").write_text(json.dumps(facts))
    path = tmp_path / "b/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[4:]:
        line["loss"] *= 1 + 1e-6
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, sentence, _ = shown(capsys, tmp_path / "a", tmp_path / "b")
    assert sentence == (
        "different from step 5 on (loss): the sizes of the micro-batches differ from step 5 on, and BatchNorm does; "
        "within rounding (1e-06 at most)"
    )
    lines[2]["loss"] *= 1 + 1e-6
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, sentence, _ = shown(capsys, tmp_path / "a", tmp_path / "b")
    assert sentence.startswith(
        "the same up to rounding, from step 3 on (loss); the sizes of the micro-batches differ only from step 5 on; the"
    )


def test_rounding_is_by_the_dtype_in_which_the_runs_compute(whole, tmp_path, capsys):
    """Of fp64, a difference of fp32's size is none of rounding."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        shutil.copytree(whole, folder)
    path = tmp_path / "b/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def sentence_for(change, *computes_in):
        for name, dtype in zip("ab", computes_in, strict=True):
            recipe = json.loads((tmp_path / name / "recipe.json").read_text())
            recipe["precision"]["computes_in"] = dtype
            (tmp_path / name / "recipe.json").write_text(json.dumps(recipe))
        changed = [line | {"loss": line["loss"] * (1 + change)} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        return shown(capsys, tmp_path / "a", tmp_path / "b")[1]

    assert sentence_for(1e-6, "float64", "float64").startswith("different from step 1 on (loss)")
    assert sentence_for(1e-12, "float64", "float64").startswith("the same up to rounding")
    assert sentence_for(1e-6, "float64", "float32").startswith("the same up to rounding")
    assert sentence_for(1e-3, "float32", "float32").startswith("different")
    assert sentence_for(1e-3, "bfloat16", "float32").startswith("the same up to rounding")


def test_other_ranks_after_a_resume_are_named(whole, tmp_path, capsys):
    for folder in (tmp_path / "a", tmp_path / "b"):
        shutil.copytree(whole, folder)
    recipe = json.loads((tmp_path / "b/recipe.json").read_text())
    recipe["batch"]["ranks"] = 2
    recipe["resumes"] = [{"after_step": 3, "ranks": 2, "ranks_before": 1}]
    (tmp_path / "b/recipe.json").write_text(json.dumps(recipe))
    path = tmp_path / "b/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[3:]:
        line["loss"] *= 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, sentence, _ = shown(capsys, tmp_path / "a", tmp_path / "b")
    assert sentence.startswith(
        "different from step 4 on (loss): step 4 was computed by 1 rank in A, by 2 in B; B was resumed after step 3; "
    )


def test_a_setting_that_changes_little_is_not_called_rounding(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP, "optimizer.weight_decay=0.0501")
    _, sentence, _ = shown(capsys, first, tmp_path)
    assert sentence.startswith("different from step 2 on")
    assert sentence.endswith("these settings change the result: optimizer.weight_decay")


def test_a_run_with_retries_and_its_replay_are_identical(tmp_path, capsys):
    runs.run(tmp_path / "scarce", *MLP, *SCARCE, "memory.limit=190KB")
    ended = helpers.result(tmp_path / "scarce")
    assert ended["oom_restarts"] >= 1
    schedule = f"batch.micro_schedule='{json.dumps(ended['micro_schedule'])}'"
    runs.run(tmp_path / "replay", *MLP, *SCARCE, schedule)
    lines, sentence, code = shown(capsys, tmp_path / "scarce", tmp_path / "replay")
    assert sentence == "identical bit for bit: all logged values, weights and optimizer of step 8"
    assert code == IDENTICAL
    assert row(lines, "memory.limit")[1:] == ["190KB", "->", "not", "set"]
    assert row(lines, "OOM")[-3:] == [str(ended["oom_restarts"]), "->", "0"]


def test_tensors_of_another_shape_or_dtype_or_in_one_run_alone(first, tmp_path, capsys):
    runs.run(tmp_path / "wide", *MLP, "model.width=24")
    lines, _, code = shown(capsys, first, tmp_path / "wide")
    assert "  model.head.weight: shape (10, 16) -> (10, 24)" in lines
    assert code == DIFFERENT
    runs.run(tmp_path / "bf16", *MLP, "precision=bf16_pure", "optimizer=adamw_bf16")
    lines, _, _ = shown(capsys, first, tmp_path / "bf16")
    assert row(lines, "model.head.weight")[-3:] == ["float32", "->", "bfloat16"]
    runs.run(tmp_path / "average", *MLP, "train.ema=0.9")
    lines, sentence, code = shown(capsys, first, tmp_path / "average")
    assert any(line.startswith("  only in B: average.head.bias, average.head.weight") for line in lines)
    assert sentence == "different from step 2 on, in evaluations alone (loss, accuracy)"  # which use the average
    assert code == DIFFERENT


def test_evaluations_of_one_run_alone_are_named(tmp_path, capsys):
    """As far as both go: that of the end of a shorter run, which was extended, changes nothing in training."""
    constant = ("schedule.warmup=0", "schedule=constant")
    runs.run(tmp_path / "extended", *MLP, *constant, "train.max_steps=3")
    runs.run(tmp_path / "extended", *MLP, *constant)
    runs.run(tmp_path / "whole", *MLP, *constant)
    runs.run(tmp_path / "longer", *MLP, *constant, "every.eval=1", "train.max_steps=6")
    lines, sentence, code = shown(capsys, tmp_path / "extended", tmp_path / "whole")
    assert "  evaluated only in A: step 3" in lines
    assert not any(line.startswith("  evaluated only in B") for line in lines)
    assert sentence == "identical bit for bit: all logged values, weights and optimizer of step 4"
    assert code == IDENTICAL
    lines, _, _ = shown(capsys, tmp_path / "whole", tmp_path / "longer")
    assert "  evaluated only in B: steps 1, 3" in lines


def test_runs_of_different_lengths_and_the_step_to_compare(first, tmp_path, capsys):
    runs.run(tmp_path, *MLP, "train.max_steps=2", "schedule.warmup=0", "schedule=constant")
    runs.run(tmp_path / "longer", *MLP, "schedule.warmup=0", "schedule=constant", "every.save=2")
    lines, sentence, code = shown(capsys, tmp_path, tmp_path / "longer")
    assert sentence == "identical bit for bit as far as both go; A has trained 2 steps, B 4"
    assert code == DIFFERENT
    assert "weights of step 2: 6 tensors equal bit for bit, 0 not" in lines  # the newest that both have
    _, sentence, code = shown(capsys, tmp_path, tmp_path / "longer", 2)
    assert sentence == "identical bit for bit: all logged values, weights and optimizer of step 2"
    assert code == IDENTICAL
    lines, _, _ = shown(capsys, tmp_path, tmp_path / "longer", "best")
    best = [helpers.result(run)["best_step"] for run in (tmp_path, tmp_path / "longer")]
    assert any(line.startswith(f"weights of step {best[0]} in A and {best[1]} in B") for line in lines) == (
        best[0] != best[1]
    )
    with pytest.raises(UserError, match=r"--step 3: .* has no checkpoint of this step; it has: 2"):
        diff.show(tmp_path, tmp_path / "longer", 3)


def test_what_one_of_the_runs_lacks_is_said(first, tmp_path, capsys):
    runs.run(tmp_path / "unsaved", *MLP, "checkpointing=off")
    lines, sentence, code = shown(capsys, first, tmp_path / "unsaved")
    assert "weights: not compared, B has no checkpoint" in lines
    assert "settings: not compared, no file has the settings of both in the same form" in lines  # a run from Python
    assert sentence == "identical bit for bit in all logged values; the weights were not compared"
    assert code == IDENTICAL
    running = tmp_path / "running"  # in its third step, of which it has written half a line
    shutil.copytree(first, running)
    for name in ("result.json", "evaluations.jsonl", "checkpoints/best"):
        (running / name).unlink()
    shutil.rmtree(running / "checkpoints/step_00000004")
    text = (running / "metrics.jsonl").read_text().splitlines(keepends=True)
    (running / "metrics.jsonl").write_text("".join(text[:2]) + text[2][:30])
    lines, sentence, code = shown(capsys, first, running)
    assert any(line.startswith("B ") and line.endswith("not finished") for line in lines)
    assert "evaluations: not compared, no step was logged by both" in lines
    assert "micro-batches and retries: not compared, at least one run has not ended" in lines
    assert "weights of step 2: 6 tensors equal bit for bit, 0 not" in lines
    assert sentence == "identical bit for bit as far as both go; A has trained 4 steps, B 2"
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "metrics.jsonl").touch()
    _, sentence, code = shown(capsys, first, begun)
    assert sentence.startswith("nothing to compare")
    assert code == NOTHING_COMPARED


def test_damaged_checkpoints_are_not_compared(first, tmp_path, capsys, caplog):
    shutil.copytree(first, tmp_path / "run")
    (tmp_path / "run/checkpoints/step_00000004/values.pt").write_bytes(b"")
    lines, sentence, code = shown(capsys, first, tmp_path / "run")
    assert "step_00000004 is damaged" in caplog.text
    assert "weights of step 2: 6 tensors equal bit for bit, 0 not" in lines
    assert code == IDENTICAL
    with pytest.raises(UserError, match=r"--step 4: RUN=.*this checkpoint is damaged"):
        diff.show(first, tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000002")
    lines, sentence, _ = shown(capsys, first, tmp_path / "run")
    assert any(line.startswith("weights: not compared, RUN_B=") for line in lines)
    assert sentence.endswith("the weights were not compared")


def test_recipes_are_compared_where_both_have_one(first, tmp_path, capsys):
    for name in ("a", "b"):
        shutil.copytree(first, tmp_path / name)
    recipe = {"clip": 1.0, "optimizers": [{"class": "AdamW", "names": ["w"] * 40 + ["x"]}], "same": 1}
    (tmp_path / "a/recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "b/recipe.json").unlink()
    lines, _, _ = shown(capsys, tmp_path / "a", tmp_path / "b")
    assert "entries of the recipe: not compared, at least one run has no recipe.json" in lines
    recipe["optimizers"][0] |= {"class": "Muon", "names": ["w"] * 40 + ["y"]}
    (tmp_path / "b/recipe.json").write_text(json.dumps(recipe | {"clip": None}))
    lines, _, code = shown(capsys, tmp_path / "a", tmp_path / "b")
    title = lines.index("entries of the recipe that differ")
    rows = [line.split() for line in lines[title + 1 : title + 4]]
    assert rows[:2] == [["clip", "1.0", "->", "null"], ["optimizers.0.class", "AdamW", "->", "Muon"]]
    assert rows[2][0] == "optimizers.0.names"
    assert ('"x"]' in rows[2], '"y"]' in rows[2]) == (True, True)  # the end of a long value, where they differ
    assert code == IDENTICAL


def curve(values: dict[int, float]) -> Curve:
    made = Curve()
    for step, value in values.items():
        made.steps.append(step)
        made.values.append(value)
    return made


def test_logs_are_compared_in_common_steps_alone():
    a = {"loss": curve({1: 1.0, 2: math.nan, 3: 2.0, 4: 4.0}), "mine": curve({1: 1.0}), "lr": curve({2: 1.0, 4: 1.0})}
    b = {"loss": curve({2: math.nan, 4: 2.0, 6: 0.0}), "lr": curve({2: 1.0, 4: math.nan})}
    log = differences.logs(a, b)
    assert log.steps == [2, 4]
    assert log.last_steps == (4, 6)
    assert [(scalar.name, scalar.step) for scalar in log.scalars] == [("lr", 4), ("loss", 4)]  # the cause first
    assert [scalar.largest for scalar in log.scalars] == [math.inf, 0.5]
    assert (log.only_in_a, log.only_in_b, log.equal) == (["mine"], [], [])
    assert log.step_before(4) == 2
    assert differences.kind_of("lr/head") == differences.kind_of("generator/lr") == "lr"


# As a user meets it


@pytest.mark.slow
def test_on_the_command_line(tmp_path):
    settings = (*runs.TINY, *MLP)
    train(tmp_path / "a", *settings)
    train(tmp_path / "b", *settings, "optimizer.lr=0.002")
    done = run_cli("diff", "a", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1][:22]) == (0, "identical bit for bit:")
    done = run_cli("diff", "a", "b", "--step", "4", cwd=tmp_path)
    assert done.returncode == 1
    assert "  optimizer.lr  0.003 -> 0.002" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].startswith("different from step 1 on (lr)")
    assert not done.stderr
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name / "checkpoints")
    start = "import sys; sys.argv[1:] = ['diff', 'a', 'b']; from trainapp.__main__ import main"
    check = "\ntry:\n  main()\nexcept SystemExit as end:\n  assert end.code == 1 and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", start + check], cwd=tmp_path, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the directories of two runs"),
        (["empty", "empty", "empty"], "give the directories of two runs"),
        (["empty", "nowhere"], "nowhere: there is no such directory"),
        (["empty", "empty"], "not a run directory; give the directories of two runs"),
        (["empty", "empty", "--step", "last"], "last must be the step of a checkpoint, or best"),
        (["empty", "empty", "--stop"], "unrecognized arguments: --stop"),
    ],
)
def test_mistakes_are_one_message(tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    done = run_cli("diff", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout

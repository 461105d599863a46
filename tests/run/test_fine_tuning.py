"""A run that begins with another run's weights, or with its best or a named checkpoint."""

import helpers
import pytest
import runs
import torch

from trainapp.errors import UserError

MLP = (*runs.MODELS["mlp"], "optimizer.lr=0.05")
NEW = ("train.seed=5", "train.max_steps=3", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A finished run of 6 steps with a weight average."""
    run_dir = tmp_path_factory.mktemp("runs") / "first"
    runs.run(run_dir, *MLP, "train.max_steps=6", "train.ema=0.5", "every.save=3", "checkpointing.keep_last=9")
    return run_dir


def from_weights(path, *overrides):
    return (*MLP, *NEW, f"model.init_from={path}", *overrides)


def final(run_dir):
    """What a checkpoint has but the hints of the search, and its losses."""
    saved = runs.saved(run_dir, 3)
    del saved["sizes"]
    return saved, [(line["loss"], line["lr"]) for line in helpers.metrics(run_dir)]


def test_it_is_the_run_that_begins_with_the_exported_weights(first, tmp_path):
    """Bit for bit: its own seed, schedule, optimizer and progress. The weights are the average, as in an export."""
    runs.run(tmp_path / "export", *MLP, "mode=export", f"checkpointing.resume={first}")
    exported = f"model.init_from={tmp_path / 'export' / 'export' / 'model.safetensors'}"
    runs.run(tmp_path / "a", *MLP, *NEW, exported)
    runs.run(tmp_path / "b", *from_weights(first))
    assert runs.differences(final(tmp_path / "b"), final(tmp_path / "a")) == []
    assert final(tmp_path / "b")[0]["progress"]["step"] == 3
    assert min(rate for _, rate in final(tmp_path / "b")[1]) > 0
    runs.run(tmp_path / "c", *from_weights(runs.checkpoint(first, 3)))  # control: other weights are another run
    assert runs.differences(final(tmp_path / "c"), final(tmp_path / "a")) != []


def test_without_an_average_they_are_the_weights(first, tmp_path):
    runs.run(tmp_path / "plain", *MLP, "train.max_steps=2")
    run = runs.closed(tmp_path / "b", *from_weights(tmp_path / "plain", "train.ema=0.9"))
    assert runs.differences(run.state.tensors()["model"], runs.saved(tmp_path / "plain", 2)["model"]) == []
    assert runs.differences(run.state.tensors()["average"], runs.saved(tmp_path / "plain", 2)["model"]) == []
    saved = runs.saved(first, 6)
    assert runs.differences(saved["average"], saved["model"]) != []  # so that the test above told them apart


def test_interrupted_it_continues_with_its_own_checkpoint(first, tmp_path):
    overrides = from_weights(first)
    runs.run(tmp_path / "whole", *overrides)
    runs.run_until(tmp_path / "parts", 2, *overrides)
    run = runs.closed(tmp_path / "parts", *overrides)
    assert run.state.progress.step == 2
    runs.run(tmp_path / "parts", *overrides)
    assert runs.differences(final(tmp_path / "parts"), final(tmp_path / "whole")) == []


def test_another_head(first, tmp_path):
    data = ("data=synthetic_images", "data.image_shape=[1,8,8]", "data.num_classes=3", "data.size=64")
    with pytest.raises(UserError) as refused:
        runs.prepare(tmp_path, *from_weights(first, *data))
    assert str(refused.value).startswith(f"model.init_from={first}: the weights do not fit the model: 2")
    assert "model.init_strict=false" in str(refused.value)
    run = runs.closed(tmp_path, *from_weights(first, *data, "model.init_strict=false"))
    state, average = run.state.tensors()["model"], runs.saved(first, 6)["average"]
    assert torch.equal(state["layers.0.0.weight"], average["layers.0.0.weight"])
    assert state["head.weight"].shape[0] == 3


@pytest.mark.parametrize("end", ["train.max_steps=4", "train.max_steps=6"])
def test_everything_in_a_new_directory_needs_a_later_end(first, tmp_path, end):
    """Before, it ended at once and returned the other run's result: `step 6/4`."""
    named = (*MLP, "train.ema=0.5", f"checkpointing.resume={first}")
    with pytest.raises(UserError, match=rf"{end}: .*already trained 6 steps, .* set a later end .*init_from=RUN"):
        runs.prepare(tmp_path, *named, end)
    assert helpers.files(tmp_path) == set()
    assert runs.run(tmp_path, *named, "train.max_steps=7").steps == 7


def test_the_end_in_epochs(tmp_path):
    """An epoch that has begun is not over."""
    epochs = (*MLP, "train.max_steps=null", "batch.global_size=720")  # two steps each
    runs.run_until(tmp_path / "a", 3, *epochs, "train.max_epochs=3")
    named = f"checkpointing.resume={tmp_path / 'a'}"
    with pytest.raises(UserError, match=r"train\.max_epochs=1: .*already trained 1\.5 epochs"):
        runs.prepare(tmp_path / "b", *epochs, named, "train.max_epochs=1")
    assert runs.run(tmp_path / "b", *epochs, named, "train.max_epochs=2").steps == 4


def test_another_run_replaces_none_that_is_there(tmp_path):
    for name, rate in (("a", 0.5), ("b", 0.1)):
        runs.run(tmp_path / name, *MLP, f"optimizer.lr={rate}", "train.max_steps=2")
    longer = (*MLP, "optimizer.lr=0.1", "train.max_steps=4")
    with pytest.raises(UserError, match="has checkpoints of another run"):
        runs.prepare(tmp_path / "b", *longer, f"checkpointing.resume={tmp_path / 'a'}")
    own = tmp_path / "b" / "checkpoints" / "step_00000002"
    assert runs.run(tmp_path / "b", *longer, f"checkpointing.resume={own}").steps == 4
    assert runs.closed(tmp_path / "b", *longer, f"checkpointing.resume={own}").state.progress.step == 2


def test_the_same_command_continues_what_began_at_another_run(tmp_path):
    runs.run(tmp_path / "a", *MLP, "train.max_steps=2")
    given = (*MLP, "train.max_steps=6", f"checkpointing.resume={tmp_path / 'a'}")
    runs.run_until(tmp_path / "b", 4, *given)
    assert runs.closed(tmp_path / "b", *given).state.progress.step == 4


def test_an_end_before_the_runs_own_checkpoint(tmp_path):
    runs.run(tmp_path, *MLP, "train.max_steps=3")
    assert runs.run(tmp_path, *MLP, "train.max_steps=3").steps == 3
    with pytest.raises(UserError, match=r"train\.max_steps=2: .*step_00000003 has already trained 3 steps"):
        runs.prepare(tmp_path, *MLP, "train.max_steps=2")


@pytest.mark.parametrize(("named", "step"), [("best", 2), ("step_00000003", 3), (".", 4)])
def test_the_checkpoint_that_is_named(tmp_path, named, step):
    """The loss falls, so that with `max loss` the first evaluation is the best."""
    overrides = (*MLP, "every.eval=2", "every.save=1", "checkpointing.keep_last=9", "objective=max loss")
    runs.run(tmp_path / "a", *overrides, "train.max_steps=4")
    path = tmp_path / "a" / "checkpoints" / named
    run = runs.closed(tmp_path / "b", *overrides, "train.max_steps=6", f"checkpointing.resume={path}")
    assert run.state.progress.step == step
    assert runs.differences(run.state.tensors()["model"], runs.saved(tmp_path / "a", step)["model"]) == []
    other = 2 if step == 4 else 4
    assert runs.differences(run.state.tensors()["model"], runs.saved(tmp_path / "a", other)["model"]) != []


def test_another_objective_begins_without_a_best_value(tmp_path):
    """That of a loss says nothing of an accuracy."""
    overrides = (*MLP, "every.eval=2", "train.max_steps=6")
    runs.run_until(tmp_path / "a", 2, *overrides, "objective=max loss")
    named = f"checkpointing.resume={tmp_path / 'a'}"
    for objective, is_kept in (("max loss", True), ("max accuracy", False)):
        run = runs.closed(tmp_path / objective, *overrides, named, f"objective={objective}")
        assert (run.state.progress.best is not None) == is_kept


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"])
def test_several_ranks_begin_with_the_same_weights(first, tmp_path, strategy):
    overrides = (*runs.TINY, *from_weights(first), "train.max_steps=1")
    helpers.train(tmp_path / "one", *overrides)
    helpers.train(tmp_path / "two", *overrides, f"parallel={strategy}", "parallel.devices=2")
    helpers.train(tmp_path / "fresh", *runs.TINY, *MLP, *NEW, "train.max_steps=1")
    one, two, fresh = (helpers.metrics(tmp_path / name)[0]["loss"] for name in ("one", "two", "fresh"))
    assert two == pytest.approx(one, rel=1e-5)
    assert fresh != pytest.approx(one, rel=1e-2)

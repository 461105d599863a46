"""The step: gradients summed over micro-batches equal the big batch's; one clip and one schedule step per step."""

import weakref

import helpers
import pytest
import runs
import torch

from trainapp.losses import losses
from trainapp.training import loop

GPT = (*runs.MODELS["gpt"], "model.dropout=0.0")
CASES = {
    "mlp": (runs.MODELS["mlp"], losses.classification),
    "groupnorm": (
        ("model=resnet", "model.width=8", "model.norm=group", "data=synthetic_images", "data.image_shape=[1,16,16]"),
        losses.classification,
    ),
    "gpt": (GPT, losses.next_token),
    "padded": ((*GPT, "data.min_length=1"), losses.next_token),
}
CUTS = {
    "greedy": ("batch.micro_size=3",),  # 3, 3, 2, 2
    "steps": ("accumulation=fixed", "accumulation.steps=3"),  # 4, 4, 2
    "single": ("batch.micro_size=1",),
}


def mean_of_means(run, task):
    """A common mistake: the mean of the micro-batches' mean losses."""
    run.state.model.zero_grad()
    parts = list(run.batches.micro_batches(run.state.progress, [run.sizes.train.size]))
    for micro in parts:
        loss, count, _ = task(run.state.model, micro.data)
        (loss / count / len(parts)).backward()
    return runs.gradients(run.state.model)


@pytest.mark.parametrize(
    ("case", "cut"), [("mlp", "steps"), ("groupnorm", "greedy"), ("gpt", "single"), ("padded", "greedy")]
)
def test_accumulated_is_the_big_batch(prepare, case, cut):
    overrides, task = CASES[case]
    run = prepare(*overrides, *CUTS[cut], "batch.global_size=10", "train.grad_clip=null")
    loss, expected = runs.of_whole_batch(run, task)
    totals = runs.accumulate(run)
    norm = run.engine.clip(totals)
    assert runs.relative_error(runs.gradients(run.state.model), expected) < 2e-6
    assert float(norm) == pytest.approx(float(expected.norm()), rel=1e-5)
    assert totals.means()["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("case", "cut", "wrong"), [("mlp", "steps", 0.01), ("padded", "single", 0.1)])
def test_the_mean_of_means_is_not(prepare, case, cut, wrong):
    overrides, task = CASES[case]
    run = prepare(*overrides, *CUTS[cut], "batch.global_size=10", "train.grad_clip=null")
    _, expected = runs.of_whole_batch(run, task)
    assert runs.relative_error(mean_of_means(run, task), expected) > wrong


def test_the_last_partial_step_of_an_epoch(prepare):
    """Divided by the actual number of samples, not by that of a full step."""
    overrides, task = CASES["padded"]
    run = prepare(*overrides, "batch.micro_size=3", "train.grad_clip=null")
    run.state.progress.consumed = (run.batches.samples - 1) // 16 * 16
    left = run.batches.samples - run.state.progress.consumed
    assert 0 < left < 16
    _, expected = runs.of_whole_batch(run, task)
    runs.clip(run)
    actual = runs.gradients(run.state.model)
    assert runs.relative_error(actual, expected) < 2e-6
    assert runs.relative_error(actual * left / 16, expected) > 0.1
    loop.train_step(run)
    assert (run.state.progress.epoch, run.state.progress.consumed, run.state.progress.samples) == (1, 0, left)


def test_weights_after_training_do_not_depend_on_the_micro_batch(prepare):
    """Across the ends of two epochs; the reference's own rounding error is of the same size."""
    overrides = (*GPT, "data.min_length=2", "data.size=90", "train.max_steps=12", "optimizer=sgd", "optimizer.lr=0.1")
    ends = []
    for micro in (16, 5):
        run = prepare(*overrides, f"batch.micro_size={micro}")
        start = runs.weights(run.state.model)
        loop.train(run)
        ends.append(runs.weights(run.state.model))
        assert run.state.progress.epoch == 2
    moved = float((ends[0] - start).norm())
    assert moved > 0.1
    assert float((ends[1] - ends[0]).norm()) / moved < 1e-5


@pytest.mark.parametrize("micro", [16, 4])
def test_one_clip_of_the_whole_gradient(prepare, micro):
    clip = 0.05
    run = prepare(*runs.MODELS["mlp"], f"batch.micro_size={micro}", f"train.grad_clip={clip}")
    _, expected = runs.of_whole_batch(run, losses.classification)
    assert float(expected.norm()) > 2 * clip
    norm = runs.clip(run)
    clipped = runs.gradients(run.state.model)
    assert float(norm) == pytest.approx(float(expected.norm()), rel=1e-5)  # the norm before clipping is reported
    assert float(clipped.norm()) == pytest.approx(clip, rel=1e-4)
    assert runs.relative_error(clipped, expected * clip / expected.norm()) < 1e-4


def test_clipping_each_micro_batch_is_something_else(prepare):
    clip = 0.05
    run = prepare(*runs.MODELS["mlp"], "batch.micro_size=4", f"train.grad_clip={clip}")
    _, expected = runs.of_whole_batch(run, losses.classification)
    total = torch.zeros_like(expected)
    for micro in run.batches.micro_batches(run.state.progress, [4]):
        run.state.model.zero_grad()
        loss, count, _ = losses.classification(run.state.model, micro.data)
        (loss / count).backward()
        gradient = runs.gradients(run.state.model)
        total += gradient * min(1.0, clip / float(gradient.norm())) / 4
    assert runs.relative_error(total, expected * clip / expected.norm()) > 0.01


def test_the_first_of_steps_and_epochs_ends_the_run(tmp_path):
    for steps, reached in ((100, (6, 2 * 1437)), (5, (5, 1437 + 1000))):
        settings = ("batch.global_size=500", "train.max_epochs=2", f"train.max_steps={steps}")
        ended = runs.run(tmp_path / str(steps), *runs.MODELS["mlp"], *settings)
        assert (ended.steps, ended.samples) == reached


def test_cadences(tmp_path):
    """Logged, evaluated and saved when due, and at the end."""
    overrides = (
        "train.max_steps=7",
        "every.log=3",
        "every.eval=2",
        "every.save=64 samples",
        "checkpointing.keep_last=9",
        "objective=max loss",  # the first evaluation is the best, and saved, too
    )
    runs.run(tmp_path, *runs.MODELS["mlp"], *overrides)
    assert [line["step"] for line in helpers.metrics(tmp_path)] == [3, 6, 7]
    assert [line["step"] for line in helpers.evaluations(tmp_path)] == [2, 4, 6, 7]
    assert {int(path.name[-1]) for path in (tmp_path / "checkpoints").glob("step_*")} == {2, 4, 7}


@pytest.mark.parametrize("is_logged", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_what_a_metric_holds_is_gone_in_the_backward(prepare, is_logged, is_kept):
    """Such as the logits of all samples. Negative control: what another object holds is there."""
    found, kept = [], []

    def task(model, batch):
        loss, count, _ = losses.classification(model, batch)
        large = torch.full((2,), 3.0)
        if is_kept:
            kept.append(large)
        reference = weakref.ref(large)
        loss.register_hook(lambda gradient: found.append(reference() is not None))
        return loss, count, {"large": lambda: large.sum()}

    run = prepare(*runs.MODELS["mlp"], "batch.micro_size=8")
    run.engine.evaluated_task = losses.CheckedTask(task, "task=own")
    totals = runs.accumulate(run, is_logged)
    assert found == [is_kept] * 2
    assert totals.metrics == ({"large": (12.0, 16)} if is_logged else {})


def test_a_steps_first_micro_batch_has_no_gradients_beside_it(prepare, monkeypatch):
    """Its peak is not that of the others, also where FSDP keeps gradients elsewhere than in `p.grad`."""
    run, seen = prepare(*runs.MODELS["mlp"], "batch.global_size=12", "batch.micro_size=4", "train.max_steps=2"), []
    forward = run.engine.forward
    monkeypatch.setattr(run.engine, "forward", lambda *given: (seen.append(run.engine.accumulates), forward(*given))[1])
    loop.train(run)
    assert seen == [False, True, True] * 2

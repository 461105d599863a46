import typing

import pytest
import runs
import torch

from trainapp.config import schema
from trainapp.errors import TrainingStopped, UserError
from trainapp.optim.precision import MAX_SKIPPED, NonFiniteCheck, gradient_norm
from trainapp.training import loop

MLP = runs.MODELS["mlp"]


def poison(run, step):
    """Make one sample of the step after `step` others produce a non-finite loss."""
    data = run.batches.dataset
    progress = type(run.state.progress)()
    for _ in range(step):
        run.batches.advance(progress)
    index = run.batches.share(progress).numbers[3]
    name = "_shifted" if data.augment else "_images"
    pixels = getattr(data, name).copy()
    pixels[index] = float("nan")
    setattr(data, name, pixels)


@pytest.mark.parametrize("save", [True, False])
def test_a_bad_loss_stops_with_step_metric_and_checkpoint(tmp_path, save):
    run = runs.prepare(tmp_path, *MLP, "train.max_steps=8", "every.save=2" if save else "every.save=null")
    poison(run, 5)
    with pytest.raises(TrainingStopped) as caught:
        loop.train(run)
    run.tracker.close()
    message = str(caught.value)
    assert message.startswith("step 6: the loss is not finite (nan)")
    good = runs.checkpoint(tmp_path, 4) if save else "none"
    assert f"the last good checkpoint is {good}." in message
    assert "optimizer.lr" in message
    assert "train.nonfinite=skip" in message
    assert run.state.progress.step == 5
    assert all(torch.isfinite(p).all() for p in run.state.model.parameters())


def test_an_infinite_loss_may_be_that_of_a_ctc_loss():
    """A nan is not. On the old code the advice was that of a nan: lower rates and clipping."""
    check = NonFiniteCheck("stop", torch.device("cpu"), scaled=False)
    with pytest.raises(TrainingStopped, match=r"a CTC loss has it where a target is longer .*zero_infinity=True"):
        check.allows_update(0, float("inf"), 1.0, 1)
    with pytest.raises(TrainingStopped) as of_nan:
        check.allows_update(0, float("nan"), 1.0, 1)
    assert "CTC" not in str(of_nan.value)


def test_a_bad_gradient_under_a_good_loss_stops_too(tmp_path):
    run = runs.prepare(tmp_path, *MLP)
    run.state.model.head.bias.register_hook(lambda gradient: gradient * float("inf"))
    before = runs.weights(run.state.model)
    with pytest.raises(TrainingStopped, match=r"step 1: the gradient norm is not finite \((inf|nan)\)"):
        loop.train(run)
    run.tracker.close()
    assert torch.equal(runs.weights(run.state.model), before)


@pytest.mark.parametrize("case", ["mlp", "resnet"])
def test_skip_leaves_the_step_out(tmp_path, case):
    """Weights, buffers and optimizer stay bit-identical; the samples advance and the run continues."""
    run = runs.prepare(tmp_path, *runs.MODELS[case], "train.nonfinite=skip", "train.max_steps=6")
    poison(run, 2)
    for _ in range(2):
        loop.train_step(run)
    before = {k: v.clone() for k, v in run.state.model.state_dict().items()}
    moments = [s["exp_avg"].clone() for s in run.state.optimizer.state.values()]
    loop.train_step(run)
    assert (run.state.progress.step, run.state.progress.skipped, run.state.progress.samples) == (2, 1, 48)
    assert runs.differences(run.state.model.state_dict(), before) == []
    assert runs.differences([s["exp_avg"] for s in run.state.optimizer.state.values()], moments) == []
    loop.train(run)
    run.tracker.close()
    assert (run.state.progress.step, run.state.progress.samples) == (6, 16 * 7)
    assert all(torch.isfinite(v.float()).all() for v in run.state.model.state_dict().values())


def test_too_many_skipped_in_a_row_stop(tmp_path):
    run = runs.prepare(tmp_path, *MLP, "train.nonfinite=skip", "train.max_steps=6")
    loop.train_step(run)
    data = run.batches.dataset
    data._images = data._images * float("nan")
    with pytest.raises(TrainingStopped, match=rf"step 2: {MAX_SKIPPED} steps in a row were skipped.*debug=nonfinite"):
        loop.train(run)
    run.tracker.close()
    assert run.state.progress.skipped == MAX_SKIPPED


def test_the_norm_is_of_all_gradients_together():
    gradients = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    assert float(gradient_norm(gradients)) == 4.0
    assert float(gradient_norm([])) == 0.0


def guard(policy="stop", scaled=False, reads=True):
    built = NonFiniteCheck(policy, torch.device("cpu"), scaled, lambda: "checkpoints/step_7")
    built._reads_every_step = reads
    return built


def test_on_a_gpu_the_first_bad_step_is_remembered_until_checked():
    """The code path that does not wait for the device, exercised on the CPU."""
    watch, good, bad = guard(reads=False), torch.tensor(1.0), torch.tensor(float("nan"))
    assert watch.allows_update(3, good, good, good)
    watch.check()
    assert watch.allows_update(4, good, bad, good)
    assert watch.allows_update(5, bad, bad, 16)
    with pytest.raises(TrainingStopped, match=r"step 5: loss or gradients .* checkpoint is checkpoints/step_7"):
        watch.check()


def test_a_scaled_gradient_may_overflow():
    watch = guard(scaled=True)
    assert watch.allows_update(0, torch.tensor(1.0), torch.tensor(float("inf")), 16)
    with pytest.raises(TrainingStopped, match="the loss"):
        watch.allows_update(0, torch.tensor(float("inf")), torch.tensor(1.0), 16)


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan"), float("inf")])
def test_on_a_gpu_a_count_that_cannot_divide_is_remembered_until_checked(count):
    watch, good = guard(reads=False), torch.tensor(1.0)
    assert watch.allows_update(6, good, torch.tensor(float("nan")), torch.tensor(count))
    with pytest.raises(TrainingStopped, match=r"step 7: .* the count is 0, negative or not finite"):
        watch.check()
    assert not guard(reads=False).allows_update(6, good, good, 0)  # a number costs no waiting


def test_a_policy_without_an_action_is_refused():
    """On the old code every name that the schema allowed, other than stop, skipped steps."""
    for policy in typing.get_args(typing.get_type_hints(schema.Train)["nonfinite"]):
        assert guard(policy).policy == policy
    with pytest.raises(UserError, match=r"train\.nonfinite=warn: must be one of stop, skip"):
        guard("warn")

"""Parameter groups keep their own rates, or the schedule is refused before training."""

import math

import pytest
import runs
import torch
from helpers import metrics
from torch import nn
from torch.optim import lr_scheduler

from trainapp.config.durations import RunLength
from trainapp.errors import UserError
from trainapp.optim.own_rates import require_own_rates

RUN = RunLength(steps_per_epoch=5, global_size=16, total_steps=20)
MLP = (*runs.MODELS["mlp"], "user_packages=[test_own_rates]", "optimizer.lr=0.1")
GROUPS = "optimizer.groups=[{match: head, lr: 0.2}]"
GAN = (
    *("model._target_=zoo.gans.GAN", "data._target_=zoo.data.Vectors", "task=zoo.gans.distance"),
    *("user_packages=[zoo]", "oom.plan=false", "oom.remember=false", "train.max_steps=2"),
)


def target(name):
    return f"schedule._target_={name if '.' in name else f'torch.optim.lr_scheduler.{name}'}"


ONE_CYCLE = target("OneCycleLR")
REPLACED = {
    "OneCycleLR": ("OneCycleLR", "schedule.max_lr=0.5"),
    "CyclicLR": ("CyclicLR", "schedule.base_lr=0.01", "schedule.max_lr=0.5", "schedule.cycle_momentum=false"),
    "inside another": ("test_own_rates.warmed_one_cycle",),
    "constant": ("test_own_rates.fixed",),
    "after zeros": ("test_own_rates.fixed_after_zeros",),
    "beyond its end": ("OneCycleLR", "schedule.max_lr=0.5", "schedule.total_steps=7"),
    "after evaluations": ("test_own_rates.FixedPlateau",),
}
KEPT = {
    "StepLR": ("StepLR", "schedule.step_size=4"),
    "CosineAnnealingLR": ("CosineAnnealingLR", "schedule.T_max=4", "schedule.eta_min=0.01"),  # equal in every 8th
    "ReduceLROnPlateau": ("ReduceLROnPlateau",),
    "OneCycleLR of a list": ("OneCycleLR", "schedule.max_lr=[0.5,0.5,0.4,0.4]"),
    "CyclicLR from one rate": (  # equal in the first step
        "CyclicLR",
        "schedule.base_lr=0.01",
        "schedule.max_lr=[0.5,0.5,0.4,0.4]",
        "schedule.cycle_momentum=false",
    ),
    "from zero": ("test_own_rates.from_zero",),
    "zero for a while": ("test_own_rates.zero_for_a_while",),
    "from one rate": ("test_own_rates.FromOneRate",),
    "a factor": ("test_own_rates.rising",),
    "of the rates there are": ("test_own_rates.cycles_of_own_rates",),
}


def warmed_one_cycle(optimizer):
    """Inside a SequentialLR, whose first part multiplies the rates."""
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


class Fixed(lr_scheduler.LRScheduler):
    """One rate from a step on, and 0 before it."""

    def __init__(self, optimizer, first=0):
        self.first = first
        super().__init__(optimizer)

    def get_lr(self):
        return [0.3 * (self.last_epoch >= self.first) for _ in self.base_lrs]


def fixed(optimizer):
    return Fixed(optimizer)


def fixed_after_zeros(optimizer):
    return Fixed(optimizer, 5)


class FixedPlateau(lr_scheduler.ReduceLROnPlateau):
    """Follows evaluations from a rate of its own."""

    def __init__(self, optimizer, mode="min"):
        for group in optimizer.param_groups:
            group["lr"] = 0.3
        super().__init__(optimizer, mode)


class FromOneRate(lr_scheduler.LRScheduler):
    """A warm-up of four steps from the same rate to each group's own."""

    def get_lr(self):
        share = max(0, self.last_epoch - 4) / 4
        return [0.001 + (rate - 0.001) * min(1.0, share) for rate in self.base_lrs]


def from_zero(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: step / 20)


def zero_for_a_while(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 8))


def rising(step):
    return step / 20


def cycles_of_own_rates(optimizer):
    rates = [10 * group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=20)


def optimizer_of(rates):
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def check(tmp_path, name, *arguments, rates=(0.1, 0.1, 0.2, 0.2), run=RUN):
    config = runs.configure(tmp_path, *MLP, GROUPS, target(name), *arguments)
    require_own_rates(config, run, [optimizer_of(rates)])


@pytest.mark.parametrize("name", REPLACED)
def test_one_rate_for_groups_of_different_rates_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="all parameter groups the same rate"):
        check(tmp_path, *REPLACED[name])


@pytest.mark.parametrize("name", REPLACED)
def test_one_rate_for_groups_of_equal_rates_is_not(tmp_path, name):
    """Negative control: it is not the scheduler that is refused."""
    check(tmp_path, *REPLACED[name], rates=(0.1, 0.1))


@pytest.mark.parametrize("name", KEPT)
def test_rates_that_differ_in_any_step_are_accepted(tmp_path, name):
    check(tmp_path, *KEPT[name])


def test_a_run_without_an_end(tmp_path):
    run = RunLength(steps_per_epoch=5, global_size=16, total_steps=None)
    with pytest.raises(UserError, match=r"the same rate \(0\.3 at first\)"):
        check(tmp_path, "test_own_rates.fixed", run=run)
    check(tmp_path, "test_own_rates.FromOneRate", run=run)


def test_a_warm_up_before_it_hides_nothing(tmp_path):
    """The rates of a warm-up are those of the scheduler's first step, which may be equal."""
    warmup = ("schedule.warmup=18 steps",)
    check(tmp_path, *KEPT["CyclicLR from one rate"], *warmup)
    with pytest.raises(UserError, match="the same rate"):
        check(tmp_path, *REPLACED["CyclicLR"], *warmup)


def test_layer_decay_and_groups_with_one_cycle(tmp_path):
    """The message has what the list needs: the groups in order, and their rates."""
    own = (*MLP, "model.depth=2", "optimizer.layer_decay=0.5", "optimizer.groups=[{match: head, lr: 0.4}]")
    message = (
        "schedule._target_=torch.optim.lr_scheduler.OneCycleLR: it gives all parameter groups the same rate (0.02 at "
        "first), so that those of optimizer.layer_decay=0.5 and optimizer.groups have no effect (layer_1 0.05, "
        "head:layer_2 0.4, layer_1 0.05, head:layer_2 0.4); use schedule.max_lr=[...] with 4 rates, one per group in "
        "this order; or a schedule that multiplies the rates, such as schedule=cosine, or leave out the different rates"
    )
    with pytest.raises(UserError) as refused:
        runs.run(tmp_path / "run", *own, ONE_CYCLE, "schedule.max_lr=0.5")
    assert str(refused.value) == message
    assert not (tmp_path / "run").exists()


def of_two_updates(*rates):
    entries = zip(("discriminator", "generator"), ("discriminate", "generate"), rates, strict=True)
    return ", ".join(
        f"{{name: {name}, task: zoo.gans.{task}, parameters: [{name}], optimizer: {{lr: {rate}}}}}"
        for name, task, rate in entries
    )


def test_the_rates_of_two_updates(tmp_path):
    """One schedule holds for both."""
    own = (*GAN, ONE_CYCLE, "schedule.max_lr=0.05")
    message = r"those of updates\.0\.optimizer\.lr=0\.02 and updates\.1\.optimizer\.lr=0\.01 have no effect"
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path / "other", *own, f"updates=[{of_two_updates(0.02, 0.01)}]")
    runs.run(tmp_path / "same", *own, f"updates=[{of_two_updates(0.02, 0.02)}]")
    assert metrics(tmp_path / "same")[-1]["step"] == 2


def test_a_list_with_a_rate_per_group_is_trained(tmp_path):
    run = runs.prepare(tmp_path / "groups", *MLP, GROUPS)
    order = [group["initial_lr"] for group in run.state.optimizer.param_groups]
    run.close()
    peaks = ",".join(str(5 * rate) for rate in order)
    runs.run(tmp_path / "run", *MLP, GROUPS, ONE_CYCLE, f"schedule.max_lr=[{peaks}]")
    first, *_ = metrics(tmp_path / "run")
    assert (first["lr"], first["lr/head"]) == pytest.approx((0.5 / 25, 1.0 / 25))


def test_groups_without_rates_of_their_own_are_trained_as_before(tmp_path):
    groups = "optimizer.groups=[{match: head, weight_decay: 0.5}]"
    runs.run(tmp_path, *MLP, groups, ONE_CYCLE, "schedule.max_lr=0.5")
    assert [line["lr/head"] for line in metrics(tmp_path)] == [line["lr"] for line in metrics(tmp_path)]
    assert math.isclose(metrics(tmp_path)[0]["lr"], 0.5 / 25)


def test_only_training_is_refused(tmp_path):
    """An evaluation has no rates."""
    runs.run(tmp_path / "run", *MLP, GROUPS)
    own = (ONE_CYCLE, "schedule.max_lr=0.5", "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    runs.run(tmp_path / "eval", *MLP, GROUPS, *own)

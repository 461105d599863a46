"""Schedules: trainapp's shapes, functions of the step, torch's schedulers, and those that follow evaluations."""

import copy
import math
import re

import pytest
import runs
import torch
from helpers import evaluations, metrics
from pydantic import TypeAdapter
from torch import nn
from torch.optim import lr_scheduler

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.optim.schedules import build, for_optimizer
from trainapp.units import RunLength

RUN = RunLength(steps_per_epoch=5, global_size=16, total_steps=20)
LONG = RunLength(steps_per_epoch=10, global_size=32, total_steps=100)
MLP = (*runs.MODELS["mlp"], "user_packages=[test_schedules]", "optimizer.lr=0.1")
SCHEDULERS = {
    "StepLR": {"step_size": 4, "gamma": 0.5},
    "MultiStepLR": {"milestones": [3, 9], "gamma": 0.1},
    "ExponentialLR": {"gamma": 0.9},
    "ConstantLR": {"factor": 0.5, "total_iters": 6},
    "LinearLR": {"total_iters": 7},
    "PolynomialLR": {"total_iters": 10, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 20, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 6, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.5, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 20},
}


# They take functions or other schedulers, follow evaluations, or are bases.
OTHER_SCHEDULERS = {"LambdaLR", "MultiplicativeLR", "ChainedScheduler", "SequentialLR", "ReduceLROnPlateau"}
OTHER_SCHEDULERS |= {"LRScheduler", "_LRScheduler"}


def test_the_list_has_every_scheduler_of_torch():
    kinds = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type)}
    schedulers = {name for name in kinds if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    assert schedulers - OTHER_SCHEDULERS == SCHEDULERS.keys()


def at(steps, run=LONG, **settings):
    factor = build(schema.Schedule(**settings), run)
    return [factor(step) for step in steps]


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"shape": "linear"}, {0: 1, 25: 0.75, 50: 0.5, 99: 0.01, 100: 0}),
        ({"shape": "linear", "warmup": 20, "final": 0.5}, {20: 1, 60: 0.75, 100: 0.5}),
        ({"shape": "cosine"}, {0: 1, 25: (1 + HALF) / 2, 50: 0.5, 75: (1 - HALF) / 2, 100: 0}),
        ({"shape": "cosine", "warmup": 10, "final": 0.1}, {4: 0.5, 10: 1, 55: 0.55, 100: 0.1}),
        # 1 - sqrt over the last part: a quarter of the way through it the rate has halved
        ({"shape": "wsd", "warmup": 10, "decay": 20}, {9: 1, 10: 1, 50: 1, 80: 1, 85: 0.5, 100: 0}),
        ({"shape": "wsd", "decay": 20, "final": 0.2}, {85: 0.6, 100: 0.2}),
    ],
)
def test_shapes(settings, expected):
    assert at(expected, **settings) == pytest.approx(list(expected.values()))


@pytest.mark.parametrize(
    ("warmup", "steps"), [(4, 4), ("4 steps", 4), ("2 epochs", 20), ("320 samples", 10), ("5 percent", 5), (0, 0)]
)
def test_warm_up_in_every_unit(warmup, steps):
    factors = at(range(30), shape="constant", warmup=warmup)
    assert factors.index(1.0) == max(0, steps - 1)


def test_what_does_not_fit_into_the_run():
    with pytest.raises(
        UserError, match=r"schedule\.warmup=90 \(90 steps\) and decay \(20 steps\) exceed the run's 100"
    ):
        at([0], shape="wsd", warmup=90, decay="20 percent")
    with pytest.raises(UserError, match="exceed the run's 100 steps"):
        at([0], shape="cosine", warmup="11 epochs")


# torch's schedulers


def optimizers():
    """Two alike, with two groups of different rates."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.2}]
    return [torch.optim.AdamW(copy.deepcopy(groups)) for _ in range(2)]


def schedule(optimizer, name, run=RUN, warmup=0, direction="min", **arguments):
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    target = name if "." in name else f"torch.optim.lr_scheduler.{name}"
    settings = schema.Schedule(target=target, warmup=warmup, arguments=arguments)
    return for_optimizer(settings, run, optimizer, ["test_schedules"], direction)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_torchs_own_loop(name):
    """Of every group, and of betas where the scheduler changes those."""
    own, torchs = optimizers()
    given = schedule(own, name, **SCHEDULERS[name])
    scheduler = getattr(lr_scheduler, name)(torchs, **SCHEDULERS[name])
    for step in range(20):
        given.set_rates(own.param_groups, step)
        for group, expected in zip(own.param_groups, torchs.param_groups, strict=True):
            assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])
        torchs.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [
        (0, (0, 3, 3, 3, 4, 9, 9), [1, 1, 1, 1, 0.5, 0.25, 0.25]),  # a retried step does not advance it
        (4, range(9), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.5]),
    ],
)
def test_it_follows_the_applied_steps_after_the_warm_up(warmup, steps, expected):
    own, _ = optimizers()
    given = schedule(own, "StepLR", warmup=warmup, **SCHEDULERS["StepLR"])
    for step, factor in zip(steps, expected, strict=True):
        given.set_rates(own.param_groups, step)
        assert own.param_groups[0]["lr"] == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("stop", [1, 7])
def test_its_state_continues_it(name, stop):
    """The state of a scheduler, loaded into a new one, gives the rates of the one that continued."""
    first, second = optimizers()
    going, loaded = (schedule(own, name, warmup=3, **SCHEDULERS[name]) for own in (first, second))
    for step in range(stop):
        going.set_rates(first.param_groups, step)
    loaded.load_state_dict(going.state_dict())
    for step in range(stop, 20):
        for given, own in ((going, first), (loaded, second)):
            given.set_rates(own.param_groups, step)
        assert [group["lr"] for group in first.param_groups] == [group["lr"] for group in second.param_groups]


def test_the_length_of_the_run_is_filled_in():
    own, _ = optimizers()
    given = schedule(own, "OneCycleLR", max_lr=0.5)
    given.set_rates(own.param_groups, 19)
    assert own.param_groups[0]["lr"] == pytest.approx(0.5 / 25 / 1e4)
    with pytest.raises(UserError, match="schedule: Tried to step 21 times"):
        given.set_rates(own.param_groups, 21)


# Functions of one's own


def triangle(step, total_steps, low: float = 0.0):
    """Up to the middle of the run, and down again."""
    return low + (1 - low) * (1 - abs(2 * step / total_steps - 1))


class Halving:
    """Every so many steps."""

    def __init__(self, every: int):
        self.every = every

    def __call__(self, step):
        return 0.5 ** (step // self.every)


def sequence(optimizer, first: int):
    """Schedulers in a row, which need the optimizer."""
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, first), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [first])


def noam(step, warmup: float = 4000):
    """With a warm-up of its own."""
    return min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


class Delayed:
    def __init__(self, warmup):
        self.warmup = warmup

    def __call__(self, step):
        return float(step >= self.warmup)


def delayed(optimizer, warmup):
    return lr_scheduler.ConstantLR(optimizer, 0.1, warmup)


def head_first(optimizer, freeze_steps: int):
    """Of docs/training.md."""
    factors = []
    for group in optimizer.param_groups:
        is_head = group.get("label") == "head"
        factors.append(lambda step, is_head=is_head: float(is_head or step >= freeze_steps))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def one_for_each_setting(optimizer):
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])


def negative(step):
    return -1.0


def nothing(optimizer):
    return None


@pytest.mark.parametrize(
    ("own", "rates"),
    [
        (("triangle", "low=0.2"), [0.02, 0.06, 0.1, 0.06]),
        (("Halving", "every=2"), [0.1, 0.1, 0.05, 0.05]),
        (("sequence", "first=2"), [0.01, 0.01, 0.1, 0.05]),
    ],
)
def test_a_function_of_the_step_and_one_that_builds_schedulers(tmp_path, own, rates):
    name, argument = own
    runs.run(tmp_path, *MLP, f"schedule._target_=test_schedules.{name}", f"schedule.{argument}", "train.max_steps=4")
    assert [line["lr"] for line in metrics(tmp_path)] == pytest.approx(rates)


GROUPS = "optimizer.groups=[{match: head, lr: 0.02}]"


def test_groups_follow_schedules_of_their_own(tmp_path):
    own = ("schedule._target_=test_schedules.head_first", "schedule.freeze_steps=2")
    runs.run(tmp_path, *MLP, GROUPS, *own, "train.max_steps=4")
    lines = metrics(tmp_path)
    assert [line["lr/head"] for line in lines] == pytest.approx([0.02] * 4)
    assert [line["lr"] for line in lines] == pytest.approx([0, 0, 0.1, 0.1])


def test_a_schedule_for_another_number_of_groups_is_told_the_groups(tmp_path):
    with pytest.raises(UserError) as caught:
        runs.run(tmp_path, *MLP, GROUPS, "schedule._target_=test_schedules.one_for_each_setting", "train.max_steps=4")
    message = str(caught.value)
    assert (
        "Expected 4 lr_lambdas, but got 2. The optimizer's groups are, in order: (no pattern, weight_decay=" in message
    )
    assert "(head, weight_decay=0.0, tensors: 1)" in message


@pytest.mark.parametrize(
    ("name", "warmup", "factors"),
    [
        ("noam", 4, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5**-0.5]),
        ("noam", 0.25, [1.0, 2**-0.5, 3**-0.5]),  # it may be anything
        ("noam", None, [4000**-1.5, 2 * 4000**-1.5]),
        ("Delayed", 2, [0.0, 0.0, 1.0]),
        ("delayed", 2, [0.1, 0.1, 1.0]),
    ],
)
def test_a_target_with_a_parameter_warmup_gets_it(name, warmup, factors):
    """On the old code the program took it for a warm-up of its own, and the function kept its default."""
    node = {"_target_": f"test_schedules.{name}"} | ({"warmup": warmup} if warmup is not None else {})
    own, _ = optimizers()
    for group in own.param_groups:
        group["initial_lr"] = group["lr"]
    settings = TypeAdapter(schema.Schedule).validate_python(node)
    given = for_optimizer(settings, RUN, own, ["test_schedules"])
    assert given.warmup_steps == 0
    for step, factor in enumerate(factors):
        given.set_rates(own.param_groups, step)
        assert own.param_groups[0]["lr"] == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.warmup=soon", r"schedule\.warmup=soon: must be a number of steps, or like '2 epochs'"),
        ("schedule._target_=torch.optim.lr_scheduler.StepLR", r"schedule\.step_size: required, but not set"),
        ("schedule._target_=test_schedules.negative", r"for step 0 it returned -1\.0; it must return the factor"),
        ("schedule._target_=test_schedules.nothing", "must be one of torch's schedulers or return one, not a None"),
        ("every.eval=null", r"it follows evaluations, but every\.eval=null"),
        ("schedule.factor=2.0", r"schedule: Factor should be < 1\.0"),
    ],
)
def test_mistakes(tmp_path, override, message):
    plateau = () if "_target_" in override else ("schedule=plateau",)
    assert re.search(message, runs.refusal(tmp_path / "run", *MLP, *plateau, override))
    assert not (tmp_path / "run").exists()


# After evaluations

PLATEAU = ("schedule=plateau", "schedule.patience=0", "schedule.factor=0.5", "every.eval=1", "train.max_steps=6")
CONSTANT = (*MLP, "task=test_schedules.constant", "objective=min loss")


def constant(model, batch):
    """A loss that is the same at every evaluation."""
    logits = model(batch["inputs"])
    loss = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    return (loss if model.training else 0 * loss + len(logits)), len(logits), {}


def test_the_rate_falls_when_evaluations_do_not_improve(tmp_path):
    """The first evaluation is the best; from the second on, each halves the rate of the next step."""
    runs.run(tmp_path, *CONSTANT, *PLATEAU)
    assert [line["loss"] for line in evaluations(tmp_path)] == [1.0] * 6
    assert [line["lr"] for line in metrics(tmp_path)] == [0.1, 0.1, 0.05, 0.025, 0.0125, 0.00625]


def test_it_follows_the_direction_of_the_objective(tmp_path):
    """An accuracy that rises is an improvement: taken for a loss, it would reduce the rate."""
    own, _ = optimizers()
    rising = schedule(own, "ReduceLROnPlateau", direction="max", patience=0, factor=0.5)
    falling = schedule(optimizers()[0], "ReduceLROnPlateau", direction="min", patience=0, factor=0.5)
    for value in (0.1, 0.2, 0.3):
        rising.record_objective(value)
        falling.record_objective(value)
    assert rising.state_dict()["rates"] == [0.1, 0.2]
    assert falling.state_dict()["rates"] == [0.025, 0.05]


# OneCycleLR's constructor sets betas to where they begin; a checkpoint has those of its step.
ONE_CYCLE = (*MLP, "schedule._target_=torch.optim.lr_scheduler.OneCycleLR", "schedule.max_lr=0.5", "train.max_steps=6")


@pytest.mark.parametrize("own", [(*CONSTANT, *PLATEAU), ONE_CYCLE], ids=["plateau", "one cycle"])
def test_its_state_is_in_the_checkpoint(tmp_path, own):
    assert runs.differences(*runs.resumed(tmp_path, 3, *own)) == []
    whole, parts = ([line["lr"] for line in metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert parts == whole


def test_a_resumed_run_has_the_settings_of_its_own_command_line(tmp_path):
    """But for the rate, which continues."""
    runs.run_until(tmp_path / "a", 3, *CONSTANT, *PLATEAU)
    changed = ("schedule.factor=0.1", "optimizer.lr=0.2", f"checkpointing.resume={tmp_path / 'a'}")
    run = runs.prepare(tmp_path / "b", *CONSTANT, *PLATEAU, *changed)
    schedule = run.state.update.schedule
    run.close()
    assert schedule.state_dict()["rates"][0] == pytest.approx(0.1 / 4)  # two reductions so far
    schedule.record_objective(1.0)
    assert schedule.state_dict()["rates"][0] == pytest.approx(0.01 / 4)


def test_a_longer_run_has_the_phases_of_its_length():
    """A rate that followed those of the shorter run would rise again, or be negative."""
    shorter, _ = optimizers()
    before = schedule(shorter, "OneCycleLR", max_lr=0.5, total_steps=8)
    before.set_rates(shorter.param_groups, 7)
    longer, whole = optimizers()[0], optimizers()[0]
    after, wanted = (schedule(own, "OneCycleLR", max_lr=0.5, total_steps=20) for own in (longer, whole))
    after.load_state_dict(before.state_dict())
    for step in range(8, 20):
        after.set_rates(longer.param_groups, step)
        wanted.set_rates(whole.param_groups, step)
        assert longer.param_groups[0]["lr"] == pytest.approx(whole.param_groups[0]["lr"])


class WithPhases(lr_scheduler.ConstantLR):
    """Keeps an object of its own in its state."""

    def __init__(self, optimizer):
        self.phase = nn.Identity  # a class
        super().__init__(optimizer)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path):
    chosen = (*runs.TINY, *MLP, "schedule._target_=test_schedules.WithPhases")
    runs.closed(tmp_path / "unsaved", *chosen, "checkpointing=off")
    with pytest.raises(UserError, match=r"the schedule's state\['scheduler'\]\['phase'\] is a builtins.type"):
        runs.closed(tmp_path / "saved", *chosen)

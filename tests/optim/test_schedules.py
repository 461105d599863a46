import math

import pytest

from trainapp.config import schema
from trainapp.config.durations import RunLength
from trainapp.errors import UserError
from trainapp.optim.schedules import build

RUN = RunLength(steps_per_epoch=10, global_size=32, total_steps=100)


def at(steps, run=RUN, **settings):
    factor = build(schema.Schedule(**settings), run)
    return [factor(step) for step in steps]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_is_the_same_for_all(shape):
    """1/w, 2/w, ..., 1 in the first w steps."""
    assert at(range(6), shape=shape, warmup=5)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert at([5], shape=shape, warmup=5) == [1.0]


def test_constant():
    assert at([0, 50, 99, 10_000], shape="constant") == [1.0] * 4


def test_linear():
    assert at([0, 25, 50, 75, 99, 100], shape="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0.01, 0])
    assert at([20, 60, 100], shape="linear", warmup=20, final=0.5) == pytest.approx([1, 0.75, 0.5])


def test_cosine():
    assert at([0, 25, 50, 75, 100], shape="cosine") == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    )
    assert at([10, 55, 100], shape="cosine", warmup=10, final=0.1) == pytest.approx([1, 0.55, 0.1])


def test_warmup_stable_decay():
    """1 - sqrt over the last part: a quarter of the way through it the rate has halved."""
    assert at([9, 10, 50, 80, 85, 100], shape="wsd", warmup=10, decay=20) == pytest.approx([1, 1, 1, 1, 0.5, 0])
    assert at([85, 100], shape="wsd", decay=20, final=0.2) == pytest.approx([0.6, 0.2])


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_beyond_the_end_it_stays_at_the_final_rate(shape):
    assert at([100, 150], shape=shape, final=0.25) == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(
    ("warmup", "steps"), [(4, 4), ("4 steps", 4), ("2 epochs", 20), ("320 samples", 10), ("5 percent", 5), (0, 0)]
)
def test_warm_up_in_every_unit(warmup, steps):
    factors = at(range(30), shape="constant", warmup=warmup)
    assert factors.index(1.0) == max(0, steps - 1)


def test_a_run_without_an_end():
    endless = RunLength(steps_per_epoch=10, global_size=32, total_steps=None)
    assert at([0, 10**6], endless, shape="constant", warmup=2) == [0.5, 1.0]
    with pytest.raises(UserError, match="schedule=cosine needs a run whose end is known"):
        at([0], endless, shape="cosine")
    with pytest.raises(UserError, match="5 percent needs a run whose end is known"):
        at([0], endless, shape="constant", warmup="5 percent")


def test_what_does_not_fit_into_the_run():
    with pytest.raises(
        UserError, match=r"schedule\.warmup=90 \(90 steps\) and decay \(20 steps\) exceed the run's 100"
    ):
        at([0], shape="wsd", warmup=90, decay="20 percent")
    with pytest.raises(UserError, match="exceed the run's 100 steps"):
        at([0], shape="cosine", warmup="11 epochs")


def test_percentages_fit_into_a_run_of_one_step():
    one = RunLength(steps_per_epoch=10, global_size=32, total_steps=1)
    assert at([0], one, shape="wsd", warmup="5 percent", decay="20 percent") == [1.0]

"""Random runs keep the promise: the result is the replay of `micro_schedule` bit for bit, with every sample once, or
the run ends with one clear message.

`TRAINAPP_FUZZ_CASES=2000 scripts/test --all tests/fuzz` runs more cases. Each shard has a seed of its own, so that the
cases are the same in every run; a failing one is shrunk and printed.
"""

import os

import pytest
from faults import Fault
from hypothesis import HealthCheck, given, seed, settings
from zoo.harness import leaving

from .cases import Case, Raise, Stop, cases
from .check import check

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = int(os.environ.get("TRAINAPP_FUZZ_CASES", "40"))
SHARD = 20  # cases in a test
SEED = 20261122
PATIENT = settings(max_examples=SHARD, deadline=None, database=None, suppress_health_check=list(HealthCheck))
PLAIN = {"every.eval": 2, "every.save": 1, "train.max_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(-(-CASES // SHARD)))
def test_random_runs_keep_the_promise(shard):
    @seed(SEED + shard)
    @PATIENT
    @given(cases())
    def holds(case: Case) -> None:
        check(case)

    holds()


# Each shape of story once, so that every run of the tests tells one of them.
STORIES = {
    "nothing happens": Case("dict", PLAIN),
    "memory runs out twice": Case("gumbel", PLAIN, [Fault("forward", 2, 3), Fault("backward", 3, 10)]),
    "the commit is torn": Case("dict", PLAIN, [Fault("commit", 3, 6)]),
    "a signal and an error": Case("mixup", PLAIN, [Stop(1), Fault("backward", 4, 8)]),
    "the data set fails": Case("unit weights", PLAIN, [Raise(2, 5)]),
    "another limit after a stop": Case("unit weights", PLAIN, [Stop(2)], [{"memory.limit": 60_000}]),
    "steps are skipped": Case(
        "dict", {**PLAIN, "train.nonfinite": "skip", "train.max_steps": 6}, [Fault("loss", 3, 0)]
    ),
    "spoiled samples are skipped": Case(
        "unused branch", {**PLAIN, "train.nonfinite": "skip", "data.spoiled": [3, 30]}, [Fault("backward", 3, 5)]
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_story(story):
    assert check(STORIES[story]).startswith("replayed")


def test_a_message_is_an_end():
    assert check(Case("dict", {**PLAIN, "model.freeze": ["nothing"]})) == "refused"
    assert check(Case("dict", {**PLAIN, "memory.limit": 100})) == "stopped"
    assert check(Case("unit weights", {**PLAIN, "data.spoiled": [0, 1, 2, 3, 4, 5, 6, 7]})) == "stopped"


def test_a_broken_transaction_fails():
    """What else may be broken: zoo/test_controls.py."""
    with leaving("gradients"), pytest.raises(AssertionError):
        check(STORIES["a signal and an error"])

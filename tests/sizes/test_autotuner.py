"""When cuDNN may time its algorithms. The switches exist without a GPU; nothing else here needs one."""

import pytest
import runs
import torch

from trainapp.data.batch import MicroBatch
from trainapp.parallel.ranks import SingleRank
from trainapp.sizes.autotuner import Autotuner
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training import loop


@pytest.fixture(autouse=True)
def switches_of_before():
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def switches() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def work(sizes: MicroBatchSizes, samples: int = 32, fails: bool = False, width: int = 4) -> None:
    """A step, or a batch of an evaluation, that is split by these sizes."""
    batch = MicroBatch(
        torch.zeros(samples, width), last=True, real=True, positions=range(samples), slice_samples=lambda a, b: None
    )
    sizes.split(batch, SingleRank())
    if fails:
        sizes.record_failure(SingleRank())
    else:
        sizes.record_success(SingleRank())


def test_from_the_first_proven_step_to_the_next_search():
    sizes, tuner, found = MicroBatchSizes(32), Autotuner(), []
    for fails in (False, False, False, False, False, True, False, False, False, False):
        found.append((tuner.follow(sizes, shape_is_steady=True), switches()[0]))
        work(sizes, fails=fails)
    # Three steps validate the size; the sixth fails, and the search for a size between 16 and 32 begins.
    assert found == [(False, False)] * 3 + [(True, True), (False, True), (False, True)] + [(False, False)] * 4
    for _ in range(40):
        tunes = tuner.follow(sizes, shape_is_steady=True)
        if tunes:
            break
        assert switches() == (False, True)
        work(sizes)
    assert sizes.search_has_ended
    assert tunes
    assert switches() == (True, False)


def test_an_evaluation_between_does_not_tune_the_training_anew():
    """The ranks' evaluations differ, but they must agree on the step in which they vote."""
    training, evaluation, tuner = MicroBatchSizes(32), MicroBatchSizes(64), Autotuner()
    for _ in range(3):
        work(training)
    assert tuner.follow(training, shape_is_steady=True)
    assert not tuner.follow(evaluation, shape_is_steady=True)
    assert switches()[0] is False
    assert not tuner.follow(training, shape_is_steady=True)
    assert switches()[0] is True


def test_nothing_is_timed_where_shapes_vary():
    """torch times each exact shape. Heuristics choose, until the latest batches have one shape; then it is timed."""
    sizes, tuner = MicroBatchSizes(32), Autotuner()
    found = []
    for width in (33, 34, 35, 36, 37, 37, 37, 37, 37, 38):  # of one bucket, whose size is validated after three
        tunes = tuner.follow(sizes, sizes.shape_is_steady)
        found.append((tunes, switches()))
        work(sizes, width=width)
    unsettled, heuristics, timed = (False, True), (False, False), (True, False)
    assert found == [(False, unsettled)] * 3 + [(False, heuristics)] * 5 + [(True, timed), (False, timed)]
    assert not tuner.follow(sizes, sizes.shape_is_steady)
    assert switches() == heuristics


def test_one_shape_on_all_ranks():
    """A rank whose own shapes are steady waits for the others: they vote in the step that times algorithms."""
    sizes, tuner = MicroBatchSizes(32), Autotuner()
    for _ in range(5):
        work(sizes)
    assert sizes.shape_is_steady
    assert not tuner.follow(sizes, shape_is_steady=False)
    assert switches() == (False, True)


def test_ranks_vote_in_the_step_that_times_algorithms(tmp_path):
    """It may need memory that has not been validated."""
    run, votes = runs.prepare(tmp_path, *runs.MODELS["mlp"], "train.max_steps=6"), []
    assert run.sizes.autotuner is None  # without CUDA
    run.sizes.autotuner = Autotuner()
    run.ranks.enable_votes = votes.append
    loop.train(run)
    run.close()
    assert votes == [True, True, True, False, True, False]

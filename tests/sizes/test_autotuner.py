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


def work(sizes: MicroBatchSizes, samples: int = 32, fails: bool = False) -> None:
    """A step, or a batch of an evaluation, that is cut by these sizes."""
    batch = MicroBatch(
        torch.zeros(samples, 4), last=True, real=True, positions=range(samples), slice_samples=lambda a, b: None
    )
    sizes.split(batch, SingleRank())
    if fails:
        sizes.record_failure(SingleRank())
    else:
        sizes.record_success(SingleRank())


def test_from_the_first_proven_step_to_the_next_search():
    sizes, tuner, found = MicroBatchSizes(32), Autotuner(), []
    for fails in (False, False, False, False, False, True, False, False, False, False):
        found.append((tuner.follow(sizes), switches()[0]))
        work(sizes, fails=fails)
    # Three steps validate the size; the sixth fails, and the search for a size between 16 and 32 begins.
    assert found == [(False, False)] * 3 + [(True, True), (False, True), (False, True)] + [(False, False)] * 4
    for _ in range(40):
        tunes = tuner.follow(sizes)
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
    assert tuner.follow(training)
    assert not tuner.follow(evaluation)
    assert switches()[0] is False
    assert not tuner.follow(training)
    assert switches()[0] is True


def test_ranks_vote_in_the_step_that_times_algorithms(tmp_path):
    """It may need memory that has not been validated."""
    run, votes = runs.prepare(tmp_path, *runs.MODELS["mlp"], "train.max_steps=6"), []
    assert run.sizes.autotuner is None  # without CUDA
    run.sizes.autotuner = Autotuner()
    run.ranks.enable_votes = votes.append
    loop.train(run)
    run.close()
    assert votes == [True, True, True, True, False, False]

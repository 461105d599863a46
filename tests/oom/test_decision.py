"""How each failure is recovered from: the rows of the table in docs/oom.md. Whole runs are in the other files."""

import pytest

from trainapp.oom.decision import RecoveryKind, decide
from trainapp.oom.failure import Failure
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.training.phase import Phase

IN_PLACE = RecoveryKind.IN_PLACE
FROM_CHECKPOINT = RecoveryKind.FROM_CHECKPOINT
RESTART = RecoveryKind.RESTART
END = RecoveryKind.END
BROKEN = "the NCCL communicator"


class TwoRanks(Ranks):
    """The second of two ranks."""

    rank = 1
    world_size = 2

    def __init__(self, votes_enabled: bool):
        self.votes_enabled = votes_enabled


VOTING = TwoRanks(votes_enabled=True)
NOT_VOTING = TwoRanks(votes_enabled=False)
NEVER_VOTING = TwoRanks(votes_enabled=False)
NEVER_VOTING.why_not_voting = "with parallel.vote_on_oom=never"


def failed(phase: Phase, lost: tuple[str, ...] = (), informed: bool = False, **facts: object) -> Failure:
    memory = {"requested": None, "used": 0, "limit": 0, "by_category": {}}
    state = {"lost": list(lost), "others_are_informed": informed}
    return Failure(step=1, phase=phase, module="", message="", trace="", **memory, **state, **facts)


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD, Phase.CLIP, Phase.COMMITTED, Phase.EVALUATE])
def test_a_single_process_recovers_in_place(phase):
    assert decide(failed(phase, is_local=True), SingleRank()).kind is IN_PLACE


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (failed(Phase.COMMIT, is_local=True), "the parameters may be half updated"),
        (
            failed(Phase.UPDATE_IN_BACKWARD, is_local=True),
            "optimizer.in_backward=true has updated some of the parameters",
        ),
        (
            failed(Phase.FORWARD, lost=("a", "b"), is_local=True),
            "the forward has written a, b, of which there was no copy (from now on there is)",
        ),
    ],
)
def test_changed_parameters_come_from_the_checkpoint(failure, reason):
    assert decide(failure, SingleRank()) == (FROM_CHECKPOINT, reason)


def test_ranks_that_vote_recover_in_place():
    assert decide(failed(Phase.FORWARD), VOTING).kind is IN_PLACE


def test_ranks_that_have_left_the_step_need_no_further_vote():
    """Asked again after the rollback, on the rank that failed and on the others."""
    for failure in (failed(Phase.FORWARD, informed=True), failed(Phase.GRADIENTS, by_peer=True)):
        assert decide(failure, NOT_VOTING).kind is IN_PLACE


def test_all_ranks_that_have_lost_parameters_return_to_the_checkpoint():
    for failure in (failed(Phase.FORWARD, ("a",), informed=True), failed(Phase.GRADIENTS, ("a",), by_peer=True)):
        assert decide(failure, VOTING).kind is FROM_CHECKPOINT


@pytest.mark.parametrize(
    ("failure", "ranks", "reason"),
    [
        (failed(Phase.COMMIT), VOTING, "inside the commit"),
        (failed(Phase.UNSCALE), VOTING, "ranks do not vote in the phase unscale"),
        (failed(Phase.FORWARD), NOT_VOTING, "ranks do not vote once a size is validated"),
        (failed(Phase.FORWARD), NEVER_VOTING, "ranks do not vote with parallel.vote_on_oom=never"),
        (failed(Phase.EVALUATE, ("a",), is_local=True), VOTING, "the forward has written a"),
        (failed(Phase.FORWARD, broken=BROKEN), VOTING, f"{BROKEN} is unusable from now on"),
    ],
)
def test_workers_restart_where_the_others_cannot_be_told_or_would_differ(failure, ranks, reason):
    assert decide(failure, ranks) == (RESTART, reason)


def test_a_broken_single_process_ends():
    failure = failed(Phase.FORWARD, is_local=True, broken=BROKEN)
    assert decide(failure, SingleRank()) == (END, f"{BROKEN} is unusable for the rest of this process")

"""Allocations that fail within a step without an error, because a library catches it and takes another way.

The search for a convolution's plan does (torch 2.13, aten/src/ATen/native/cudnn/Conv_v8.cpp): it skips a plan whose
workspace does not fit, runs the next, and keeps that one for the rest of the process. Its result may differ in the last
bits from that of a process with more memory, and it may be slow. A size at which an allocation fails therefore does not
fit, error or not. Two exceptions: the smallest size, since a slow step is better than none, and several ranks that hold
no votes, since all of them would have to restart.

The allocator counts on the host, when an operation is launched, so that reading its count waits for no kernel.
"""

import torch

from trainapp.parallel.ranks import Ranks
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training.session import Session


class SwallowedOutOfMemory(torch.OutOfMemoryError):
    """An allocation failed in the step, and what asked for it caught the error."""


def note_refused(session: Session) -> None:
    """Note how many allocations have been refused so far. In unvalidated and logged steps alone: reading takes time."""
    session.attempt.refused = session.memory.refused_allocations()


def refused_in_attempt(session: Session) -> int:
    """How many allocations the device's allocator has refused since `note_refused`."""
    return session.memory.refused_allocations() - session.attempt.refused


def require_all_allocated(session: Session, sizes: MicroBatchSizes, ranks: Ranks) -> None:
    """Call after each micro-batch of an unvalidated size. Raises SwallowedOutOfMemory if an allocation has failed in
    it, a smaller size is left to try, and the other ranks can be informed.

    sizes: those that the micro-batch was cut by. ranks: those that go forward together.
    """
    count = refused_in_attempt(session)
    if count <= 0 or not session.config.oom.enabled:
        return
    note_refused(session)
    if sizes.can_shrink and (ranks.world == 1 or ranks.votes_enabled):
        raise SwallowedOutOfMemory(
            f"{count} allocation{'s' * (count > 1)} failed in this micro-batch and the error was caught, probably by "
            "cuDNN, which then takes another algorithm"
        )
    why = "no votes are held" if sizes.can_shrink else "the micro-batch is the smallest"
    session.tracker.warn_once(
        f"step {session.state.progress.step + 1}: allocations fail and something catches the errors, probably cuDNN, "
        f"which then takes other algorithms; the step is not retried, since {why}. It may be slow, and its result may "
        "differ in the last bits",
        topic="swallowed errors",
    )

"""What a session takes over from the one before it in the same process."""

import own_tasks
import runs
import torch
import torch.nn.functional as F

from trainapp.parallel.ranks import SingleRank
from trainapp.run.prepare import SessionStart, prepare
from trainapp.signals import StopRequest


class CountedLoss(own_tasks.CountsCalls):
    """A loss that counts its calls in training; an object of this module, which outlives a session."""

    def __call__(self, model, batch):
        self.calls += torch.is_grad_enabled()
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets), {}


counted_loss = CountedLoss()


def test_a_run_that_begins_again_has_the_tasks_as_when_it_began(tmp_path):
    settings = ("user_packages=[test_prepare]", "task=test_prepare.counted_loss", "checkpointing.resume=none")
    config = runs.configure(tmp_path, *runs.STEPS_ONLY, *runs.MODELS["mlp"], *settings)
    first = prepare(SessionStart(config), StopRequest(), SingleRank())
    first.close()
    calls_at_start = counted_loss.calls
    counted_loss.calls += 5  # steps that the next session makes again

    next_start = SessionStart(config, memory=first.memory, task_states=first.recovery.task_states)
    second = prepare(next_start, StopRequest(), SingleRank())
    second.close()
    assert counted_loss.calls == calls_at_start
    assert second.recovery.task_states == first.recovery.task_states  # for the session after it

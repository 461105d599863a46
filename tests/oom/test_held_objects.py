"""Objects without a state dict, such as a replay buffer, and global variables: a retry, and what is said of them."""

import pytest
import torch
from faults import Fault
from harness import Recorded
from runs import own_model

from trainapp.state import held

from .conftest import operations, tiny

HELD = (*own_model("own_replays.Held"), "user_packages=[own_replays]", "data=digits", "objective=min loss")
REPLAYS = (*HELD, "task=own_replays.replays", "train.max_steps=6", "train.check_loss=false")


def pools_of(model):
    return [replay.facts() for replay in ([model.replay] if model.replay else model.pools)]


@pytest.mark.parametrize("model", ["Held", "InList"])
@pytest.mark.parametrize("step", [1, 5])
def test_a_retry_finds_a_replay_buffer_as_the_step_found_it(tmp_path, model, step):
    settings = (*REPLAYS, f"model._target_=own_replays.{model}")
    fault = Fault("backward", step, operations(*settings)["backward", step] * 3 // 4)  # of the second micro-batch
    recorded = Recorded(tiny(tmp_path / "a", *settings), fault)
    assert [failure.step for failure in recorded.failures] == [step]
    wanted = Recorded(tiny(tmp_path / "b", *settings, schedule={step: 4}))
    model_after, wanted_model = recorded.run.state.model, wanted.run.state.model
    assert pools_of(model_after) == pools_of(wanted_model)
    assert torch.equal(model_after.linear.weight, wanted_model.linear.weight)


def test_a_buffer_that_is_too_large_is_named_in_the_first_step(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(held, "MOST_COPIED_ITEMS", 10)
    Recorded(tiny(tmp_path, *REPLAYS))
    assert caplog.text.count("model.replay.samples, too large to be copied in every step") == 1
    assert "step 1: the forward writes model.replay.recent, model.replay.samples, too large" in caplog.text


def test_a_global_variable_that_the_forward_writes_is_named_before_the_first_step(tmp_path, caplog):
    (written,) = Recorded(tiny(tmp_path, *HELD, "task=own_replays.counts")).run.engine.draw_record.depends.values()
    assert written == (
        "the forward writes the global variable own_replays.CALLS, which is part of no checkpoint, and not restored "
        "when a step is retried; make it a buffer of the model, or return it from a state_dict"
    )
    assert caplog.text.count(written) == 1

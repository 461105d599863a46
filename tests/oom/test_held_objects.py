"""Objects without a state dict, such as a replay buffer, and global variables: a retry, and what is said of them."""

import own_counters
import own_replays
import pytest
import torch
from faults import Fault
from harness import Recorded
from runs import own_model

from trainapp.state import held

from .conftest import operations, tiny

HELD = (*own_model("own_replays.Held"), "user_packages=[own_replays]", "data=digits", "objective=min loss")
COUNTS = (*HELD, "task=own_replays.counts")
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
    (written,) = Recorded(tiny(tmp_path, *COUNTS)).run.engine.draw_record.depends.values()
    assert written == (
        "the forward writes the global variable own_counters.CALLS, the global variable own_replays.CALLS, which is "
        "part of no checkpoint, and restored when a step is retried only if it is a number, a string or a tuple of "
        "these; make it a buffer of the model, or return it from a state_dict"
    )
    assert caplog.text.count(written) == 1


@pytest.mark.parametrize("step", [1, 5])
def test_a_retry_and_the_trials_restore_global_counters(tmp_path, step):
    settings = (*COUNTS, "train.max_steps=6")
    fault = Fault("backward", step, operations(*settings)["backward", step] * 3 // 4)  # of the second micro-batch
    own_replays.CALLS = own_counters.CALLS = 0
    recorded = Recorded(tiny(tmp_path / "a", *settings), fault)
    assert [failure.step for failure in recorded.failures] == [step]
    counts = (own_replays.CALLS, own_counters.CALLS)
    own_replays.CALLS = own_counters.CALLS = 0
    Recorded(tiny(tmp_path / "b", *settings, "train.check_loss=false", schedule={step: 4}))
    assert counts == (own_replays.CALLS, own_counters.CALLS)


@pytest.mark.parametrize("is_tried", [True, False])
def test_an_iterator_from_which_a_forward_takes_items_is_named(tmp_path, caplog, is_tried):
    settings = () if is_tried else ("train.check_loss=false", "train.draws=device")
    Recorded(tiny(tmp_path, *HELD, "task._target_=own_replays.WithOtherRows", *settings))
    text = "the forward takes items from task.rows, an iterator, once per micro-batch, and nothing can put them back"
    assert caplog.text.count(text) == 1
    assert (f"step 1: {text}" in caplog.text) == (not is_tried)
    assert "the forward writes" not in caplog.text

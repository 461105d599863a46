"""What users' models and optimizers keep in unusual places: saved, and restored bit for bit, or refused."""

import foreign
import pytest
import runs
import torch
from torch import nn

from trainapp.checkpoint import model_state, optimizer_state
from trainapp.errors import UserError
from trainapp.train import loop

DIGITS = ("data=digits", "schedule=constant", "batch.micro_size=16", "user_packages=[foreign]")
MODELS = (
    "FilledByTheFirstForward",
    "RegisteredByTheFirstForward",
    "Growing",
    "SparseBuffers",
    "DroppedByTheFirstForward",
    "ParameterMadeByTheFirstForward",
    "OwnEntries",
    "CopiesFromAHook",
    "Viewed",
    "Unused",
)
NOT_FUSED = "optimizer.fused=false"


def overrides(model, optimizer=""):
    """A run of six steps."""
    own = (f"model._target_=foreign.{model}", "~model.width", "~model.depth", "~model.dropout", "train.max_steps=6")
    if not optimizer:
        return (*DIGITS, "model=mlp", *own)
    return (*DIGITS, "model=mlp", *own, f"optimizer._target_=foreign.{optimizer}", "~optimizer.betas", "~optimizer.eps")


def end(run_dir):
    """The last checkpoint without the state of the micro-batch search, a hint that must be proven again."""
    state = runs.saved(run_dir, 6)
    del state["sizes"]
    return state


def interrupted(run_dir, stop, *settings):
    runs.run_until(run_dir, stop, *settings)
    runs.run(run_dir, *settings)
    return end(run_dir)


@pytest.mark.parametrize("stop", [2, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 5))])
@pytest.mark.parametrize("model", MODELS)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, model, stop):
    runs.run(tmp_path / "a", *overrides(model))
    resumed = interrupted(tmp_path / "b", stop, *overrides(model))
    assert runs.differences(resumed, end(tmp_path / "a")) == []


@pytest.mark.parametrize(
    "stop", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("model", ["Linear", "Unused"])
def test_an_optimizer_with_plain_state_goes_on_bit_for_bit(tmp_path, model, stop):
    """Counts, lists and None, nested, late, shared between parameters, and options that the optimizer changes."""
    settings = overrides(model, "PlainState")
    runs.run(tmp_path / "a", *settings)
    resumed = interrupted(tmp_path / "b", stop, *settings)
    expected = end(tmp_path / "a")
    assert runs.differences(resumed, expected) == []
    assert expected["optimizer_values"]["state"]["linear.weight"]["step"] == 6
    assert expected["optimizer_values"]["groups"] == [{"rounds": 6}]


def resumed_weights(run_dir, *settings):
    run = runs.prepare(run_dir, *settings, "checkpointing.save=false", "every.save=null")
    loop.train(run)
    run.tracker.close()
    return run.state.tensors()["model"]


@pytest.mark.parametrize(
    ("model", "optimizer", "lose"),
    [
        ("OwnEntries", "", (model_state, "load_added_entries")),
        ("Linear", "PlainState", (optimizer_state, "follow")),
        ("CopiesFromAHook", "", (model_state, "own_tensors")),
    ],
)
def test_each_part_is_needed(tmp_path, monkeypatch, model, optimizer, lose):
    """Negative controls: a wrong variant is told from the right one by the weights it ends with."""

    def from_the_state_dict(model: nn.Module) -> dict:
        return {name: t for name, t in model.state_dict(keep_vars=True).items() if torch.is_tensor(t)}

    def only_tensors(model, optimizer, *rest):
        differences = right(model, optimizer, *rest)
        optimizer.param_groups[0]["rounds"] = 0
        for key, state in optimizer.state.items():
            state |= {"step": 0, "last": []} if torch.is_tensor(key) else {"norms": []}
        return differences

    settings = overrides(model, optimizer)
    runs.run(tmp_path / "a", *settings)
    expected = end(tmp_path / "a")["model"]
    runs.run_until(tmp_path / "b", 4, *settings)
    assert runs.differences(resumed_weights(tmp_path / "b", *settings), expected) == []
    wrong = {
        "load_added_entries": lambda *_: None,
        "own_tensors": from_the_state_dict,
        "follow": only_tensors,
    }[lose[1]]
    right = getattr(*lose)
    monkeypatch.setattr(*lose, wrong)
    if lose[1] == "own_tensors":
        runs.run_until(tmp_path / "c", 4, *settings)  # as it would be saved
        rounded = runs.saved(tmp_path / "c", 4)["model"]
        assert rounded["linear.weight"].dtype == torch.float16
        assert "mean" not in rounded
        return
    assert runs.differences(resumed_weights(tmp_path / "b", *settings), expected) != []


def test_a_buffer_that_is_none_by_now(tmp_path):
    run = runs.prepare(tmp_path, *overrides("DroppedByTheFirstForward"))
    run.state.model.first = None
    loop.save(run)
    run.tracker.close()
    again = runs.prepare(tmp_path, *overrides("DroppedByTheFirstForward"))
    again.tracker.close()
    assert again.state.model.first is None
    assert "first" in again.state.model._buffers


@pytest.mark.parametrize("model", ["FilledByTheFirstForward", "RegisteredByTheFirstForward", "Growing"])
def test_without_room_for_late_buffers_the_checkpoint_is_refused(tmp_path, monkeypatch, model):
    """Negative control: what happened before."""
    runs.run_until(tmp_path, 2, *overrides(model))
    monkeypatch.setattr(model_state, "follow", lambda *_: None)
    with pytest.raises(UserError, match="1 tensors differ"):
        runs.prepare(tmp_path, *overrides(model))


def test_late_buffers_of_another_model_are_not_invented(tmp_path):
    """The same names, but the model was not built as the saved one was."""
    runs.run_until(tmp_path, 2, *overrides("Growing"))
    with pytest.raises(UserError, match=r"model\.history \(2,\) instead of"):
        runs.prepare(tmp_path, *overrides("FixedHistory"))
    with pytest.raises(UserError, match=r"1 tensors differ: model\.history"):
        runs.prepare(tmp_path, *overrides("Linear"))


def test_entries_that_a_model_cannot_load_are_refused_before_it_trains(tmp_path):
    settings = overrides("EntriesNeverLoaded")
    with pytest.raises(
        UserError, match=r"holds calls, queue, which its load_state_dict does not take.*checkpointing=off"
    ):
        runs.prepare(tmp_path, *settings)
    assert runs.run(tmp_path, *settings, "checkpointing=off").steps == 6


def test_entries_that_are_taken_and_dropped_are_noticed(tmp_path):
    runs.run_until(tmp_path, 2, *overrides("EntriesLoadedIntoNothing"))
    with pytest.raises(UserError, match=r"step_00000002 does not fit.*does not restore calls, queue of its state dict"):
        runs.prepare(tmp_path, *overrides("EntriesLoadedIntoNothing"))


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_save(tmp_path):
    """When loading it would be too late."""
    settings = overrides("Linear", "ObjectState")
    with pytest.raises(UserError, match=r"state\['linear\.weight'\]\['object'\] is a builtins\.object, which"):
        runs.run(tmp_path, *settings)
    assert runs.run(tmp_path, *settings, "checkpointing=off").steps == 6


def test_another_optimizer_is_refused(tmp_path):
    """Also one whose state has other plain values only."""
    runs.run_until(tmp_path, 2, *overrides("Linear", "PlainState"))
    with pytest.raises(UserError, match=r"does not fit this configuration.*optimizer\.linear\.bias\."):
        runs.prepare(tmp_path, *overrides("Linear"))
    with pytest.raises(UserError, match=r"does not fit this configuration.*optimizer\.linear\.bias\.extra"):
        runs.prepare(tmp_path, *overrides("Linear", "OtherState"))


def test_a_replaced_parameter_is_named(tmp_path):
    with pytest.raises(UserError, match=r"trains 1 parameters that are no longer the model's.*\(10, 64\)"):
        runs.run(tmp_path, *overrides("Replacing"))


def test_nothing_of_this_in_an_ordinary_checkpoint(tmp_path):
    runs.run(tmp_path, *runs.MODELS["resnet"])
    values = runs.saved(tmp_path, 4)
    assert values["model_values"] == {"changed": {}, "added": [{}], "written": []}
    assert values["optimizer_values"]["shared"] == {}
    assert values["optimizer_values"]["groups"] == [{}, {}]
    assert not any(values["optimizer_values"]["state"].values())


def test_foreign_state_is_where_the_names_say():
    """The models do what their descriptions say, or the tests above would prove nothing."""
    inputs = torch.rand(3, 1, 8, 8)
    model = foreign.Growing(10)
    built = model_state.layout(model)
    model(inputs)
    assert model_state.changes(model, built)["history"]["is"] == ("buffer", [1], "torch.float32")
    assert set(model_state.added_entries(foreign.OwnEntries(10))) == {"queue", "calls"}
    assert model_state.added_entries(foreign.Viewed(10)) == {}
    assert model_state.added_entries(foreign.CopiesFromAHook(10)) == {}


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused(tmp_path):
    """Its other state would be lost without a word."""
    settings = overrides("Linear", "OwnProtocol")
    with pytest.raises(UserError, match=r"optimizer=OwnProtocol: its own state_dict\(\) is not called"):
        runs.prepare(tmp_path, *settings)
    assert runs.run(tmp_path, *settings, "checkpointing=off").steps == 6


def test_no_optimizer_of_torch_is_refused():
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            assert kind.state_dict is torch.optim.Optimizer.state_dict


def test_a_buffer_whose_elements_share_memory_is_refused(tmp_path):
    """It could be saved, but not loaded."""
    with pytest.raises(UserError, match=r"scale of the model: elements share memory.*expand\(\.\.\.\)\.clone\(\)"):
        runs.prepare(tmp_path, *overrides("Expanded"))
    assert runs.run(tmp_path, *overrides("Expanded"), "checkpointing=off").steps == 6

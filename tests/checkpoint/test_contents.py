"""What users' models and optimizers keep in their states: saved, and restored bit for bit, or named."""

import pytest
import runs
import torch
from runs import end

from trainapp.checkpoint import optimizer_state, state_dicts
from trainapp.errors import UserError
from trainapp.training import loop

DIGITS = ("data=digits", "schedule=constant", "batch.micro_size=16", "user_packages=[foreign,writing_models]")
DIGITS = (*DIGITS, "train.check_loss=false")  # a running mean that is also updated in evaluation is refused
NOT_SAVED = "a checkpoint does not hold what training changes in "


def overrides(model, optimizer=""):
    """A run of six steps."""
    own = (f"model._target_=foreign.{model}", "~model.width", "~model.depth", "~model.dropout", "train.max_steps=6")
    if not optimizer:
        return (*DIGITS, "model=mlp", *own)
    return (*DIGITS, "model=mlp", *own, f"optimizer._target_=foreign.{optimizer}", "~optimizer.betas", "~optimizer.eps")


@pytest.mark.parametrize("model", ["SparseBuffers", "OwnEntries", "NonPersistent", "Viewed", "Unused"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, caplog, model):
    assert runs.differences(*runs.resumed(tmp_path, 2, *overrides(model))) == []
    assert NOT_SAVED not in caplog.text


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("model", ["Linear", "Unused"])
def test_an_optimizer_with_plain_state_continues_bit_for_bit(tmp_path, model, stop):
    """Counts, lists and None, nested, late, shared between parameters, and options that the optimizer changes."""
    expected, resumed = runs.resumed(tmp_path, stop, *overrides(model, "PlainState"))
    assert runs.differences(resumed, expected) == []
    assert expected["optimizer_values"]["state"]["linear.weight"]["step"] == 6
    assert expected["optimizer_values"]["groups"] == [{"rounds": 6}]


@pytest.mark.parametrize(
    ("model", "optimizer", "lose"),
    [
        ("OwnEntries", "", (state_dicts.ModelState, "load_values")),
        ("NonPersistent", "", (state_dicts.ModelState, "buffers")),
        ("Linear", "PlainState", (optimizer_state, "prepare_optimizer")),
    ],
)
def test_each_part_is_needed(tmp_path, monkeypatch, model, optimizer, lose):
    """Negative controls: a run that loses it ends with other weights."""

    def resumed_weights():
        run = runs.prepare(tmp_path / "b", *settings, "checkpointing.save=false", "every.save=null")
        loop.train(run)
        run.tracker.close()
        return run.state.tensors()["model"]

    settings = overrides(model, optimizer)
    runs.run(tmp_path / "a", *settings)
    expected = end(tmp_path / "a")["model"]
    runs.run_until(tmp_path / "b", 4, *settings)
    assert runs.differences(resumed_weights(), expected) == []
    monkeypatch.setattr(*lose, lambda *_: {})
    if lose[1] == "prepare_optimizer":
        with pytest.raises(UserError, match="tensors differ"):  # its momentum is allocated late
            resumed_weights()
        return
    if lose[1] == "buffers":
        runs.run_until(tmp_path / "b", 5, *settings)  # as it would be saved
    assert runs.differences(resumed_weights(), expected) != []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("RegisteredByTheFirstForward", "inner.seen"),
        ("Counting", "calls"),
        ("Carrying", "states"),
        ("Expanded", "scale"),
    ],
)
def test_what_is_left_out_is_named_once_and_the_run_resumes(tmp_path, caplog, model, name):
    runs.run_until(tmp_path, 4, *overrides(model), "every.save=1")
    assert caplog.text.count(f"{NOT_SAVED}{name}: a resumed run starts") == 1
    caplog.clear()
    assert runs.run(tmp_path, *overrides(model)).steps == 6
    assert f"the checkpoint does not hold {name}, which training had changed" in caplog.text


def test_attributes_of_a_task_are_named_unless_it_has_a_state_dict(tmp_path, caplog):
    task = ("task=writing_models.Carries", "objective=min loss")
    runs.run(tmp_path / "a", *overrides("Linear"), *task, "every.save=2")
    assert caplog.text.count(f"{NOT_SAVED}task.history, task.states: a resumed run starts") == 1
    caplog.clear()
    runs.run(tmp_path / "b", *overrides("Linear"), "task=writing_models.QueueTask", "objective=min loss")
    assert NOT_SAVED not in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "named"), [("WrappedSGD", "optimizer.inner.state, optimizer.steps"), ("SharedSGD", ""), ("", "")]
)
def test_what_an_optimizer_holds_outside_its_state_dict_is_named(tmp_path, caplog, optimizer, named):
    own = (f"optimizer={{_target_: writing_models.{optimizer}, lr: 0.1}}",) if optimizer else ()
    runs.run(tmp_path, *overrides("Linear"), *own, "every.save=3")
    assert caplog.text.count(f"{NOT_SAVED}{named}: a resumed run starts") == bool(named)
    assert bool(named) or NOT_SAVED not in caplog.text


def test_numbers_of_torchs_own_layers_are_named(tmp_path, caplog):
    own = (*runs.own_model("writing_models.Slope"), *DIGITS, "train.max_steps=4", "every.save=2")
    runs.run(tmp_path, *own)
    assert caplog.text.count(f"{NOT_SAVED}act.negative_slope: a resumed run starts") == 1


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_save(tmp_path):
    """When loading it would be too late."""
    settings = overrides("Linear", "ObjectState")
    with pytest.raises(UserError, match=r"state\['linear\.weight'\]\['object'\] is a builtins\.object, which"):
        runs.run(tmp_path, *settings)
    assert runs.run(tmp_path, *settings, "checkpointing=off").steps == 6


def test_another_optimizer_or_another_form_of_its_state_is_refused(tmp_path):
    runs.run_until(tmp_path / "a", 2, *overrides("Linear", "PlainState"))
    resume = f"checkpointing.resume={tmp_path / 'a'}"
    with pytest.raises(UserError, match=r"it was saved with foreign\.PlainState, but this run has torch\.optim\.adamw"):
        runs.prepare(tmp_path / "b", *overrides("Linear"), resume)
    eight = ("optimizer=adamw_8bit", "model=mlp", "model.width=128", "data=digits")
    runs.run_until(tmp_path / "c", 2, *eight)
    with pytest.raises(UserError, match=r"AdamW \(8bit\), but this run has .*AdamW \(4bit\)"):
        runs.prepare(tmp_path / "d", *eight, "optimizer=adamw_4bit", f"checkpointing.resume={tmp_path / 'c'}")


def test_a_replaced_parameter_is_named(tmp_path):
    with pytest.raises(UserError, match=r"trains 1 parameters that are no longer the model's.*\(10, 64\)"):
        runs.run(tmp_path, *overrides("Replacing"))


def test_adapters_are_saved_without_their_base(tmp_path):
    """Without a tied weight of it, too."""
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    settings = (*runs.MODELS["gpt"], "adapter=lora", "train.max_steps=6")
    whole, parts = runs.resumed(tmp_path, 3, *settings)
    assert runs.differences(parts, whole) == []
    assert all("lora_" in name for name in whole["model"])


def test_changed_options_of_the_configuration_win(tmp_path):
    """Only what the optimizer itself has changed is its state: a resume with another decay or rate has that one."""
    runs.run_until(tmp_path / "a", 2, *runs.MODELS["mlp"])
    new = ("optimizer.weight_decay=0.5", "optimizer.lr=0.25", f"checkpointing.resume={tmp_path / 'a'}")
    run = runs.closed(tmp_path / "b", *runs.MODELS["mlp"], *new)
    options = [(group["weight_decay"], group["initial_lr"]) for group in run.state.optimizer.param_groups]
    assert options == [(0.5, 0.25), (0.0, 0.25)]
    assert all(float(state["step"]) == 2 for state in run.state.optimizer.state.values())


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused(tmp_path):
    """Its other state would be lost without a word."""
    settings = overrides("Linear", "OwnProtocol")
    with pytest.raises(UserError, match=r"optimizer=OwnProtocol: its own state_dict\(\) is not called"):
        runs.prepare(tmp_path, *settings)
    assert runs.run(tmp_path, *settings, "checkpointing=off").steps == 6
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            assert kind.state_dict is torch.optim.Optimizer.state_dict

"""Where no micro-batch fits, a run turns on techniques that leave the result the same, and goes on."""

import json
import logging
import re

import pytest
import runs
from faults import Fault
from harness import Recorded

from trainapp.errors import TrainingStopped, UserError
from trainapp.techniques.ladder import TurnedOn

from .conftest import MODELS, peak_of, tiny

GPT = (*MODELS["gpt"], "model.depth=4", "model.width=32", "model.context_length=128", "data.min_length=96")
GPT = (*GPT, "batch.global_size=8", "batch.micro_size=auto", "every.eval=null", "every.save=2")
SELECTIVE = "activation_checkpointing=selective"
FULL = "activation_checkpointing=full"
CHUNK = "memory.loss_chunk=auto"


def limit_between(folder, overrides, *, fits: tuple[str, ...], fails: tuple[str, ...]) -> int:
    """A limit under which a micro-batch of one sample fits with some settings, and not with others."""
    peak = peak_of(folder / "fits", (*overrides, *fits), 1)
    higher_peak = peak_of(folder / "fails", (*overrides, *fails), 1)
    assert peak + 2000 < higher_peak
    return (peak + higher_peak) // 2


def equal_to_a_run_that_knew(recorded: Recorded, folder, *overrides: str, **changes) -> list[str]:
    """How the run differs from an undisturbed one with its techniques and sizes from the start."""
    schedule = recorded.run.sizes.micro_schedule()
    known = Recorded(tiny(folder, *overrides, *recorded.run.turned_on.settings, schedule=schedule, changes=changes))
    assert not known.failures
    return runs.differences(recorded.record(), known.record())


@pytest.mark.parametrize(
    ("fits", "fails", "turned_on"),
    [
        ((SELECTIVE,), (), [SELECTIVE]),
        pytest.param((FULL,), (SELECTIVE,), [SELECTIVE, FULL], marks=pytest.mark.slow),
    ],
)
def test_it_climbs_until_a_sample_fits_and_is_a_run_that_knew(tmp_path, caplog, fits, fails, turned_on):
    caplog.set_level(logging.WARNING)
    limit = limit_between(tmp_path, GPT, fits=fits, fails=fails)
    climbed = Recorded(tiny(tmp_path / "run", *GPT, changes={"memory.limit": limit}))
    assert climbed.run.turned_on.settings == fits
    assert climbed.run.memory.peak <= limit
    lines = re.findall(r"no micro-batch fits; restarting from the start .*, with (\S+) turned on \(oom", caplog.text)
    assert lines == turned_on
    assert equal_to_a_run_that_knew(climbed, tmp_path / "known", *GPT) == []

    # What the files tell: the command in .hydra stays the user's.
    (entry,) = json.loads((tmp_path / "run" / "result.json").read_text())["turned_on"]
    assert (entry["attempt"], entry["settings"]) == (1, fits[0])
    assert entry["command"].endswith(f" {fits[0]} oom.techniques=none")
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["turned_on"] == fits[0]


def test_it_continues_from_the_last_checkpoint(tmp_path):
    """Nothing fits in step 4, after the checkpoint of step 2: it is a run resumed from there with the technique."""
    settings = (*runs.TINY, *GPT, "schedule=constant", "oom.grow=false", "batch.micro_size=8")
    fault = Fault("backward", 4, 1, times=4)  # with 8, 4, 2 and 1 samples
    climbed = Recorded(runs.configure(tmp_path / "run", *settings), fault)
    assert climbed.run.turned_on.by_attempt == {3: (SELECTIVE,)}
    schedule = climbed.run.sizes.micro_schedule()

    Recorded(runs.configure(tmp_path / "known", *settings, "train.max_steps=2"))
    config = runs.configure(tmp_path / "known", *settings, SELECTIVE, "checkpointing.resume=auto")
    known = Recorded(runs.changed(config, {"batch.micro_size": "auto", "batch.micro_schedule": schedule}))
    assert not known.failures
    assert runs.differences(climbed.record().state, known.record().state) == []


@pytest.mark.slow
def test_what_the_user_sets_stays(tmp_path):
    limit = limit_between(tmp_path, GPT, fits=(SELECTIVE,), fails=())
    for chosen in ("oom.techniques=none", "activation_checkpointing=none"):
        with pytest.raises(TrainingStopped, match="nothing is left to halve"):
            Recorded(tiny(tmp_path / chosen, *GPT, chosen, changes={"memory.limit": limit}))


@pytest.mark.slow
def test_what_ends_a_run_all_the_same_says_what_was_tried(tmp_path):
    limit = peak_of(tmp_path / "lowest", (*GPT, FULL, CHUNK), 1) - 2000
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path / "run", *GPT, changes={"memory.limit": limit}))
    text = str(caught.value)
    assert "nothing is left to halve" in text
    assert re.search(r"\(oom.techniques=same\): turned on, which was not enough: activation_checkpointing=\S+", text)


def test_a_commit_is_not_helped_by_techniques_of_the_forward(tmp_path):
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path, *GPT, "batch.micro_size=1"), Fault("commit", 2, times=9))
    assert "turned on" not in str(caught.value)


@pytest.mark.slow
def test_the_same_command_keeps_them_while_the_memory_is_the_same(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    limit = limit_between(tmp_path, GPT, fits=(SELECTIVE,), fails=())

    def trained(name, steps, limit):
        settings = (*runs.TINY, *GPT, "schedule=constant", "checkpointing.resume=auto", f"train.max_steps={steps}")
        config = runs.configure(tmp_path / name, *settings)
        return Recorded(runs.changed(config, {"memory.limit": limit}))

    whole = trained("whole", 6, limit)
    trained("parts", 4, limit)
    parts = trained("parts", 6, limit)
    assert not parts.failures
    assert f"{SELECTIVE} stays turned on, as in the checkpoint" in caplog.text
    assert runs.differences(parts.record().state, whole.record().state) == []

    unlimited = trained("parts", 8, None)
    assert f"{SELECTIVE}, which the run had turned on for 1 x cpu with memory.limit={limit}, is off for 1 x cpu" in (
        caplog.text
    )
    assert unlimited.run.turned_on.by_attempt == {1: (SELECTIVE,), 7: ()}


REFUSING = (*GPT, "model._target_=own_models.not_in_a_backward", "user_packages=[own_models]")


def test_a_technique_that_the_model_refuses_is_not_the_end(tmp_path, caplog):
    """Its blocks fail where they are recomputed: the logits in chunks are left."""
    wide = ("data.vocab_size=2048", "data.min_length=null", "model.context_length=256", "batch.global_size=2")
    limit = limit_between(tmp_path, (*GPT, *wide), fits=(CHUNK,), fails=())
    climbed = Recorded(tiny(tmp_path / "run", *REFUSING, *wide, changes={"memory.limit": limit}))
    assert climbed.run.turned_on.settings == (CHUNK,)


@pytest.mark.slow
def test_a_run_whose_model_refuses_all_ends_with_the_first_message(tmp_path, caplog):
    limit = limit_between(tmp_path, GPT, fits=(SELECTIVE,), fails=())
    with pytest.raises(TrainingStopped, match="nothing is left to halve"):
        Recorded(tiny(tmp_path / "run", *REFUSING, "memory.loss_chunk=null", changes={"memory.limit": limit}))
    assert "the model cannot run with activation_checkpointing=selective at step 1 in backward" in caplog.text
    assert "the model cannot run with activation_checkpointing=full at step 1 in backward" in caplog.text


@pytest.mark.slow
def test_modes_that_fit_only_with_the_loss_in_chunks_turn_it_on(tmp_path, caplog):
    """A plan knows that without: the run is not started to fail."""
    wide = (*GPT, "model.depth=1", "data.vocab_size=8192", "model.context_length=512", "data.min_length=null")
    lowest = peak_of(tmp_path / "lowest", (*wide, FULL, CHUNK, "batch.global_size=2"), 1)
    overrides = (*wide, "batch.global_size=2", "activation_checkpointing=auto", f"memory.limit={int(1.3 * lowest)}")
    planned = Recorded(runs.configure(tmp_path / "run", *runs.STEPS_ONLY, *overrides, "batch.micro_size=1"))
    assert not planned.failures
    assert planned.run.turned_on.by_attempt == {1: (CHUNK,)}
    assert "memory.loss_chunk=auto turned on (oom.techniques=same): the plan fits only with it" in caplog.text
    with pytest.raises(UserError, match="activation_checkpointing=auto: no micro-batch fits"):
        runs.prepare(tmp_path / "refused", *runs.STEPS_ONLY, *overrides, "oom.techniques=none")


OWN_GENERATOR = (*GPT, "model._target_=own_models.with_its_own_generator", "user_packages=[own_models]")


def test_nothing_is_recomputed_that_draws_from_a_generator_of_its_own(tmp_path):
    """The recomputation would draw other numbers, and the gradients be wrong without a message."""
    limit = limit_between(tmp_path, OWN_GENERATOR, fits=(SELECTIVE,), fails=())
    with pytest.raises(TrainingStopped, match="nothing is left to halve"):
        Recorded(tiny(tmp_path / "run", *OWN_GENERATOR, changes={"memory.limit": limit}))


def test_an_error_of_the_loss_in_the_first_step_is_the_users(tmp_path):
    single = (*GPT, "batch.global_size=1")  # with more samples, it may be an error of too few
    limit = limit_between(tmp_path, single, fits=(SELECTIVE,), fails=())
    own = ("task=own_tasks.FailsAfterAClimb", "user_packages=[own_tasks]")
    with pytest.raises(IndexError, match="a mistake of the user"):
        Recorded(tiny(tmp_path / "run", *single, *own, changes={"memory.limit": limit}))


@pytest.mark.slow
def test_what_the_command_line_sets_on_a_resume_is_not_in_the_record(tmp_path):
    limit = limit_between(tmp_path, GPT, fits=(SELECTIVE,), fails=())
    for settings in (("train.max_steps=2",), (FULL, "train.max_steps=4")):
        overrides = (*runs.TINY, *GPT, "schedule=constant", f"memory.limit={limit}", *settings)
        recorded = Recorded(runs.configure(tmp_path / "run", *overrides))
    assert recorded.run.turned_on.by_attempt == {1: (SELECTIVE,), 3: ()}
    assert recorded.run.config.activation_checkpointing.mode == "full"


def test_the_record_by_attempt_has_each_change_once():
    turned_on = TurnedOn((SELECTIVE,)).recorded(3).recorded(7)
    assert turned_on.by_attempt == {3: (SELECTIVE,)}
    assert TurnedOn((FULL,), turned_on.by_attempt).recorded(9).by_attempt == {3: (SELECTIVE,), 9: (FULL,)}
    assert TurnedOn((FULL,), turned_on.by_attempt).recorded(2).by_attempt == {2: (FULL,)}
    assert TurnedOn().recorded(1).checkpoint_entry() == {}
    assert TurnedOn.of_state_dict(json.loads(json.dumps(turned_on.state_dict()))) == turned_on

"""What a plan decides for a run: `activation_checkpointing=auto` before the model is built."""

import pytest
import runs

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner, process
from trainapp.planning.process import with_checkpointing_modes

GPT = (*runs.MODELS["gpt"], "model.depth=3", "train.device=cpu", "batch.micro_size=8", "every.eval=null")
AUTO = "activation_checkpointing=auto"


def plan(*overrides, only_modes=False):
    config = compose.from_command_line([*GPT, "plan.techniques=false", *overrides])
    return planner.plan(config, only_modes=only_modes)[0]


@pytest.mark.slow
def test_the_cheapest_modes_within_the_limit_are_chosen(tmp_path):
    most, least = (plan(f"activation_checkpointing={mode}")["peak_bytes"] for mode in ("none", "full"))
    limit = f"memory.limit={(most + least) // 2}"
    modes = plan(AUTO, limit, only_modes=True)["modes"]
    assert len(modes) == 3
    assert set(modes) != {"none"}
    assert modes[-1] == "none" or "full" not in modes
    assert plan(AUTO, only_modes=True)["modes"] == ["none"] * 3
    run = runs.prepare(tmp_path, *GPT, AUTO, limit)
    run.close()
    assert run.config.activation_checkpointing.modes == modes
    assert runs.run(tmp_path / "run", *GPT, AUTO, limit).oom_restarts == 0


def test_a_model_without_blocks_has_none_to_choose_for():
    own = ("model=mlp", "~model.width", "~model.depth", "~model.dropout", "model._target_=planned_models.Normed")
    config = compose.from_command_line([*own, "user_packages=[planned_models]", "data=digits", AUTO])
    with pytest.raises(UserError, match="activation_checkpointing=auto: Normed does not declare its blocks"):
        planner.plan(config, only_modes=True)


def test_given_modes_are_not_chosen_again():
    for given in ((AUTO, "activation_checkpointing.modes=[full,none,selective]"), ("activation_checkpointing=full",)):
        config = compose.from_command_line([*GPT, *given])
        assert with_checkpointing_modes(config, SingleRank()) is config


def test_no_modes_fit_within_a_tiny_limit():
    facts = plan(AUTO, "model.depth=1", "batch.micro_size=1", "memory.limit=1KiB", only_modes=True)
    assert facts["largest_micro_size"] == 0
    assert process._cannot_fit(facts)


@pytest.mark.slow
def test_a_run_that_cannot_fit_with_any_modes_is_not_started(tmp_path):
    lowest = min(
        plan(f"activation_checkpointing={mode}", "batch.micro_size=1")["peak_bytes"]
        for mode in ("none", "selective", "full")
    )
    facts = plan(AUTO, f"memory.limit={lowest // 2}", only_modes=True)
    assert (facts["largest_micro_size"], facts["micro_size"], facts["peak_bytes"]) == (0, 1, lowest)
    with pytest.raises(UserError, match=r"auto: no micro-batch fits .*lowest peak, of a micro-batch of 1, is .*traced"):
        runs.prepare(tmp_path / "refused", *GPT, AUTO, f"memory.limit={lowest // 2}")

    # Within the margin of the estimate, and with a smaller micro-batch than the configured one.
    for limit in (int(0.99 * lowest), int(1.02 * lowest)):
        runs.prepare(tmp_path / "started", *GPT, AUTO, f"memory.limit={limit}").close()


@pytest.mark.parametrize("change", [{"method": "measured"}, {"notes": ["the batches differ"]}, {"margin": 0.3}])
def test_only_a_trace_without_reservations_refuses_a_run(change):
    facts = {
        "method": "traced", "margin": 0.01, "notes": [], "largest_micro_size": 0, "peak_bytes": 200, "limit_bytes": 150
    }  # fmt: skip
    assert process._cannot_fit(facts)
    assert not process._cannot_fit(facts | {"largest_micro_size": None, "peak_bytes": None})
    assert not process._cannot_fit(facts | change)

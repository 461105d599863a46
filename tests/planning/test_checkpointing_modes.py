"""`activation_checkpointing=auto` is decided before the model is built."""

import pytest
import runs

from trainapp.config import compose
from trainapp.parallel.ranks import SingleRank
from trainapp.planning.checkpointing_modes import peaks_of, with_modes

GPT = (*runs.MODELS["gpt"], "model.depth=3", "train.device=cpu", "batch.micro_size=8")


def chosen(*overrides):
    config = compose.from_command_line([*GPT, *overrides])
    return with_modes(config, SingleRank()).activation_checkpointing.modes


@pytest.mark.slow
def test_the_cheapest_modes_within_the_limit_are_chosen(tmp_path):
    config = compose.from_command_line([*GPT, "activation_checkpointing=auto"])
    found = peaks_of(config, 1)
    assert found.blocks == 3
    assert found.micro_batch == 8
    assert found.peaks["full"] < found.peaks["selective"] < found.peaks["none"]
    between = (found.peaks["none"] + found.peaks["full"]) // 2
    modes = chosen("activation_checkpointing=auto", f"memory.limit={between}")
    assert "none" in (modes[-1], chosen("activation_checkpointing=auto")[0])
    assert set(modes) != {"none"}
    run = runs.run(tmp_path, *GPT, "activation_checkpointing=auto", f"memory.limit={between}", "every.eval=null")
    assert run.oom_restarts == 0


@pytest.mark.slow
def test_given_modes_are_not_chosen_again():
    modes = ["full", "none", "selective"]
    assert chosen("activation_checkpointing=auto", f"activation_checkpointing.modes=[{','.join(modes)}]") == modes
    assert chosen("activation_checkpointing=full") is None

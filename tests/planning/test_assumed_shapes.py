"""How much a mask may select that a model computes."""

import pytest
import runs
from measured import peaks

from trainapp.config import compose
from trainapp.planning import planner
from trainapp.planning.certainty import RANGE

OVER = (
    *runs.TINY, "data=digits", "checkpointing=off", "oom.grow=false", "batch.micro_size=16",
    "batch.eval_micro_size=16", "plan.levers=false", "train.max_steps=100", "every.eval=1", "model=own",
    "user_packages=[planned_models]", "train.ema=null",
)  # fmt: skip


@pytest.mark.parametrize("name", ["Foreground", "Agreeing", "OneClass", "UnlikeExperts"])
def test_masks_that_are_no_share_of_a_router_select_anything(tmp_path, name):
    group = tmp_path / "conf" / "model"
    group.mkdir(parents=True)
    (group / "own.yaml").write_text(f"_target_: planned_models.{name}\n")
    overrides = (*OVER, f"hydra.searchpath=[file://{tmp_path / 'conf'}]")
    facts, _ = planner.plan(compose.from_command_line(overrides))
    low, high = facts["range_bytes"]
    assert facts["certainty"] == RANGE
    assert low <= max(peaks(tmp_path / "run", *overrides)) <= high

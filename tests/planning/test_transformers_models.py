"""Plans of models of Transformers, with adapters and packed documents: exact, or said to be estimated."""

import hf_files
import pytest
import runs

from trainapp.planning import models, planner

pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
TOKENS = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=64", "data.size=64", "data.val_size=16")
FIXED = ("batch.micro_size=8", "batch.eval_micro_size=8", "train.max_steps=3", "every.eval=3")


def planned_and_measured(tmp_path, *overrides):
    config = runs.configure(tmp_path / "plan", *overrides, *FIXED, "mode=plan", "plan.levers=false")
    facts = planner.facts_of(config)
    ended = runs.run(tmp_path / "run", *overrides, *FIXED)
    return facts, ended.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_llama_is_planned(tmp_path, monkeypatch, adapter):
    if adapter == "lora":
        pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
        monkeypatch.setattr(models, "outside_dispatch_modes", None)  # nothing is built for real: 8B would not fit
    facts, measured = planned_and_measured(tmp_path, *hf_files.CAUSAL, *TOKENS, f"adapter={adapter}")
    assert facts["certainty"] == "exact"  # no mask is made, as in a run: its positions do not restart
    assert facts["peak_bytes"] == measured

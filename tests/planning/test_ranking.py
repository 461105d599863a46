"""The levers in the plan: each and their stacks as measured, ranked, and the best plan runs."""

import pytest
import runs
import torch

from trainapp.config import compose
from trainapp.config.command_line import size_overrides
from trainapp.errors import UserError
from trainapp.planning import planner, report, step_time, variants
from trainapp.planning.operation import MATMUL
from trainapp.planning.sizes import Planner
from trainapp.techniques import catalogue
from trainapp.techniques.catalogue import LEVERS
from trainapp.train import loop
from trainapp.units import bytes_text

GPT = (*runs.TINY, *runs.MODELS["gpt"], "model.depth=2", "checkpointing=off", "oom.grow=false")
SMALL = (*GPT, "batch.global_size=32", "every.eval=null")


def plan(*overrides):
    return planner.plan(compose.from_command_line(overrides))[0]


def text(facts, *overrides):
    return report.text(facts, compose.from_command_line(overrides))


def measured(run_dir, *overrides):
    """The peak of a run's steps."""
    run = runs.prepare(run_dir, *overrides)
    try:
        for _ in range(3):
            loop.train_step(run)
    finally:
        run.close()
    return run.memory.peak


@pytest.fixture(scope="module")
def facts():
    return plan(*SMALL, "batch.micro_size=16")


@pytest.mark.slow
def test_every_lever_that_applies_and_stacks_of_them_are_listed(facts):
    listed = [entry["overrides"] for entry in facts["levers"]]
    assert {"precision=bf16", "activation_checkpointing=full", "memory.loss_chunk=auto", "optimizer=sgd"} <= set(listed)
    assert any("activation_checkpointing=full" in text and "precision=" in text for text in listed)
    assert not any("parallel" in text or "expandable" in text for text in listed)
    assert len(listed) == len(set(listed))
    assert not any("full" in text and "selective" in text for text in listed)


@pytest.mark.slow
def test_a_lever_that_does_not_apply_is_not_listed():
    own = (*runs.TINY, *runs.MODELS["mlp"], "checkpointing=off", "batch.global_size=8", "every.eval=null")
    listed = {entry["overrides"] for entry in plan(*own)["levers"]}
    assert "precision=bf16" in listed
    assert not any("memory.loss_chunk" in text for text in listed)  # it has no head
    in_force = {entry["overrides"] for entry in plan(*own, "precision=bf16")["levers"]}
    assert "precision=bf16" not in in_force


@pytest.mark.parametrize("which", ["lowest", "precision=bf16", "memory.loss_chunk=auto", "optimizer=adafactor"])
def test_the_peak_of_an_entry_is_what_a_run_measures(tmp_path, facts, which):
    entries = {entry["overrides"]: entry for entry in facts["levers"]}
    entry = entries[which] if which != "lowest" else min(facts["levers"], key=lambda entry: entry["peak_bytes"])
    assert entry["peak_bytes"] == measured(tmp_path, *SMALL, "batch.micro_size=16", *entry["overrides"].split())


def test_another_combination_has_another_peak(tmp_path, facts):
    """The comparison above can fail."""
    entries = {entry["overrides"]: entry for entry in facts["levers"]}
    other = measured(tmp_path, *SMALL, "batch.micro_size=16", "activation_checkpointing=full")
    assert entries["precision=bf16"]["peak_bytes"] != other


def test_what_changes_the_training_comes_last_and_is_in_no_stack(facts):
    results = [entry["result"] == "other" for entry in facts["levers"]]
    assert results == sorted(results)
    assert all(entry["overrides"].startswith("optimizer") for entry in facts["levers"] if entry["result"] == "other")
    assert facts["best"]["result"] != "other"


def test_relative_times_say_what_recomputing_costs(facts):
    times = {entry["overrides"]: entry["relative_time"] for entry in facts["levers"]}
    assert 1 < times["activation_checkpointing=full"] < 4  # of operations as small as these most is Python
    assert 1 < times["activation_checkpointing=selective"] < 6
    assert 0.8 < times["optimizer.in_backward=true train.grad_clip=null"] < 1.5


@pytest.mark.slow
def test_what_fits_without_a_lever_stays_as_it_is():
    facts = plan(*SMALL)
    assert facts["best"]["overrides"] == "batch.micro_size=32"
    assert facts["best"]["missing_bytes"] == 0


@pytest.mark.slow
def test_where_nothing_fits_without_levers_the_best_plan_does(tmp_path):
    smallest = plan(*SMALL, "batch.micro_size=1", "plan.levers=false")["peak_bytes"]
    limit = f"memory.limit={int(0.8 * smallest)}"
    facts = plan(*SMALL, limit)
    best = facts["best"]
    assert facts["largest_micro_size"] == 0
    assert best["missing_bytes"] == 0
    assert best["result"] != "other"
    assert best["peak_bytes"] <= int(0.8 * smallest)
    assert text(facts, *SMALL).splitlines()[-1] == best["overrides"]
    assert measured(tmp_path, *SMALL, limit, *best["overrides"].split(), "oom=off") == best["peak_bytes"]


@pytest.mark.slow
def test_where_nothing_at_all_fits_the_closest_is_named():
    facts = plan(*SMALL, "memory.limit=2KiB")
    best = facts["best"]
    assert best["missing_bytes"] == best["peak_bytes"] - 2048 > 0
    assert best["peak_bytes"] <= min(entry["peak_bytes"] for entry in facts["levers"])
    assert text(facts, *SMALL).splitlines()[-2].startswith("nothing fits 2.0 KiB; the closest needs")


def test_without_the_setting_there_are_no_levers():
    facts = plan(*SMALL, "batch.micro_size=16", "plan.levers=false")
    assert not {"levers", "best"} & facts.keys()
    assert facts["traces"] < 7


def test_the_table_has_a_hundred_columns(facts):
    assert max(map(len, text(facts, *SMALL).splitlines()[:-1])) <= 100
    for entry in facts["levers"]:
        assert entry["overrides"].split()[-1] in text(facts, *SMALL)


@pytest.mark.slow
def test_a_lever_that_cannot_be_traced_is_listed_as_such(monkeypatch):
    own = (*SMALL, "batch.micro_size=16")
    real = Planner.measured

    def fails(self, size, eval_size):
        if self.config.precision.mode == "bf16":
            raise RuntimeError("no such kernel")
        return real(self, size, eval_size)

    monkeypatch.setattr(Planner, "measured", fails)
    entries = {entry["overrides"]: entry for entry in plan(*own)["levers"]}
    assert entries["precision=bf16"]["certainty"] == "not traceable"
    assert entries["precision=bf16"]["peak_bytes"] is None
    assert entries["activation_checkpointing=full"]["certainty"] == "exact"


@pytest.fixture
def no_time_in_bf16(monkeypatch):
    """As on a device that has no product of two matrices in bf16, of which the rates are made."""
    real = step_time._PROBES[MATMUL]

    def probe(size, dtype, device):
        if dtype is torch.bfloat16:
            raise NotImplementedError("no mm")
        return real(size, dtype, device)

    monkeypatch.setitem(step_time._PROBES, MATMUL, probe)


def test_a_lever_that_cannot_be_timed_has_its_peak_and_no_time(no_time_in_bf16):
    facts = plan(*SMALL, "batch.micro_size=16")
    entries = {entry["overrides"]: entry for entry in facts["levers"]}
    assert entries["precision=bf16"]["relative_time"] is None
    assert entries["precision=bf16"]["certainty"] == "exact"
    assert entries["precision=bf16"]["peak_bytes"] < facts["peak_bytes"]
    assert entries["activation_checkpointing=full"]["relative_time"] > 1
    assert "bf16" not in facts["best"]["overrides"]


def test_it_is_the_best_plan_where_nothing_else_fits(no_time_in_bf16, monkeypatch):
    monkeypatch.setattr(catalogue, "LEVERS", [v for v in LEVERS if v.setting == "precision=bf16"])
    own = (*SMALL, "batch.micro_size=1", "model.context_length=512", "memory.loss_chunk=64")
    peaks = {precision: plan(*own, f"precision={precision}", "plan.levers=false") for precision in ("fp32", "bf16")}
    low, high = (peaks[precision]["peak_bytes"] for precision in ("bf16", "fp32"))
    assert low < high
    facts = plan(*own, f"memory.limit={high - 1}")
    best = facts["best"]
    assert best["overrides"] == "precision=bf16 batch.micro_size=1"
    assert (best["relative_time"], best["missing_bytes"]) == (None, 0)
    assert f": peak {bytes_text(low)}:" in text(facts, *own)


def test_all_traces_count_also_those_of_refused_combinations(monkeypatch):
    made, real, refused = [], Planner._trace_rank, []

    def counted(self, *where):
        made.append(self)
        return real(self, *where)

    def refuses(self, levers):
        found = traced(self, levers)
        if any("bf16" in lever.setting for lever in levers):
            refused.append(levers)
            return None
        return found

    traced = variants.Variants._traced
    monkeypatch.setattr(Planner, "_trace_rank", counted)
    monkeypatch.setattr(variants.Variants, "_traced", refuses)
    facts = plan(*SMALL, "batch.micro_size=16")
    assert refused
    assert facts["traces"] == len(made)


@pytest.mark.parametrize(
    ("given", "freed"),
    [
        (("accumulation=fixed", "accumulation.steps=4"), "accumulation.steps=auto"),
        (("batch.micro_schedule={1:4}",), "batch.micro_schedule=null"),
    ],
)
def test_what_a_plan_without_levers_prints_can_be_pasted(given, freed):
    own = (*SMALL, *given, "plan.levers=false")
    last = text(plan(*own), *own).splitlines()[-1]
    assert last == f"{freed} batch.micro_size=32"
    assert compose.from_command_line([*own, *last.split()]).batch.micro_size == 32


def test_what_several_ranks_may_use_is_said():
    """Of the limit, 10% stay free: what is too much for the rest need not be for the limit."""
    facts = plan(*SMALL, "memory.limit=2KiB")
    facts["limit_bytes"] = 78 * 2**30
    facts["best"] |= {"reserved_bytes": 72 * 2**30, "missing_bytes": int(1.1 * 2**30)}
    line = "nothing fits 70.9 GiB, what the plan may use of 78.0 GiB; the closest needs 72.0 GiB, 1.1 GiB too much:"
    assert text(facts, *SMALL).splitlines()[-2] == line


def test_sizes_that_something_else_fixes_are_freed():
    config = compose.from_command_line([*SMALL, "accumulation=fixed", "accumulation.steps=3"])
    assert size_overrides(config, 4) == ["accumulation.steps=auto", "batch.micro_size=4"]
    compose.from_command_line([*SMALL, "accumulation=fixed", "accumulation.steps=3", *size_overrides(config, 4)])
    with pytest.raises(UserError):
        compose.from_command_line([*SMALL, "accumulation=fixed", "accumulation.steps=3", "batch.micro_size=4"])


@pytest.mark.parametrize(
    "lever", [lever for lever in LEVERS if lever.result == "same"], ids=lambda lever: lever.setting
)
def test_a_lever_of_the_same_result_is_no_other_optimizer_and_no_other_model(lever):
    assert not any(name.startswith(("model.", "optimizer.target", "precision.", "train.")) for name in lever.changes)


ONE_PROCESS = [lever for lever in LEVERS if lever.changes and not lever.is_default and "parallel" not in lever.setting]


@pytest.mark.parametrize("lever", ONE_PROCESS, ids=lambda lever: lever.setting)
def test_the_result_is_what_the_list_says(tmp_path, lever):
    """The losses of three steps: the same to 1e-5, to some percent, or those of another optimizer."""
    # Matrices that are large enough for fewer bits, and gradients that are clipped, where the lever allows it.
    clip = "null" if lever.setting == "optimizer.in_backward=true" else "0.1"
    own = (*SMALL, "model.width=64", f"train.grad_clip={clip}", "every.log=1", "train.max_steps=3")

    def losses(name, *more):
        run = runs.prepare(tmp_path / name, *own, *more)
        with_loss = []
        run.tracker.log = lambda step, samples, scalars, metric: with_loss.append(scalars["loss"])
        try:
            for _ in range(3):
                loop.train_step(run)
        finally:
            run.close()
        return with_loss

    plain, changed = losses("plain"), losses("changed", *lever.setting.split())
    off = max(abs(a - b) / a for a, b in zip(plain, changed, strict=True))
    if lever.result == "same":
        assert off < 1e-5
    elif lever.result == "rounded":
        assert 0 < off < 0.02
    else:  # AdamW hardly notices that gradients are not clipped
        assert off > (1e-6 if "grad_clip" in lever.setting else 1e-5)


@pytest.mark.slow
def test_levers_that_cannot_be_ranked_leave_the_peak(monkeypatch):
    def fails(of, facts):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(planner, "ranked", fails)
    facts = plan(*SMALL, "batch.micro_size=16")
    assert facts["peak_bytes"] == plan(*SMALL, "batch.micro_size=16", "plan.levers=false")["peak_bytes"]
    assert facts["notes"] == ["the levers could not be ranked (RuntimeError: out of luck)"]
    assert text(facts, *SMALL).splitlines()[-1] == "batch.micro_size=32"

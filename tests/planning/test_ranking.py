"""The techniques in the plan: alone and stacked as measured, in the order of least harm; the best plan runs."""

import contextlib

import measured
import pytest
import runs

from trainapp.config import compose
from trainapp.planning import planner, printed, ranking
from trainapp.planning.recorder import Breakdown
from trainapp.techniques.catalogue import RESULTS, TECHNIQUES
from trainapp.training import loop

GPT = (*runs.TINY, *runs.MODELS["gpt"], "model.depth=2", "checkpointing=off", "oom.grow=false")
SMALL = (*GPT, "batch.global_size=32", "every.eval=null")


def plan(*overrides):
    return planner.plan(compose.from_command_line(overrides))[0]


def text(facts, *overrides):
    return printed.plan_text(facts, compose.from_command_line(overrides))


@pytest.fixture(scope="module")
def facts():
    return plan(*SMALL, "batch.micro_size=16")


@pytest.mark.slow
def test_every_technique_that_applies_and_combinations_are_listed(facts):
    listed = [entry["overrides"] for entry in facts["techniques"]]
    assert {"precision=bf16", "activation_checkpointing=full", "memory.loss_chunk=auto", "optimizer=sgd"} <= set(listed)
    assert any("activation_checkpointing=full" in text and "precision=" in text for text in listed)
    assert not any("parallel" in text or "expandable" in text or "adapter" in text for text in listed)
    assert len(listed) == len(set(listed))
    assert not any("full" in text and "selective" in text for text in listed)
    order = [(RESULTS.index(entry["result"]), entry["peak_bytes"]) for entry in facts["techniques"]]
    assert order == sorted(order)  # least harm first, then the largest saving
    table = text(facts, *SMALL)
    assert all(overrides.split()[-1] in table for overrides in listed)


@pytest.mark.slow
def test_a_technique_that_does_not_apply_is_not_listed():
    own = (*runs.TINY, *runs.MODELS["mlp"], "checkpointing=off", "batch.global_size=8", "every.eval=null")
    listed = {entry["overrides"] for entry in plan(*own)["techniques"]}
    assert "precision=bf16" in listed
    assert not any("memory.loss_chunk" in text for text in listed)  # it has no head
    in_force = {entry["overrides"] for entry in plan(*own, "precision=bf16")["techniques"]}
    assert "precision=bf16" not in in_force


@pytest.mark.slow
@pytest.mark.parametrize("which", ["lowest", "precision=bf16", "memory.loss_chunk=auto", "optimizer=adafactor"])
def test_the_peak_of_an_entry_is_what_a_run_measures(tmp_path, facts, which):
    entries = {entry["overrides"]: entry for entry in facts["techniques"]}
    entry = entries[which] if which != "lowest" else min(entries.values(), key=lambda entry: entry["peak_bytes"])
    peak = measured.peak(tmp_path / "run", *SMALL, "batch.micro_size=16", *entry["overrides"].split())
    assert entry["peak_bytes"] == peak
    if which == "precision=bf16":  # the comparison can fail
        assert peak != entries["activation_checkpointing=full"]["peak_bytes"]


@pytest.mark.slow
def test_the_best_plan_is_the_configuration_itself_or_the_first_list_entry_that_fits(tmp_path, facts):
    best = facts["best"]
    assert (best["overrides"], best["missing_bytes"]) == ("batch.micro_size=32", 0)
    smallest = plan(*SMALL, "batch.micro_size=1", "plan.techniques=false")["peak_bytes"]
    limit = f"memory.limit={int(0.8 * smallest)}"
    facts = plan(*SMALL, limit)
    best = facts["best"]
    assert (facts["largest_micro_size"], best["missing_bytes"]) == (0, 0)
    assert best["result"] != "other"
    assert best["peak_bytes"] <= int(0.8 * smallest)
    assert text(facts, *SMALL).splitlines()[-1] == best["overrides"]
    assert measured.peak(tmp_path, *SMALL, limit, *best["overrides"].split(), "oom=off") == best["peak_bytes"]


@pytest.mark.slow
def test_where_nothing_at_all_fits_the_closest_is_named():
    own = (*runs.TINY, *runs.MODELS["mlp"], "checkpointing=off", "batch.global_size=8", "every.eval=null")
    facts = plan(*own, "memory.limit=2KiB")
    best = facts["best"]
    assert best["missing_bytes"] == best["peak_bytes"] - 2048 > 0
    assert best["peak_bytes"] <= min(entry["peak_bytes"] for entry in facts["techniques"])
    assert text(facts, *own).splitlines()[-2].startswith("nothing fits 2.0 KiB; the closest needs")


@pytest.mark.parametrize(
    ("given", "freed"),
    [
        (("accumulation=fixed", "accumulation.steps=4"), "accumulation.steps=auto"),
        (("batch.micro_schedule={1:4}",), "batch.micro_schedule=null"),
    ],
)
def test_what_a_plan_without_techniques_prints_can_be_pasted(given, freed):
    own = (*SMALL, *given, "plan.techniques=false")
    facts = plan(*own)
    assert (facts["techniques"], facts["best"]) == ([], None)
    last = text(facts, *own).splitlines()[-1]
    assert last == f"{freed} batch.micro_size=32"
    assert compose.from_command_line([*own, *last.split()]).batch.micro_size == 32


DEFAULT = compose.from_command_line([])
ONE_PROCESS = [
    one for one in TECHNIQUES if one.is_planned and not one.is_set(DEFAULT) and "parallel" not in one.setting
]


@pytest.mark.slow
@pytest.mark.parametrize("technique", ONE_PROCESS, ids=lambda technique: technique.setting)
def test_the_result_is_what_the_list_says(tmp_path, technique):
    """The losses of three steps: the same to 1e-5, to some percent, or those of another optimizer."""
    # Matrices that are large enough for fewer bits, and gradients that are clipped, where the technique allows it.
    clip = "null" if technique.setting == "optimizer.in_backward=true" else "0.1"
    own = (*SMALL, "model.width=64", f"train.grad_clip={clip}", "every.log=1", "train.max_steps=3")

    def losses(name, *more):
        with_loss = []
        with contextlib.closing(runs.prepare(tmp_path / name, *own, *more)) as run:
            run.tracker.log_step = lambda step, samples, scalars, metric: with_loss.append(scalars["loss"])
            for _ in range(3):
                loop.train_step(run)
        return with_loss

    plain, changed = losses("plain"), losses("changed", *technique.setting.split())
    off = max(abs(a - b) / a for a, b in zip(plain, changed, strict=True))
    if technique.result == "same":
        assert off < 1e-5
    elif technique.result == "rounded":
        assert 0 < off < 0.02
    else:  # AdamW hardly notices that gradients are not clipped
        assert off > (1e-6 if "grad_clip" in technique.setting else 1e-5)


# --- which combinations, and in which order they are offered

SAVED = {  # MiB of a peak of 100
    "activation_checkpointing=full": 30,
    "memory.loss_chunk=auto": 10,
    "precision=bf16": 15,
    "precision=bf16_pure optimizer=adamw_bf16": 40,
    "optimizer=adamw_8bit": 20,
}


def variant_of(techniques):
    saved = sum(SAVED[technique.setting] for technique in techniques)
    return ranking.Variant(tuple(techniques), None, Breakdown(total=100 - saved))


def test_weights_are_rounded_only_where_nothing_milder_fits():
    by_setting = {technique.setting: technique for technique in TECHNIQUES}
    single = [variant_of([by_setting[setting]]) for setting in SAVED]
    single.sort(key=lambda variant: (variant.harm, variant.peak))
    assert "bf16_pure" in single[2].techniques[0].setting  # the largest saving of those that round
    combinations = ranking._combine(variant_of([]), single, variant_of)
    tried = [{technique.setting for technique in variant.techniques} for variant in combinations]
    same = {"activation_checkpointing=full", "memory.loss_chunk=auto"}
    assert tried[:3] == [same, same | {"optimizer=adamw_8bit"}, same | {"precision=bf16"}]
    assert same | {"optimizer=adamw_8bit", "precision=bf16"} in tried
    order = [variant.rounds_weights for variant in sorted([*single, *combinations], key=ranking._change)]
    assert order == sorted(order)
    assert order.count(True) >= 2


@pytest.mark.slow
def test_the_least_change_that_fits_keeps_weights_in_fp32():
    own = (*SMALL, "model.width=64", "batch.micro_size=4", "data.vocab_size=512")
    facts = plan(*own)
    mild = [
        entry["peak_bytes"]
        for entry in facts["techniques"]
        if entry["result"] == "rounded" and "bf16_pure" not in entry["overrides"] and "full" in entry["overrides"]
    ]
    weights = [entry["peak_bytes"] for entry in facts["techniques"] if "bf16_pure" in entry["overrides"]]
    assert min(weights) < min(mild)
    limited = plan(*own[:-2], "data.vocab_size=512", "batch.micro_size=4", f"memory.limit={min(mild)}")
    assert limited["best"]["missing_bytes"] == 0
    assert "bf16_pure" not in limited["best"]["overrides"]


def test_techniques_are_reported_as_they_are_tried(monkeypatch):
    parts = []
    monkeypatch.setattr(planner, "report", parts.append)
    facts = plan(*runs.TINY, *runs.MODELS["mlp"], "checkpointing=off", "batch.global_size=8", "batch.micro_size=4")
    assert parts[0]["plan"]["peak_bytes"] == facts["peak_bytes"]
    assert parts[0]["plan"]["techniques"] == []
    tried = [part["technique"] for part in parts if "technique" in part]
    assert [entry["tried"] for entry in tried] == list(range(1, len(tried) + 1))
    assert len(tried) <= tried[0]["most"]
    peaks = {entry["overrides"]: entry["peak_bytes"] for entry in tried}
    assert all(peaks[entry["overrides"]] == entry["peak_bytes"] for entry in facts["techniques"])
    assert all("search" in part for part in parts[1 + len(tried) :])

"""`oom.plan=true`: one error, then the size that fits."""

import logging

import pytest
import runs
from helpers import incidents

import trainapp

GPT = (*runs.MODELS["gpt"], "batch.global_size=32", "memory.limit=300KB", "train.max_steps=8", "oom.grow=true")

pytestmark = pytest.mark.usefixtures("without_pictures")


def test_the_second_attempt_has_the_largest_size_that_fits(tmp_path):
    planned = runs.run(tmp_path / "planned", *GPT, "oom.plan=true", "oom.remember=false")
    searched = runs.run(tmp_path / "searched", *GPT, "oom.plan=false", "oom.remember=false")
    (only,) = incidents(tmp_path / "planned")
    largest = trainapp.plan([*runs.TINY, *GPT])["largest_micro_size"]
    assert (only["old_size"], only["new_size"]) == (32, largest)
    assert f"micro-batch 32 -> {largest} as planned, retrying" in only["action"]
    assert planned.micro_size == largest >= searched.micro_size
    assert planned.oom_restarts == 1 < searched.oom_restarts
    assert planned.peak_memory_bytes <= 300_000
    assert planned.micro_schedule == {1: largest}


def test_where_lengths_vary_the_size_is_halved(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        runs.run(tmp_path, *GPT, "data.min_length=8", "oom.plan=true", "oom.remember=false", "train.max_steps=2")
    first = incidents(tmp_path)[0]
    assert first["new_size"] == first["old_size"] // 2
    assert any("the plan is not exact" in record.getMessage() for record in caplog.records)


def test_a_size_that_the_user_has_set_is_halved(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        runs.run(tmp_path, *GPT, "batch.micro_size=16", "oom.plan=true", "train.max_steps=2")
    assert incidents(tmp_path)[0]["new_size"] == 8
    assert not any("plan" in record.getMessage() for record in caplog.records if record.levelno == logging.INFO)

"""Without `memory.limit`, Linux's own limit turns its OOM killer into an error that the same recovery handles."""

import resource
import sys

import pytest
import runs
from helpers import incidents, result, train

from trainapp.config.schema import Memory
from trainapp.memory import host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")

# 4096 logits for each of 256 tokens: about 16 MiB per sample, 1 GiB for the whole batch.
GPT = (*runs.MODELS["gpt"], "model.dropout=0", "model.context_length=256", "data.vocab_size=4096", "data.size=128")
HUNGRY = (*runs.STEPS_ONLY, *GPT, "memory.guard=true", "train.max_steps=3", "batch.global_size=64", "oom.grow=true")


@pytest.mark.slow
def test_a_run_that_exceeds_it_goes_on(tmp_path):
    # A reserve larger than the machine leaves the minimum headroom: 256 MiB.
    train(tmp_path / "run", *HUNGRY, "memory.guard_reserve=100000GiB")
    found = result(tmp_path / "run")
    assert (found["steps"], found["samples"]) == (3, 3 * 64)
    assert found["oom_restarts"] >= 2
    assert 1 <= found["micro_size"] <= 32
    for record in incidents(tmp_path / "run"):
        assert record["host"]
        assert "DefaultCPUAllocator" in record["message"] or "could not create a primitive" in record["message"]


@pytest.mark.slow
def test_without_the_guard_nothing_strikes(tmp_path):
    # Negative control: the guard made the difference.
    train(tmp_path / "run", *HUNGRY, "memory.guard=false", "train.max_steps=1")
    assert result(tmp_path / "run")["oom_restarts"] == 0


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def test_the_limit_is_taken_back():
    before, settings = resource.getrlimit(resource.RLIMIT_DATA), Memory(guard_reserve=2**60)
    with host.guarded(settings, 2**40):
        assert soft() == pytest.approx(host.data_size() + host.SMALLEST, abs=16 * 2**20)
        assert resource.getrlimit(resource.RLIMIT_DATA)[1] == before[1]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(KeyError), host.guarded(settings, 2**40):
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_limit_that_is_there_already_is_not_raised():
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    own = host.data_size() + 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (own, hard))
    try:
        with host.guarded(Memory(guard_reserve=1), host.available_bytes()):
            assert soft() == min(own, soft()) <= own
        assert soft() == own
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def test_the_reserve_is_left():
    total = 2**36
    with host.guarded(Memory(guard_reserve="1GiB"), total):
        some = soft()
    with host.guarded(Memory(guard_reserve="2GiB"), total):
        less = soft()
    if host.available_bytes() > 3 * 2**30:
        assert some - less == pytest.approx(2**30, rel=0.25)  # other processes use the machine meanwhile

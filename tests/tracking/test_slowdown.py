"""A warning, once, where steps take several times as long as before and nothing has failed."""

import logging
import types

import pytest
import runs

from trainapp.memory.cpu import CpuMemory
from trainapp.tracking import meter
from trainapp.tracking.slowdown import Slowdown


def texts(speeds, data_waits=(0.0,) * 20, recoveries=(0,) * 20):
    slowdown = Slowdown()
    return [slowdown.text(*window) for window in zip(speeds, data_waits, recoveries, strict=False)]


def test_five_times_slower_than_the_median():
    *before, last = texts([100, 90, 110, 105, 95, 20])
    assert not any(before)
    assert last == "20 samples/s while it computes, where 100 were usual, and nothing has failed"


@pytest.mark.parametrize(
    "windows",
    [
        ([100, 100, 100, 20],),  # too few before
        ([100] * 5 + [30],),
        ([100] * 5 + [20], [0.0] * 5 + [0.8]),  # it waits for data
        ([100] * 5 + [20], [0.0] * 6, [0] * 5 + [1]),  # a retry
    ],
    ids=["too early", "not slow enough", "waits for data", "retry"],
)
def test_what_is_no_slowdown(windows):
    assert not any(texts(*windows))


@pytest.fixture
def warnings(tmp_path, monkeypatch, caplog):
    """The warnings of a run whose eighth step, and all later ones, take 50 times as long, by the meter's clock."""

    def run(*overrides):
        clock = types.SimpleNamespace(now=0.0)
        monkeypatch.setattr(
            meter, "time", types.SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
        )
        count = meter.Meter.count

        def take_time(self, samples, divisor=0):
            count(self, samples, divisor)
            clock.now += 50.0 if self.samples > 7 * samples else 1.0

        monkeypatch.setattr(meter.Meter, "count", take_time)
        with caplog.at_level(logging.WARNING, "trainapp"):
            runs.run(tmp_path, *runs.MODELS["mlp"], "every.log=1", "train.max_steps=10", "every.eval=null", *overrides)
        return [record.getMessage() for record in caplog.records if "nothing has failed" in record.getMessage()]

    return run


def test_a_run_says_so_once(warnings, monkeypatch):
    monkeypatch.setattr(CpuMemory, "others_text", lambda self: "others have 5 GiB")
    (message,) = warnings()
    assert message.startswith("step 8: ")
    assert message.endswith("were usual, and nothing has failed; others have 5 GiB")


@pytest.mark.slow
def test_nothing_where_the_memory_is_not_shared(warnings):
    """As on the CPU: an allocation there succeeds or fails."""
    assert warnings() == []

"""The report of an error: where, how much memory, which parts, and its cost; in files, terminal and TensorBoard."""

import json
import logging
import re
from typing import NamedTuple

import pytest
import runs
import torch
from faults import Fault
from harness import Recorded
from helpers import texts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainapp.errors import TrainingStopped
from trainapp.oom.failure import Failure
from trainapp.oom.report import describe

from .conftest import MODELS, cell, peak_of, tiny

# One block needs far more memory than all the others: in the forward, or only in the backward.
HUNGRY = (
    *runs.own_model("own_models.Hungry"),
    *("data=digits", "user_packages=[own_models]", "batch.micro_size=auto", "train.ema=null"),
)


class Reported(NamedTuple):
    """A run whose memory runs out in the first step."""

    phase: str
    limit: int
    recorded: Recorded
    messages: list[str]  # what it has logged

    @property
    def failure(self) -> Failure:
        (failure,) = self.recorded.failures
        return failure

    @property
    def line(self) -> str:
        """The message that says that memory ran out."""
        (line,) = [message for message in self.messages if "out of memory" in message]
        return line


class Messages(logging.Handler):
    """A handler that keeps the messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module", params=["forward", "backward"])
def reported(request, tmp_path_factory):
    """A run of `Hungry`, in either phase."""
    folder = tmp_path_factory.mktemp(request.param)
    overrides = (*HUNGRY, f"+model.phase={request.param}")
    limit = peak_of(folder / "peak", overrides, 8) + 2000
    handler = Messages()
    logging.getLogger("trainapp").addHandler(handler)
    try:
        recorded = Recorded(tiny(folder / "run", *overrides, changes={"memory.limit": limit}), pictures=True)
    finally:
        logging.getLogger("trainapp").removeHandler(handler)
    return Reported(request.param, limit, recorded, handler.messages)


@pytest.mark.slow
def test_where_memory_ran_out_and_at_what_cost(reported):
    failure = reported.failure
    assert (failure.step, failure.phase, failure.module) == (1, reported.phase, "blocks_.1")
    assert (failure.recovery.old_size, failure.recovery.new_size) == (16, 8)
    assert failure.used <= reported.limit < failure.used + failure.requested
    assert failure.seconds_lost > 0


@pytest.mark.slow
def test_every_byte_has_a_category(reported):
    bytes_by_category = reported.failure.by_category
    parameters = list(reported.recorded.run.state.model.parameters())
    parameter_bytes = sum(4 * parameter.numel() for parameter in parameters)
    assert bytes_by_category["parameters"] == parameter_bytes
    assert bytes_by_category["optimizer_state"] == 2 * parameter_bytes + 4 * len(parameters)
    assert bytes_by_category["batch"] == 16 * (64 * 4 + 8)  # pixels and a target per sample
    assert bytes_by_category["activations"] > 0
    assert sum(bytes_by_category.values()) == reported.failure.used


@pytest.mark.slow
def test_the_report_is_written_to_files(reported):
    failure = reported.failure
    folder = reported.recorded.run_dir / "oom"
    assert sorted(path.name for path in folder.iterdir()) == [f"001_step_1.{kind}" for kind in ("json", "png")]
    record = json.loads((folder / "001_step_1.json").read_text())
    assert (record["phase"], record["module"]) == (reported.phase, "blocks_.1")
    assert (record["used"], record["limit"]) == (failure.used, reported.limit)
    assert record["by_category"] == failure.by_category
    assert record["action"] == "micro-batch 16 -> 8, retrying the step"
    assert any("own_models.py" in line for line in record["trace"])
    assert (folder / "001_step_1.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_the_report_is_one_line_in_the_terminal(reported):
    for text in ("at step 1", f"in {reported.phase} (blocks_.1)", "micro-batch 16 -> 8"):
        assert text in reported.line
    assert "MemoryLimitExceeded" not in reported.line


@pytest.mark.slow
def test_the_report_is_in_tensorboard(reported):
    run_dir = reported.recorded.run_dir
    assert texts(run_dir)["out_of_memory"] == [(1, reported.line)]
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    (image,) = events.Images("out_of_memory")
    assert (image.step, image.width, image.height) == (1, 1000, 450)


@pytest.mark.slow
def test_a_module_is_not_remembered_from_an_earlier_error(tmp_path):
    # The first error is traced to its module; at the second, tracking is off.
    config = tiny(tmp_path, *cell("mlp", "fp32"), changes={"train.max_steps": 7, "every.log": None})
    recorded = Recorded(config, Fault("backward", 1, 3), Fault("clip", 6))
    first, second = recorded.failures
    assert first.module.startswith("layers") or first.module == "head"
    assert (second.phase, second.module) == ("clip", "")


@pytest.mark.slow
@pytest.mark.parametrize("error", [{"phase": "forward", "above": 2}, {"phase": "commit", "times": 2}])
def test_reports_are_numbered(tmp_path, error):
    """Also where an error in the commit leads back to the start."""
    Recorded(tiny(tmp_path, *cell("mlp", "fp32")), Fault(step=2, **error))
    assert [path.name for path in sorted((tmp_path / "oom").glob("*.json"))] == ["001_step_2.json", "002_step_2.json"]


@pytest.mark.slow
def test_the_last_word(tmp_path):
    """Not even one sample fits: the message lists the parts, and the settings that would help."""
    overrides = (*MODELS["gpt"], "model.depth=4", "model.width=32", "batch.micro_size=auto", "oom.techniques=none")
    limit = peak_of(tmp_path / "peak", overrides, 1) - 2000
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path / "run", *overrides, changes={"memory.limit": limit}))
    message = str(caught.value)
    first = message.splitlines()[0]
    assert re.fullmatch(r"out of memory in \w+ with micro-batch 1: nothing is left to halve\.", first)
    for name in ("limit", "parameters", "optimizer state", "weight average"):
        assert re.search(rf"^{name} +[\d.]+ [KMG]iB$", message, re.MULTILINE), name
    advice = message.partition("Settings that save memory")[2]
    for setting in ("optimizer=adamw_bf16", "activation_checkpointing=full", "precision=bf16"):
        assert re.search(rf"^  {setting}: saves up to \d.+ KiB \(.+\); costs .+$", advice, re.MULTILINE), setting


@pytest.mark.slow
def test_a_healthy_step_is_drawn_on_request(tmp_path):
    config = tiny(tmp_path, *cell("mlp", "fp32"), changes={"memory.timeline": True, "train.max_steps": 6})
    Recorded(config, pictures=True)
    assert (tmp_path / "memory_timeline.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Images("memory_timeline")) == 1


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "oom").write_text("a file where the folder should be")
    recorded = Recorded(tiny(tmp_path, *cell("mlp", "fp32")), Fault("forward", 2, 1), pictures=True)
    assert recorded.run.state.progress.step == 4
    messages = [message for message in caplog.messages if "oom cannot be written" in message]
    assert len(messages) == 1


def test_what_the_device_holds_beside_the_allocator(tmp_path, monkeypatch):
    """The driver's counter has this process's context in it, so the entry is not called other processes."""
    run = runs.closed(tmp_path, *runs.MODELS["mlp"])
    assert "outside_allocator" not in describe(run, torch.OutOfMemoryError("CUDA out of memory.")).by_category
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6500)
    run.memory.device = torch.device("cuda", 0)
    failure = describe(run, torch.OutOfMemoryError("CUDA out of memory."))
    assert failure.by_category["outside_allocator"] == 500


def test_a_module_of_an_earlier_error_is_not_named_for_one_that_is_not_tracked(tmp_path):
    """In step 6 the size is validated: nothing tracks the module in which its backward fails."""
    config = tiny(tmp_path, *cell("mlp", "fp32"), changes={"train.max_steps": 7, "every.log": None})
    recorded = Recorded(config, Fault("backward", 1, 3), Fault("backward", 6))
    first, second = recorded.failures
    assert first.module.startswith("layers") or first.module == "head"
    assert (second.phase, second.module) == ("backward", "")


def test_the_samples_are_those_of_the_micro_batch_that_failed(tmp_path):
    """Five short rows are evaluated together, then, since long ones stay at five, as two, two and one."""
    parts = ("data._target_=own_models.LongAndShort", "model._target_=own_models.RunsOutOnShort")
    settings = ("user_packages=[own_models]", "task=classification", "every.eval=2", "train.check_loss=false")
    recorded = Recorded(tiny(tmp_path, *parts, *settings, "batch.eval_micro_size=5", "train.ema=null"))
    assert [failure.samples for failure in recorded.failures] == [5, 2]

"""The record of an error: where, how much memory, which parts, and its cost; in files, terminal and TensorBoard."""

import json
import logging
import re
import textwrap

import pytest
import runs
import torch
from helpers import texts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainapp.errors import TrainingStopped
from trainapp.memory.device import DeviceMemory
from trainapp.memory.live_tensors import MemoryLimitExceeded
from trainapp.oom import incident
from trainapp.parallel.ranks import PeerOutOfMemory

from .conftest import MODELS, cell, tiny
from .inject import Injector, Recorded

# One layer of each needs far more memory than all the others: in the forward, or only in the backward.
NETWORKS = textwrap.dedent("""
    import torch
    from torch import nn


    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs * 2

        @staticmethod
        def backward(ctx, gradient):
            room = torch.zeros(len(gradient), 4000)
            return gradient * 2 + room[:, :1] * 0


    class HungryForward(nn.Module):
        def forward(self, inputs):
            return inputs + torch.zeros(len(inputs), 4000).amax(1, keepdim=True)


    class HungryBackward(nn.Module):
        def forward(self, inputs):
            return Hungry.apply(inputs)


    class Network(nn.Module):
        def __init__(self, image_shape, num_classes: int, hungry: str = "forward"):
            super().__init__()
            self.first = nn.Linear(64, 8)
            self.blocks_ = nn.ModuleList([nn.Identity(), HungryForward() if hungry == "forward" else HungryBackward()])
            self.last = nn.Linear(8, num_classes)

        def forward(self, inputs):
            features = self.first(inputs.flatten(1))
            for block in self.blocks_:
                features = block(features)
            return self.last(features)
""")


@pytest.fixture
def network(tmp_path, monkeypatch):
    """Overrides for the networks above."""
    (tmp_path / "hungry_networks.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    removed = ("~model.width", "~model.depth", "~model.dropout")
    return (
        "model=mlp",
        *removed,
        "model._target_=hungry_networks.Network",
        "data=digits",
        "user_packages=[hungry_networks]",
        "batch.micro_size=auto",
        "train.ema=null",
    )


def peak_of(run_dir, overrides, size: int) -> int:
    return Recorded(tiny(run_dir, *overrides, changes={"batch.micro_size": size, "train.max_steps": 2})).run.memory.peak


@pytest.mark.slow
@pytest.mark.parametrize(("hungry", "module"), [("forward", "blocks_.1"), ("backward", "blocks_.1")])
def test_the_whole_record(tmp_path, network, hungry, module, caplog):
    overrides = (*network, f"+model.hungry={hungry}")
    limit = peak_of(tmp_path / "peak", overrides, 8) + 2000
    with caplog.at_level(logging.WARNING):
        recorded = Recorded(tiny(tmp_path / "run", *overrides, changes={"memory.limit": limit}))
    (failure,) = recorded.failures
    assert (failure.step, failure.phase, failure.module) == (1, hungry, module)
    assert (failure.old_size, failure.new_size) == (16, 8)
    assert failure.used <= limit < failure.used + failure.requested
    assert failure.seconds_lost > 0
    model = recorded.run.state.model
    parameters = sum(4 * p.numel() for p in model.parameters())
    assert failure.parts["parameters"] == parameters
    assert failure.parts["optimizer_state"] == 2 * parameters + 4 * len(list(model.parameters()))
    assert failure.parts["batch"] == 16 * (64 * 4 + 8)  # pixels and a target per sample
    assert failure.parts["activations"] > 0
    assert sum(failure.parts.values()) == failure.used

    folder = tmp_path / "run" / "oom"
    assert sorted(path.name for path in folder.iterdir()) == [f"001_step_1.{kind}" for kind in ("json", "md", "png")]
    record = json.loads((folder / "001_step_1.json").read_text())
    assert (record["phase"], record["module"], record["used"], record["limit"]) == (hungry, module, failure.used, limit)
    assert record["parts"] == failure.parts
    assert (folder / "001_step_1.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    report = (folder / "001_step_1.md").read_text()
    for text in ("# Out of memory at step 1", f"| module | {module} |", "| micro-batch | 16 -> 8 |", "| time lost |"):
        assert text in report
    assert "optimizer state" in report
    assert "hungry_networks.py" in report  # the traceback

    lines = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert len(lines) == 1
    for text in ("at step 1", f"in {hungry} ({module})", "micro-batch 16 -> 8"):
        assert text in lines[0]
    assert "MemoryLimitExceeded" not in lines[0]

    ((step, text),) = texts(tmp_path / "run")["out_of_memory"]
    assert step == 1
    assert text.startswith("# Out of memory at step 1")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (image,) = events.Images("out_of_memory")
    assert (image.step, image.width, image.height) == (1, 1000, 450)


@pytest.mark.slow
def test_phases_outside_the_model(tmp_path):
    # The optimizer's kernels and the clipping belong to no module.
    for phase in ("clip", "commit"):
        recorded = Recorded(tiny(tmp_path / phase, *cell("mlp", "fp32")), Injector(phase, 2, 0))
        (failure,) = recorded.failures
        assert (failure.phase, failure.module) == (phase, "")


@pytest.mark.slow
def test_a_module_is_not_remembered_from_an_earlier_error(tmp_path):
    # The first error is traced to its module; at the second, tracking is off.
    class Two(Injector):
        """In the forward of step 1, then in the clipping of step 6."""

        def fail(self):
            self.phase, self.step, self.times = "clip", 6, 2
            super().fail()

    injector = Two("backward", 1, 3)
    recorded = Recorded(
        tiny(tmp_path, *cell("mlp", "fp32"), changes={"train.max_steps": 7, "every.log": None}), injector
    )
    assert injector.fired == 2
    first, second = recorded.failures
    assert first.module.startswith("layers") or first.module == "head"
    assert (second.phase, second.module) == ("clip", "")


@pytest.mark.slow
def test_the_incidents_are_numbered(tmp_path):
    Recorded(tiny(tmp_path, *cell("mlp", "fp32")), Injector("forward", 2, 1, above=1))
    names = sorted(path.name for path in (tmp_path / "oom").glob("*.md"))
    assert names == ["001_step_2.md", "002_step_2.md", "003_step_2.md"]


@pytest.mark.slow
def test_a_restart_from_the_beginning_keeps_the_record(tmp_path):
    injector = Injector("commit", 2, 0, times=2)
    Recorded(tiny(tmp_path, *cell("mlp", "fp32")), injector)
    assert injector.fired == 2
    assert [path.name for path in sorted((tmp_path / "oom").glob("*.md"))] == ["001_step_2.md", "002_step_2.md"]


@pytest.mark.slow
def test_the_last_word(tmp_path):
    """Not even one sample fits: the report lists the parts, and the settings that would help, largest first."""
    overrides = (*MODELS["gpt"], "model.depth=4", "model.width=32", "batch.micro_size=auto")
    limit = peak_of(tmp_path / "peak", overrides, 1) - 2000
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path / "run", *overrides, changes={"memory.limit": limit}))
    told = str(caught.value)
    first = told.splitlines()[0]
    assert re.fullmatch(r"out of memory in \w+ with micro-batch 1: nothing is left to halve\.", first)
    for name in ("limit", "parameters", "optimizer state", "weight average"):
        assert re.search(rf"^{name} +[\d.]+ [KMG]iB$", told, re.MULTILINE), name
    advice = told.partition("What would help, largest saving first:\n")[2]
    found = re.findall(r"^ +([\d.]+) (B|KiB|MiB)  (\S+)", advice, re.MULTILINE)
    sizes = [float(size) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit] for size, unit, _ in found]
    assert len(sizes) >= 3
    assert sizes == sorted(sizes, reverse=True)
    settings = [setting for _, _, setting in found]
    assert "train.ema=null:" in settings
    assert any(setting.startswith("optimizer=") for setting in settings)
    # Dropping Adam's state saves two copies of the parameters, dropping the average saves one.
    parameters = sum(4 * p.numel() for p in Recorded(tiny(tmp_path / "x", *overrides)).run.state.model.parameters())
    by_setting = dict(zip(settings, sizes, strict=True))
    assert by_setting["train.ema=null:"] == pytest.approx(parameters, rel=0.02)


@pytest.mark.slow
def test_the_advice_holds(tmp_path):
    """Each saving in the report is measured: the run with the setting needs that much less."""
    overrides = (*MODELS["gpt"], "model.depth=4", "model.width=32", "model.dropout=0", "batch.micro_size=1")
    peak = peak_of(tmp_path / "peak", overrides, 1)
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path / "run", *overrides, changes={"memory.limit": peak - 2000}))
    promised = dict(re.findall(r"^ +([\d.]+ \w+)  (train.ema=null)", str(caught.value), re.MULTILINE))
    assert promised
    without = peak_of(tmp_path / "without", (*overrides, "train.ema=null"), 1)
    ((size, _),) = promised.items()
    assert peak - without == pytest.approx(float(size.split()[0]) * 1024, rel=0.02)


@pytest.mark.slow
def test_the_advice_of_traced_levers_holds(tmp_path):
    """As above, for savings that only a traced step can tell."""
    overrides = (*MODELS["gpt"], "model.depth=4", "model.width=32", "model.dropout=0", "model.context_length=256")
    overrides = (
        *overrides,
        "data.min_length=null",
        "data.vocab_size=1024",
        "batch.micro_size=1",
        "train.grad_clip=null",
        "train.ema=null",
    )
    peak = peak_of(tmp_path / "peak", overrides, 1)
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path / "run", *overrides, changes={"memory.limit": peak - 2000}))
    found = re.findall(r"^ +([\d.]+) (KiB|MiB)  (.+?): costs", str(caught.value), re.MULTILINE)
    promised = {setting: float(size) * {"KiB": 2**10, "MiB": 2**20}[unit] for size, unit, setting in found}
    checked = {"memory.loss_chunk=auto", "optimizer=adamw_bf16", "activation_checkpointing=full"}
    assert checked <= promised.keys()
    for number, setting in enumerate(sorted(checked)):
        less = peak - peak_of(tmp_path / str(number), (*overrides, setting), 1)
        assert less == pytest.approx(promised[setting], rel=0.05, abs=2**12), setting


@pytest.mark.slow
def test_a_healthy_step_is_drawn_on_request(tmp_path):
    config = tiny(tmp_path, *cell("mlp", "fp32"), changes={"memory.timeline": True, "train.max_steps": 6})
    Recorded(config)
    assert (tmp_path / "memory_timeline.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Images("memory_timeline")) == 1


def test_a_record_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "oom").write_text("a file where the folder should be")
    injector = Injector("forward", 2, 1)
    recorded = Recorded(tiny(tmp_path, *cell("mlp", "fp32")), injector)
    assert injector.fired == 1
    assert recorded.run.state.progress.step == 4
    told = [r.getMessage() for r in caplog.records if "oom cannot be written" in r.getMessage()]
    assert len(told) == 1


def test_what_the_device_holds_beside_the_allocator(tmp_path, monkeypatch):
    """The driver's counter has this process's context in it, so the entry is not called other processes."""
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    run.close()
    assert "outside_allocator" not in incident.describe(run, torch.OutOfMemoryError("CUDA out of memory.")).parts
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6500)
    run.memory.device = torch.device("cuda", 0)
    failure = incident.describe(run, torch.OutOfMemoryError("CUDA out of memory."))
    assert failure.parts["outside_allocator"] == 500
    assert "| outside allocator | 500 B |" in incident.report(failure)


def test_errors_of_the_devices_allocator_are_counted(tmp_path, monkeypatch):
    """What it refused beyond them, a library has caught: see `DeviceMemory.has_hidden_failures`."""
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    run.close()
    monkeypatch.setattr(DeviceMemory, "reported_refusals", 0)
    own = MemoryLimitExceeded("aten.add", 1, 1, 1)
    for error in (PeerOutOfMemory("another rank"), own, RuntimeError("GET was unable to find an engine")):
        run.memory.note_reported(error)
    assert DeviceMemory.reported_refusals == 0
    run.memory.note_reported(torch.OutOfMemoryError("CUDA out of memory."))
    assert DeviceMemory.reported_refusals == 1

"""What the defaults do on a GPU: compiled steps, the allocator's cache, cuDNN's choices, pinned memory."""

import pytest
import runs
import torch
from faults import Fault
from gpu import on_gpu
from harness import Recorded
from torch import nn

from gpu_check import jobs
from trainapp.training import loop

STEPS = 6


def test_a_compiled_step_is_one_graph(tmp_path, device, got, monkeypatch):
    """one graph of the whole model, though the first steps are watched; a second one for other micro-batch sizes"""
    sizes = []

    def count_operations(graph, inputs):
        sizes.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
        return graph.forward

    compile_in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_in_place(self, backend=count_operations))
    torch.compiler.reset()
    settings = jobs.overrides(device, "gpt", "train.compile=true", f"train.max_steps={STEPS}", "checkpointing=off")
    on_gpu.launched(tmp_path, *settings, "batch.micro_schedule={1: 16, 4: 8}", "every.eval=null")
    torch.compiler.reset()
    got(f"{len(sizes)} graphs of {sizes} operations")
    assert len(sizes) <= 2
    assert sizes or device == "cpu"  # where watched steps run uncompiled


def test_inductor(tmp_path, device, needs_cuda, got):
    """nothing: the peak and the seconds of a compiled run, and of one that is not"""
    for compiled in ("true", "false"):
        settings = jobs.overrides(device, "gpt", f"train.compile={compiled}", "checkpointing=off")
        result = on_gpu.launched(
            tmp_path / compiled, *settings, "train.max_steps=30", "batch.micro_size=32", "every.eval=null"
        )
        peak = jobs.text(result.peak_memory_bytes)
        got(f"train.compile={compiled}: {result.samples_per_second:.0f} samples/s, {peak}")


def test_a_settled_size_leaves_the_cache_alone(tmp_path, device, needs_cuda, got):
    """no flush of the allocator's cache in the steps after the search has ended, at half of what a step needs"""
    settings = jobs.overrides(device, "gpt", "train.max_steps=1000", "checkpointing=off", "every.log=null")
    free = jobs.unlimited(tmp_path / "free", *settings, "train.max_steps=3")
    session = runs.prepare(tmp_path / "run", *settings, f"memory.limit={on_gpu.limit_between(free, 0.5)}")
    steps = 0
    while not (session.sizes.train.search_has_ended and not session.sizes.train.is_unvalidated) and steps < 60:
        loop.train_step(session)
        steps += 1
    before = session.memory.cache_flushes()
    for _ in range(STEPS):
        loop.train_step(session)
    flushes = session.memory.cache_flushes() - before
    session.close()
    got(f"micro-batch {session.sizes.train.size} after {steps} steps with {before} flushes; then {flushes} in {STEPS}")
    assert flushes == 0


def test_dropout_of_an_lstm_in_a_retry(tmp_path, device, got):
    """an error in the third step changes no bit of what a run with the same sizes computes"""
    lstm = (*runs.own_model("gpu_check.check_defaults.Recurrent"), "user_packages=[gpu_check]", "data=digits")
    settings = (*runs.STEPS_ONLY, *lstm, f"train.device={device}", "train.deterministic=true", "batch.micro_size=8")
    struck = Recorded(runs.configure(tmp_path / "a", *settings), Fault("backward", 3))
    replayed = Recorded(runs.configure(tmp_path / "b", *settings, "batch.micro_schedule={1: 8, 3: 4}"))
    differences = runs.differences(struck.record().state["model"], replayed.record().state["model"])
    got(f"{len(struck.failures)} error; {len(differences)} tensors differ")
    assert not differences


class Recurrent(nn.Module):
    """A classifier of rows of pixels, by an LSTM that drops values between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 32, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        states, _ = self.layers(images.view(len(images), 8, 8))
        return self.head(states[:, -1])


def test_pinned_memory_does_not_grow(tmp_path, device, needs_cuda, got):
    """the same pinned bytes after 10 and after 40 steps of offloaded activations"""
    settings = jobs.overrides(device, "gpt", "memory.offload_activations=all", "train.max_steps=1000")
    session = runs.prepare(tmp_path, *settings, "checkpointing=off", "every.log=null", "batch.micro_size=16")
    pinned = []
    for steps in (10, 30):
        for _ in range(steps):
            loop.train_step(session)
        torch.cuda.synchronize()
        pinned.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    session.close()
    got(" then ".join(map(jobs.text, pinned)))
    assert pinned[1] <= pinned[0]


@pytest.mark.parametrize("lengths", ["one", "several"])
def test_which_shapes_cudnn_times(tmp_path, needs_cuda, got, lengths):
    """algorithms are timed where images have one size, and chosen by heuristics where they have several"""
    images = (*runs.own_model("gpu_check.check_defaults.Pooled"), "user_packages=[gpu_check]")
    data = ("data._target_=gpu_check.check_defaults.Images", f"+data.several={str(lengths == 'several').lower()}")
    settings = (*runs.STEPS_ONLY, *images, *data, "train.device=cuda", "batch.micro_size=4", "train.max_steps=30")
    session = runs.prepare(tmp_path, *settings)
    for _ in range(20):
        loop.train_step(session)
    session.close()
    got(f"benchmark {torch.backends.cudnn.benchmark}, deterministic {torch.backends.cudnn.deterministic}")
    assert torch.backends.cudnn.benchmark == (lengths == "one")
    assert not torch.backends.cudnn.deterministic


class Pooled(nn.Module):
    """A convolution of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Images(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Batches of 4 images of one size. several: each batch has another width."""

    def __init__(self, split: str, several: bool):
        self.several = several

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.randn(3, 32, 32), "targets": torch.tensor(index % 10)}

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad each batch to a width of its own."""
        images = torch.stack([sample["inputs"] for sample in samples])
        if self.several:
            width = int(samples[0]["targets"])
            images = nn.functional.pad(images, (0, width))
        return {"inputs": images, "targets": torch.stack([sample["targets"] for sample in samples])}

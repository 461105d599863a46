"""Memory that runs out while a run is built is reported as that, whatever it was first taken for."""

import pytest
import runs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainapp.checkpoint.train_state import TrainState
from trainapp.errors import TrainingStopped, UserError
from trainapp.oom.building import explain_out_of_memory

MLP = (*runs.MODELS["mlp"], "train.max_steps=2")
DRIVER = "CUDA error: out of memory"
NAMED = "out of memory while building the run, before any batch"


class FailsAt(TorchDispatchMode):
    """Operations of this name fail with these words."""

    def __init__(self, operation: str, text: str):
        super().__init__()
        self.operation, self.text = operation, text

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == self.operation:
            raise RuntimeError(self.text)
        return func(*args, **(kwargs or {}))


def test_a_real_one(tmp_path):
    with pytest.raises(TrainingStopped, match=NAMED) as caught:
        runs.run(tmp_path, *MLP, f"model.width={2**40}")
    assert "DefaultCPUAllocator: can't allocate memory" in str(caught.value)
    assert "use a smaller model" in str(caught.value)


def test_not_another_mistake(tmp_path):
    """The optimizer's state: what fails for another reason says so."""
    with FailsAt("zeros_like", DRIVER), pytest.raises(TrainingStopped, match=NAMED) as caught:
        runs.run(tmp_path / "memory", *MLP)
    assert DRIVER in str(caught.value)
    with FailsAt("zeros_like", "no kernel for this"), pytest.raises(UserError, match="choose another"):
        runs.run(tmp_path / "mistake", *MLP)


@pytest.mark.parametrize(("text", "expected"), [(DRIVER, NAMED), ("size mismatch", "does not fit this configuration")])
def test_a_checkpoint_that_is_loaded(tmp_path, monkeypatch, text, expected):
    runs.run(tmp_path, *MLP)

    def fails(*_):
        raise RuntimeError(text)

    monkeypatch.setattr(TrainState, "load_values", fails)
    with pytest.raises(UserError, match=expected):
        runs.run(tmp_path, *MLP, "train.max_steps=4")


def test_with_several_ranks_it_is_no_error_of_the_users(tmp_path):
    """Which would end this rank alone and leave the others waiting. Its first line is the same after a restart."""
    config, lines = runs.configure(tmp_path, *MLP, "memory.limit=1GiB"), set()
    for free in ("1.27", "1.31"):
        with pytest.raises(torch.OutOfMemoryError) as caught, explain_out_of_memory(config, object()):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. {free} GiB is free.")
        first, _, rest = str(caught.value).partition("\n")
        lines.add(first)
        assert f"{free} GiB is free" in rest
    assert len(lines) == 1
    assert "(memory.limit=1GiB)" in lines.pop()

"""Kernels that do not run with a micro-batch though memory is left: too many elements, no deterministic algorithm."""

import pytest
import torch
from faults import NO_ENGINE, Fault, Injector
from harness import Recorded
from runs import differences

from trainapp.sizes.autotuner import Autotuner
from trainapp.sizes.failures import ErrorKind
from trainapp.training.session import Session

from .conftest import MODELS, cell, tiny

MLP = (*MODELS["mlp"], "every.eval=null")


def test_too_many_elements_halve_a_size_that_is_not_validated(tmp_path, caplog):
    """The result is that of a run configured with the smaller size, and no memory is reported."""
    recorded = Recorded(tiny(tmp_path / "run", *cell("mlp", "fp32")), Fault("forward", 1, kind="kernel"))
    (failure,) = recorded.failures
    assert failure.kind is ErrorKind.TOO_LARGE_FOR_KERNEL
    assert (failure.recovery.old_size, failure.recovery.new_size) == (8, 4)
    wanted = Recorded(tiny(tmp_path / "wanted", *cell("mlp", "fp32"), schedule={1: 4}))
    assert differences(recorded.record(), wanted.record()) == []
    assert "the model cannot run micro-batch 8 at step 1 in forward" in caplog.text
    assert not (tmp_path / "run/oom").exists()


@pytest.mark.parametrize("overrides", [("batch.micro_size=1",), ()], ids=["a single sample", "a validated size"])
def test_otherwise_the_error_is_the_users(tmp_path, overrides):
    step = 1 if overrides else 4
    injector = Injector([Fault("forward", step, kind="kernel")])
    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        Recorded(tiny(tmp_path, *MLP, "train.max_steps=5", *overrides), injector=injector)


class WithAutotuner(Recorded):
    """A run that chooses cuDNN's algorithms as on CUDA."""

    def watch(self, session: Session) -> None:
        session.sizes.autotuner = Autotuner()


@pytest.fixture(autouse=True)
def switches_of_before():
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def test_without_a_deterministic_algorithm_the_size_stays(tmp_path):
    """cuDNN is asked for deterministic ones while the size is searched, and may have none for a convolution."""
    recorded = WithAutotuner(tiny(tmp_path, *MLP), Fault("forward", 1, kind="no engine"))
    (failure,) = recorded.failures
    assert failure.kind is ErrorKind.NO_ENGINE
    assert failure.recovery.old_size == failure.recovery.new_size == 8
    assert not torch.backends.cudnn.deterministic


def test_the_same_error_again_is_no_longer_about_determinism(tmp_path):
    injector = Injector([Fault("forward", 1, kind="no engine", times=2)])
    with pytest.raises(RuntimeError, match=NO_ENGINE):
        WithAutotuner(tiny(tmp_path, *MLP), injector=injector)

"""Prepares this process as the command line does: CUDA reads its settings when torch is imported."""

import pytest

from trainapp.launch.process import prepare_process

prepare_process(expandable_segments=True, deterministic=True)


@pytest.fixture(autouse=True)
def clean_device():
    """No memory and no cap of earlier tests."""
    import on_gpu
    import torch

    if torch.cuda.is_available():
        on_gpu.forget()
    yield
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(False)
        on_gpu.forget()

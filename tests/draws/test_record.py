"""What is noted of draws that are not torch's operations."""

import contextlib

import pytest
import torch

from trainapp.draws.record import DrawRecord, TopicKind, noted_draws

CUDA = torch.device("cuda", 0)
KERNELS = TopicKind.DRAWS.topic("kernels")


@pytest.fixture
def generator(monkeypatch):
    """The state of the GPU's generator, which this file plays."""
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state.clone())
    return state


@pytest.mark.parametrize("draws_by_sample", [True, False])
def test_a_kernel_that_draws_by_itself(generator, draws_by_sample):
    """As flash-attn's dropout: it takes an offset from the generator, which no replaced operation sees."""
    record = DrawRecord()
    with noted_draws(record, CUDA, draws_by_sample, contextlib.nullcontext()):
        generator += 4
    assert record.draws
    assert (KERNELS in record.depends) == draws_by_sample  # otherwise all draws are the micro-batch's


def test_draws_by_sample_are_counted_by_the_cpus_generator(generator):
    """So its state tells nothing of them."""
    record = DrawRecord()
    with noted_draws(record, CUDA, True, contextlib.nullcontext()):
        torch.rand(1)
    assert not record.draws
    assert record.depends == {}
    with noted_draws(record, CUDA, False, contextlib.nullcontext()):
        torch.rand(1)
    assert record.draws

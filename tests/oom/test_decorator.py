"""`find_executable_batch_size`: Accelerate's call signature without its faults.

Accelerate's behaviour is that of version 1.15, utils/memory.py.
"""

import functools
import gc
import itertools
import logging
import weakref

import pytest
import torch

from trainapp.oom import decorator
from trainapp.oom.decorator import find_executable_batch_size


def fits(limit: int, tried: list[int]):
    """A training function that fits up to `limit`."""

    def train(batch_size, *args, **kwargs):
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_size, args, kwargs

    return train


@pytest.mark.parametrize("refused", [0, 1])
def test_an_ambiguous_error_is_one_if_an_allocation_was_refused(monkeypatch, refused):
    counts = itertools.count(5, refused)  # faked: only CUDA's allocator has such a counter
    monkeypatch.setattr(decorator, "refused_allocations", lambda: next(counts))
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return batch_size

    if refused:
        assert train() == 4
    else:
        with pytest.raises(RuntimeError, match="unable to find an engine"):
            train()
    assert tried == [8, 4][: 1 + refused]


@pytest.mark.parametrize("takes_size", [False, True])
def test_reduce_batch_size_fn(takes_size):
    """Accelerate calls it without arguments: a default is not replaced by the size."""
    tried: list[int] = []
    sizes, given = iter([90, 70, 11]), []

    def with_size(size):
        given.append(size)
        return next(sizes)

    def with_default(factor=0.5):
        given.append(factor)
        return next(sizes)

    assert find_executable_batch_size(fits(20, tried), 100, with_size if takes_size else with_default)()[0] == 11
    assert tried == [100, 90, 70, 11]
    assert given == ([100, 90, 70] if takes_size else [0.5] * 3)


@pytest.mark.parametrize("start", [10, 0, -4])
def test_zero_ends_it(start):
    tried: list[int] = []
    last_error = r".*CUDA out of memory\. Tried" if start > 0 else "$"
    with pytest.raises(RuntimeError, match=r"^No executable batch size found, reached zero\." + last_error):
        find_executable_batch_size(fits(0, tried), starting_batch_size=start)()
    assert tried == ([10, 5, 2, 1] if start > 0 else [])


def test_the_plain_form_halves_and_logs_every_retry(caplog):
    """Any number of arguments: Accelerate counts *args as one parameter and refuses the second argument."""
    tried: list[int] = []
    with caplog.at_level(logging.WARNING, logger="trainapp.oom.decorator"):
        assert find_executable_batch_size(fits(20, tried))("a", "b", lr=1) == (16, ("a", "b"), {"lr": 1})
    assert tried == [128, 64, 32, 16]
    assert [record.args[::2] for record in caplog.records] == [(128, 64), (64, 32), (32, 16)]
    assert all("Tried to allocate 2.00 GiB" in record.getMessage() for record in caplog.records)


def test_zero_is_not_announced_as_the_next_try(caplog):
    with caplog.at_level(logging.WARNING, logger="trainapp.oom.decorator"), pytest.raises(RuntimeError):
        find_executable_batch_size(fits(0, []), starting_batch_size=3)()
    assert [record.args[::2] for record in caplog.records] == [(3, 1)]


@pytest.mark.parametrize(
    ("arguments", "keywords", "reason"),
    [
        ((128, 1, 2), {}, "too many positional arguments"),
        ((1,), {"batch_size": 128}, "multiple values for argument 'batch_size'"),
        ((), {}, "missing a required argument: 'a'"),
    ],
)
def test_a_call_with_the_batch_size_is_told_to_leave_it_out(arguments, keywords, reason):
    """As by Accelerate, with the type that it raises."""

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int, a: float, b: float = 1) -> None:
        raise AssertionError("not called")

    with pytest.raises(TypeError) as refused:
        train(*arguments, **keywords)
    advice = "batch_size is passed by the decorator; call train(a, b=1)"
    assert str(refused.value) == f"train(batch_size, a, b=1): {reason}; {advice}"


def test_arguments_that_a_decorator_supplies_are_not_counted():
    def with_model(function):
        @functools.wraps(function)
        def inner(batch_size):
            return function(batch_size, "model")

        return inner

    @find_executable_batch_size(starting_batch_size=8)
    @with_model
    def train(batch_size, model):
        return batch_size, model

    assert train() == (8, "model")


def test_a_function_that_takes_no_batch_size_is_refused():
    def train():
        raise AssertionError("not called")

    with pytest.raises(TypeError, match=r"^train\(\) must take the batch size as its first argument$"):
        find_executable_batch_size(train)()


def test_memory_is_free_before_the_next_try():
    alive_at_start: list[int] = []
    failed: list[weakref.ref] = []

    class Graph:
        """A reference cycle, as models and trainers have: only the garbage collector frees it."""

        def __init__(self, tensor):
            self.tensor, self.me = tensor, self

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        alive_at_start.append(sum(ref() is not None for ref in failed))
        weights = torch.zeros(4, 4, requires_grad=True)
        activations = [torch.zeros(batch_size, 4) @ weights for _ in range(3)]
        graph = Graph(torch.zeros(batch_size))
        failed.extend(weakref.ref(t.untyped_storage()) for t in (weights, *activations, graph.tensor))
        if batch_size > 2:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("wrapped") from error  # the cause's traceback holds the frames, too
        return batch_size

    gc.disable()  # the result must not depend on when the garbage collector runs
    try:
        assert train() == 2
    finally:
        gc.enable()
    assert alive_at_start == [0, 0, 0]

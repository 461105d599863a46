"""Where a draw has the samples: read from shapes, split and joined."""

import pytest
import torch

from trainapp.draws.layout import DrawLayout, RandomDraw, interleaved_layouts, layouts_by_shape
from trainapp.draws.record import DrawRecord


def test_a_sample_has_neighbouring_rows_or_rows_one_batch_apart():
    numbers = torch.arange(6)  # three samples with two rows each
    assert DrawLayout("x", 1, 0, rows=2).split(numbers, 3).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert DrawLayout("x", 1, 0, rows=2, interleaved=True).split(numbers, 3).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_join_is_the_inverse_of_split(axis, interleaved):
    tensor = torch.randn(6, 6, 6)
    layout = DrawLayout("x", 3, axis, rows=2, interleaved=interleaved)
    by_sample = layout.split(tensor, 3)
    assert by_sample.shape == (3, 2, 6, 6)
    assert by_sample.data_ptr() == tensor.data_ptr()  # a view: kernels write through it
    joined = layout.join(by_sample.clone())
    assert torch.equal(joined, tensor)
    assert joined.is_contiguous()


SHAPES = {  # of four samples, of two, the layout
    "first": ((4, 3), (2, 3), DrawLayout("x", 2, 0)),
    "last": ((3, 4), (3, 2), DrawLayout("x", 2, 1)),
    "two rows per sample": ((8, 3), (4, 3), DrawLayout("x", 2, 0, rows=2)),
    "shared": ((5, 3), (5, 3), DrawLayout("x", 2)),
    "two dimensions change": ((4, 4), (2, 2), DrawLayout("x", 2, varies=True)),
    "not in proportion": ((5, 3), (3, 3), DrawLayout("x", 2, varies=True)),
    "other dimensions": ((4, 3), (6,), DrawLayout("x", 2, varies=True)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_layout_is_read_from_two_shapes(name):
    shape, shape_of_half, layout = SHAPES[name]
    assert layouts_by_shape({0: RandomDraw("x", shape)}, {0: RandomDraw("x", shape_of_half)}, 4, 2) == {0: layout}


def test_a_draw_of_one_forward_alone_varies():
    """Also one by another kernel, or with other integers: `randperm(4)` and `randperm(2)`."""
    draws = {0: RandomDraw("x", (4,)), 1: RandomDraw("x", (4,)), 2: RandomDraw("randperm", (), (4,))}
    other_draws = {0: RandomDraw("y", (2,)), 2: RandomDraw("randperm", (), (2,))}
    assert all(layout.varies for layout in layouts_by_shape(draws, other_draws, 4, 2).values())


def test_only_samples_with_several_rows_can_be_interleaved():
    layouts = {0: DrawLayout("x", 2, 0), 1: DrawLayout("x", 2, 1, rows=2)}
    assert interleaved_layouts(layouts) == {0: layouts[0], 1: DrawLayout("x", 2, 1, rows=2, interleaved=True)}


def test_a_record_is_read_from_a_checkpoint_by_its_format():
    """`places`, with the fields of a layout in their order. What this process has noted stays."""
    saved = {"places": {"train ": {0: ["x", 2, 1, 3, True, False]}}, "depends": {"a": "saved"}, "draws": True}
    record = DrawRecord(depends={"a": "noted", "b": "noted"})
    record.load_state_dict(saved)
    assert record.layouts == {"train ": {0: DrawLayout("x", 2, axis=1, rows=3, interleaved=True, varies=False)}}
    assert record.depends == {"a": "noted", "b": "noted"}
    assert record.draws
    assert record.state_dict() == saved | {"depends": {"a": "noted", "b": "noted"}}


@pytest.mark.parametrize(("shape", "is_ambiguous"), [((5, 5, 8), True), ((5, 8, 5), True), ((5, 4, 8), False)])
def test_where_nothing_was_learnt_a_guess_among_several_dimensions_is_noted(shape, is_ambiguous):
    record = DrawRecord()
    assert record.layout_of("train ", 0, RandomDraw("bernoulli_.float", shape), 5).axis == 0
    notes = [f"bernoulli_ of {list(shape)}: several of its dimensions are as long as the micro-batch, which"]
    assert [text[: len(notes[0])] for text in record.depends.values()] == notes * is_ambiguous
    record = DrawRecord({"train ": {0: DrawLayout("bernoulli_.float", 3, 1)}})
    assert record.layout_of("train ", 0, RandomDraw("bernoulli_.float", (*shape[:2], 5)), shape[1]).axis == 1
    assert not record.depends  # it was learnt
    assert DrawRecord().layout_of("train ", 0, RandomDraw("uniform_", (1, 1)), 1).axis == 0

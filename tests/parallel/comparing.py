"""What tests compare: records of ranks with those of one process, or of other ranks."""

import pytest
import torch

from .cell import Cell
from .rank import Record

# Relative 2-norm error of the weights and of every step's gradient against one process: the same sums in another order,
# in fp32.
TOLERANCE = 2e-5


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return float((value - reference).norm() / reference.norm())


def errors(record: Record, reference: Record) -> list[float]:
    """Return the error of each step's gradient, then that of the final weights."""
    pairs = [*zip(record.gradients, reference.gradients, strict=True), (record.weights, reference.weights)]
    return [error(a, b) for a, b in pairs]


def together(records: list[Record]) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks, in rank order."""
    samples_of_all = {}
    for step in records[0].samples:
        samples_of_all[step] = [sample for record in records for sample in record.samples[step]]
    return samples_of_all


def assert_same(records: list[Record], reference: Record, tolerance: float = TOLERANCE) -> None:
    """Assert that the ranks have trained as one process: losses, gradients, weights and samples."""
    for record in records:
        assert record.error is None
        assert record.losses == pytest.approx(reference.losses, rel=tolerance)
        assert max(errors(record, reference)) < tolerance
        assert torch.equal(record.weights, records[0].weights)
    assert together(records) == reference.samples


def as_one(cell: Cell, world: int, spread: str, *overrides: str, tolerance: float = TOLERANCE) -> list[Record]:
    """Run the same configuration alone and on `world` ranks; both must agree. Return the ranks' records."""
    (reference,) = cell.reference(0, *overrides)
    records = cell.run(world, f"parallel={spread}", *overrides)
    assert_same(records, reference, tolerance)
    return records

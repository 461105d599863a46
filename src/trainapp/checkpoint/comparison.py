"""What differs between the checkpoints of two runs: bit for bit, and by how much."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trainapp.checkpoint import shards
from trainapp.checkpoint.checkpointer import load_values
from trainapp.checkpoint.directory import checkpoints_in, damage, resolve, step_of
from trainapp.checkpoint.manifest import read_manifest
from trainapp.checkpoint.plain_values import digest
from trainapp.checkpoint.shards import Sizes
from trainapp.errors import UserError
from trainapp.files import BEST, CHECKPOINTS
from trainapp.units import listed

_AT_ONCE = 256 * 2**20  # bytes that are read from each checkpoint together
_WIDE_AT_ONCE = 2**24  # numbers that are compared in 64 bits together
_OPTIMIZER = "optimizer"  # the outermost name of its tensors; all others are weights
# Entries of the plain values that belong to the weights: sparse tensors and the like, and the digest of the frozen
# base of adapters; and to the optimizer.
_OF_WEIGHTS = ("model_values", "base")
_OF_OPTIMIZER = ("optimizer_values",)
_NOT_COMPARED = ("sizes", "not_saved")  # how the micro-batch was searched, with times; names for a warning
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of one shape differs. Both numbers are inf where only one run's values are finite."""

    name: str
    largest: float  # the largest absolute difference
    relative: float  # |a - b| / max(|a|, |b|), 2-norms
    dtypes: tuple[str, str] | None  # if they differ


@dataclass
class CheckpointDifference:
    """How two checkpoints differ. Weights are those of the model, buffers and the weight average."""

    steps: tuple[int, int]
    equal: int = 0  # number of tensors of the weights that are equal bit for bit
    weights: list[TensorDifference] = field(default_factory=list)  # the most different first
    relative: float = 0.0  # the relative difference of all common weights as one vector
    shapes: list[tuple[str, str, str]] = field(default_factory=list)  # name and shapes of weights whose shapes differ
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    has_equal_values: bool = True  # what belongs to the weights but is not among the tensors
    has_equal_optimizer: bool = True
    others: list[str] = field(default_factory=list)  # names of further state, such as the position in the data

    @property
    def has_same_tensors(self) -> bool:
        """Whether both have weights of the same names and shapes, so that `relative` tells how far they are apart."""
        return self.has_equal_values and not (self.shapes or self.only_in_a or self.only_in_b)

    @property
    def is_equal(self) -> bool:
        """Whether weights and optimizer are equal bit for bit."""
        return self.has_same_tensors and not self.weights and self.has_equal_optimizer


# --- which checkpoints


def choose(run_a: Path, run_b: Path, which: int | str | None) -> tuple[Path, Path]:
    """Return the checkpoints of two runs to compare, verified.

    Raises UserError where there is none, or only a damaged one.

    Args:
        run_a: a run directory.
        run_b: another.
        which: a step; "best", the best of each run; or None, the newest of a step that both have, otherwise the newest
            of each.
    """
    if which == "best":
        return _best(run_a), _best(run_b)
    if isinstance(which, int):
        return _of_step(run_a, which), _of_step(run_b, which)

    # The newest of a step that both have.
    names_of_b = [path.name for path in checkpoints_in(run_b / CHECKPOINTS)]
    for checkpoint_a in checkpoints_in(run_a / CHECKPOINTS):
        checkpoint_b = run_b / CHECKPOINTS / checkpoint_a.name
        if checkpoint_a.name in names_of_b and _are_good(checkpoint_a, checkpoint_b):
            return checkpoint_a, checkpoint_b
    return resolve(str(run_a), "RUN_A"), resolve(str(run_b), "RUN_B")


def _best(run: Path) -> Path:
    return resolve(str(run / CHECKPOINTS / BEST), "trainapp diff --step best: RUN")


def _of_step(run: Path, step: int) -> Path:
    setting = f"trainapp diff --step {step}"
    checkpoints = {step_of(path): path for path in checkpoints_in(run / CHECKPOINTS)}
    if step not in checkpoints:
        steps = [str(available) for available in sorted(checkpoints)]
        steps_text = listed(steps, most=9) or "none"
        raise UserError(f"{setting}: {run} has no checkpoint of this step; it has: {steps_text}")
    return resolve(str(checkpoints[step]), f"{setting}: RUN")


def _are_good(*paths: Path) -> bool:
    for path in paths:
        problem = damage(path)
        if problem is not None:
            log.warning("checkpoint %s %s; comparing an earlier one", path, problem)
            return False
    return True


# --- comparing


def compare(a: Path, b: Path) -> CheckpointDifference:
    """Compare two verified checkpoints, a part at a time. Raises UserError for one that cannot be read."""
    sizes_of_a = shards.sizes(a)
    sizes_of_b = shards.sizes(b)
    steps = (read_manifest(a)["step"], read_manifest(b)["step"])
    difference = CheckpointDifference(steps)

    # Weights that only one has.
    only_in_a = sizes_of_a.keys() - sizes_of_b.keys()
    only_in_b = sizes_of_b.keys() - sizes_of_a.keys()
    difference.only_in_a = sorted(filter(_is_weight, only_in_a))
    difference.only_in_b = sorted(filter(_is_weight, only_in_b))

    # Weights that both have, in different shapes.
    common = [name for name in sizes_of_a if name in sizes_of_b]
    with_one_shape = [name for name in common if sizes_of_a[name][0] == sizes_of_b[name][0]]
    with_two_shapes = set(common).difference(with_one_shape)
    for name in sorted(filter(_is_weight, with_two_shapes)):
        difference.shapes.append((name, _shape_text(sizes_of_a, name), _shape_text(sizes_of_b, name)))

    # An optimizer's tensor that cannot be compared makes the optimizers different.
    not_comparable = (sizes_of_a.keys() | sizes_of_b.keys()).difference(with_one_shape)
    difference.has_equal_optimizer = all(_is_weight(name) for name in not_comparable)

    _compare_tensors(difference, a, b, with_one_shape, sizes_of_a, sizes_of_b)
    _compare_values(difference, a, b)
    return difference


def _is_weight(name: str) -> bool:
    return name.partition(".")[0] != _OPTIMIZER


def _shape_text(sizes: Sizes, name: str) -> str:
    return str(tuple(sizes[name][0]))


def _compare_tensors(
    difference: CheckpointDifference, a: Path, b: Path, names: Sequence[str], sizes_of_a: Sizes, sizes_of_b: Sizes
) -> None:
    """Compare the tensors of these names, each of one shape in both."""
    total = _Distance()
    for part in _parts(names, sizes_of_a, sizes_of_b):
        tensors_of_a = _read(a, part, sizes_of_a)
        tensors_of_b = _read(b, part, sizes_of_b)
        for name in part:
            tensor_of_a = tensors_of_a[name]
            tensor_of_b = tensors_of_b[name]
            is_equal = _has_equal_bits(tensor_of_a, tensor_of_b)

            # Of the optimizer's, only whether they are equal.
            if not _is_weight(name):
                difference.has_equal_optimizer &= is_equal
                continue

            # Equal weights count in the norms of all weights.
            distance = _Distance()
            distance.measure(tensor_of_a, tensor_of_b)
            if is_equal:
                distance.largest = 0.0  # inf - inf is nan: equal infinities have distance 0
                distance.squares = 0.0
                difference.equal += 1
            else:
                difference.weights.append(_tensor_difference(name, tensor_of_a, tensor_of_b, distance))
            total.add(distance)
    difference.weights.sort(key=lambda tensor: (-tensor.relative, tensor.name))
    difference.relative = total.relative


def _compare_values(difference: CheckpointDifference, a: Path, b: Path) -> None:
    """Compare everything besides the tensors."""
    values_of_a = load_values(a)
    values_of_b = load_values(b)
    for name in sorted(values_of_a.keys() | values_of_b.keys()):
        if name in _NOT_COMPARED or digest(values_of_a.get(name)) == digest(values_of_b.get(name)):
            continue
        if name in _OF_WEIGHTS:
            difference.has_equal_values = False
        elif name in _OF_OPTIMIZER:
            difference.has_equal_optimizer = False
        else:
            difference.others.append(name)


def _parts(names: Sequence[str], sizes_of_a: Sizes, sizes_of_b: Sizes) -> Iterator[list[str]]:
    """Yield groups of names whose tensors together take at most about `_AT_ONCE` bytes; a larger tensor forms its own
    group.
    """
    part: list[str] = []
    bytes_of_part = 0
    for name in names:
        shape, dtype_of_a = sizes_of_a[name]
        _, dtype_of_b = sizes_of_b[name]
        size = shape.numel() * max(dtype_of_a.itemsize, dtype_of_b.itemsize)
        if part and bytes_of_part + size > _AT_ONCE:
            yield part
            part = []
            bytes_of_part = 0
        part.append(name)
        bytes_of_part += size
    if part:
        yield part


def _read(path: Path, names: Sequence[str], sizes: Sizes) -> dict[str, Tensor]:
    """Read tensors, whole, into host memory."""
    tensors = {}
    for name in names:
        shape, dtype = sizes[name]
        tensors[name] = torch.empty(shape, dtype=dtype)
    shards.fill(tensors, path, no_dist=True)
    return tensors


def _has_equal_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bytes: two nan are equal, 0 and -0 are not."""
    return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class _Distance:
    """How far tensors are apart: the largest |a - b|, and the sums of squares of a - b, of a and of b."""

    largest: float = 0.0
    squares: float = 0.0
    squares_of_a: float = 0.0
    squares_of_b: float = 0.0

    def measure(self, a: Tensor, b: Tensor) -> None:
        """Add two tensors of one shape, in 64 bits."""
        wide = torch.complex128 if a.is_complex() else torch.float64

        # In parts: the tensors in 64 bits would take several times their memory.
        parts_of_a = a.reshape(-1).split(_WIDE_AT_ONCE)
        parts_of_b = b.reshape(-1).split(_WIDE_AT_ONCE)
        for part_of_a, part_of_b in zip(parts_of_a, parts_of_b, strict=True):
            if not part_of_a.numel():
                continue
            values_of_a = part_of_a.to(wide)
            values_of_b = part_of_b.to(wide)

            # The largest distance; inf where only one value is finite.
            distances = (values_of_a - values_of_b).abs()
            largest = float(distances.max())
            if not math.isfinite(largest):
                largest = math.inf
            self.largest = max(self.largest, largest)

            # For 2-norms.
            self.squares += float(distances.square().sum())
            self.squares_of_a += float(values_of_a.abs().square().sum())
            self.squares_of_b += float(values_of_b.abs().square().sum())

    def add(self, other: "_Distance") -> None:
        """Add another tensor's distance."""
        self.largest = max(self.largest, other.largest)
        self.squares += other.squares
        self.squares_of_a += other.squares_of_a
        self.squares_of_b += other.squares_of_b

    @property
    def relative(self) -> float:
        """|a - b| / max(|a|, |b|), 2-norms; inf where a value is not finite."""
        if self.squares == 0.0:
            return 0.0
        if not math.isfinite(self.squares + self.squares_of_a + self.squares_of_b):
            return math.inf
        larger_square = max(self.squares_of_a, self.squares_of_b)
        return math.sqrt(self.squares / larger_square)


def _tensor_difference(name: str, a: Tensor, b: Tensor, distance: _Distance) -> TensorDifference:
    dtypes = None
    if a.dtype != b.dtype:
        dtypes = (_dtype_name(a), _dtype_name(b))
    return TensorDifference(name, distance.largest, distance.relative, dtypes)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

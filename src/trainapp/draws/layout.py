"""The layout of a draw: which dimension of its tensor has the samples, and in what order."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor


class RandomDraw(NamedTuple):
    """A draw as it was called. sizes: the integers among its other arguments."""

    kernel: str  # the operation of ATen, such as `bernoulli_.float`
    shape: tuple[int, ...]  # of its first argument
    sizes: tuple[int, ...] = ()


class DrawLayout(NamedTuple):
    """Where a draw has the samples. The order of the fields is part of the checkpoint's format."""

    kernel: str
    dimensions: int
    # The samples' dimension. None where there is none: all micro-batches draw the same, unless `varies`.
    axis: int | None = None
    # How many entries of that dimension each sample has, such as two views, or the tokens of a flattened sequence.
    rows: int = 1
    # Whether a sample's rows are one batch apart, as in `cat([view, view])`, instead of neighbours.
    interleaved: bool = False
    # Whether its shape follows the batch in another way: it is then drawn per micro-batch.
    varies: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether all samples have the same numbers, whatever the micro-batch."""
        return self.axis is None and not self.varies

    def fits(self, draw: RandomDraw, samples: int) -> bool:
        """Return whether this can be the layout of the draw, of a batch of so many samples."""
        return draw.kernel == self.kernel and self.fits_shape(draw.shape, samples)

    def fits_shape(self, shape: Sequence[int], samples: int) -> bool:
        """Return whether a tensor of this shape can have so many samples in this layout."""
        if len(shape) != self.dimensions:
            return False
        return self.axis is None or shape[self.axis] == self.rows * samples

    def split(self, tensor: Tensor, samples: int) -> Tensor:
        """Return a view of the tensor by sample, [samples, rows, other dimensions]."""
        assert self.axis is not None, "a draw without samples"
        rows_first = tensor.movedim(self.axis, 0)
        if self.interleaved:
            return rows_first.unflatten(0, (-1, samples)).transpose(0, 1)
        return rows_first.unflatten(0, (samples, -1))

    def join(self, by_sample: Tensor) -> Tensor:
        """Return the tensor that `split` splits into this, as a contiguous one."""
        assert self.axis is not None, "a draw without samples"
        if self.interleaved:
            by_sample = by_sample.transpose(0, 1)
        return by_sample.flatten(0, 1).movedim(0, self.axis).contiguous()


def layouts_by_shape(
    draws: Mapping[int, RandomDraw], other_draws: Mapping[int, RandomDraw], samples: int, other_samples: int
) -> dict[int, DrawLayout]:
    """Return the layouts of a forward's draws, by number, as told by the shapes in two batches of different sizes.

    Whether rows are interleaved is not seen from shapes: the layouts say that they are not.

    Args:
        draws: of the forward of `samples` samples, by number.
        other_draws: of the same forward of `other_samples`.
        samples: the size of the one batch.
        other_samples: the size of the other.
    """
    layouts = {}
    for number, draw in draws.items():
        other_draw = other_draws.get(number)
        layouts[number] = _layout_by_shape(draw, other_draw, samples, other_samples)
    return layouts


def _layout_by_shape(draw: RandomDraw, other: RandomDraw | None, samples: int, other_samples: int) -> DrawLayout:
    dimensions = len(draw.shape)
    varying = DrawLayout(draw.kernel, dimensions, varies=True)

    # Only the same draw in the other forward can be compared.
    if other is None or (draw.kernel, draw.sizes, dimensions) != (other.kernel, other.sizes, len(other.shape)):
        return varying

    # The samples' dimension is the only one whose size follows the batch.
    changed_axes = [axis for axis, size in enumerate(draw.shape) if size != other.shape[axis]]
    if not changed_axes:
        return DrawLayout(draw.kernel, dimensions)
    if len(changed_axes) > 1:
        return varying
    axis = changed_axes[0]
    is_proportional = draw.shape[axis] * other_samples == other.shape[axis] * samples
    if not is_proportional:
        return varying
    return DrawLayout(draw.kernel, dimensions, axis, rows=draw.shape[axis] // samples)


def interleaved_layouts(layouts: Mapping[int, DrawLayout]) -> dict[int, DrawLayout]:
    """Return the layouts if samples with several rows have them one batch apart."""
    return {number: layout._replace(interleaved=layout.rows > 1) for number, layout in layouts.items()}

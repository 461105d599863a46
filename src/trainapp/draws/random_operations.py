"""The random operations: those of ATen that draw random numbers, replaced by draws that belong to samples.

Every random function of torch (`F.dropout`, `torch.randn_like`, the dropout of attention and `nn.LSTM`,
`torch.distributions`) ends in a few of them: `uniform_`, `normal_`, `bernoulli_`, `random_` and some rare ones.
`install` replaces their kernels through `torch.library`, so that calls from C++ are reached, too. Outside of a
`SampleDraws`, and where a generator is passed, they call torch's own; what draws nothing pays nothing.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.draws import counter_based, fused
from trainapp.draws.counter_based import BLOCK
from trainapp.draws.filling import Distribution, fill_by_sample
from trainapp.draws.layout import DrawLayout, RandomDraw
from trainapp.draws.record import EVALUATION, OWN_GENERATOR, TopicKind, shown_name
from trainapp.draws.sample_draws import SampleDraws
from trainapp.draws.splitmix64 import hashed, signed
from trainapp.torch_private import draws_numbers

# Computed for all samples at once.
_DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform_": counter_based.uniform,
    "normal_": counter_based.normal,
    "exponential_": counter_based.exponential,
    "bernoulli_.float": counter_based.bernoulli,
    "bernoulli_.Tensor": counter_based.bernoulli,
    "random_.from": counter_based.integers,
    "random_.to": counter_based.integers_below,
}
# Drawn by torch's own kernel, sample by sample.
_RARE = (
    "random_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "multinomial",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "randperm.generator_out",
)
# Computed by other operations.
_NORMAL = ("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
_OUT = ("bernoulli.out", "multinomial.out", "rrelu_with_noise.out", *(f"{name}_out" for name in _NORMAL))
OPERATIONS = (*_DISTRIBUTIONS, *_RARE, *_NORMAL, *_OUT)

# On CUDA these draw inside of a fused kernel. Dropout is computed by another operation; the others are only noted.
_DROPOUT = "native_dropout"
_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_cudnn_rnn",
)


def belong_to_samples(draws: str, device: torch.device) -> bool:
    """Return whether with this `train.draws` a forward on the device draws by sample."""
    return draws == "per_sample" and device.type in BLOCK


# --- replacing the kernels


class OperationCall(NamedTuple):
    """A call of an operation inside of a `SampleDraws`."""

    sample_draws: SampleDraws
    name: str  # of the operation, such as `bernoulli_.float`
    torch_kernel: Callable[..., Any]  # torch's own, called with args and kwargs
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@functools.cache
def install(device_type: str) -> torch.library.Library:
    """Replace the operations on this type of device, once per process."""
    dispatch_key = device_type.upper()
    names = OPERATIONS
    if device_type != "cpu":
        names = (*OPERATIONS, _DROPOUT, *_FUSED)
    library = torch.library.Library("aten", "IMPL")
    for name in names:
        try:
            original = torch.library.get_kernel(f"aten::{name}", dispatch_key)
        except RuntimeError:  # a plan for a GPU that this build of torch does not know, or another version
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            library.impl(name, _replacement(name, original), dispatch_key, with_keyset=True)
    return library


def _replacement(name: str, original: Any) -> Callable[..., Any]:
    """Return the kernel in place of `original`."""
    compute = _way_to_compute(name)

    def replacement(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Draws of no micro-batch, or from a generator that was passed, are torch's own.
        sample_draws = SampleDraws.active
        if sample_draws is None or not sample_draws.covers_thread():
            return original.call_boxed(keyset, *args, **kwargs)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            sample_draws.draw_record.note(OWN_GENERATOR, "the forward draws from a generator of its own")
            return original.call_boxed(keyset, *args, **kwargs)

        torch_kernel = functools.partial(original.call_boxed, keyset)
        return compute(OperationCall(sample_draws, name, torch_kernel, args, kwargs))

    return replacement


def _way_to_compute(name: str) -> Callable[[OperationCall], Any]:
    if name in _NORMAL:
        return _normal_around
    if name in _OUT:
        return _into_out
    if name == _DROPOUT:
        return _dropout
    if name in _FUSED:
        return _note_fused
    return _draw


# --- the operations that draw


class NumberedDraw(NamedTuple):
    """A draw with its number in the forward."""

    draw: RandomDraw
    seed: int  # the number, after the micro-batch's first seed
    layout: DrawLayout


def _draw(call: OperationCall) -> Any:
    """Draw what belongs to samples sample by sample, and anything else once for all of them."""
    target = call.args[0]
    if isinstance(target, Tensor) and target.is_complex():
        return _draw_complex(call)
    numbered = _next_draw(call)
    if numbered.layout.axis is None:
        return _draw_without_samples(call, numbered)
    if not target.numel():
        return call.torch_kernel(*call.args, **call.kwargs)

    # Draw each sample's part from its own key.
    samples, layout = _rows_of_samples(call.sample_draws, target, numbered.layout)
    seed = signed(hashed(numbered.seed))
    distribution = _DISTRIBUTIONS.get(call.name)
    is_unbounded = any(value is None for value in call.args)  # `random_(low, None)`: up to the dtype's largest number
    if distribution is None or is_unbounded:
        return _draw_one_by_one(call, layout, call.sample_draws.keys_on_host(samples, seed))
    arguments = call.args[1:]
    sample_keys = call.sample_draws.sample_keys(target.device, samples)
    fused_draw = fused.fused_draw(distribution, target, arguments)
    if fused_draw is not None:
        return fused.fill(fused_draw, target, layout, sample_keys, seed)
    return fill_by_sample(distribution, target, layout, sample_keys + seed, arguments)


def _next_draw(call: OperationCall) -> NumberedDraw:
    """Return the coming draw. The seed advances with every one."""
    target = call.args[0]  # the tensor to fill, or one with a distribution's parameters; `randperm` has none
    shape = tuple(target.shape) if isinstance(target, Tensor) else ()
    sizes = tuple(value for value in call.args if type(value) is int)
    draw = RandomDraw(call.name, shape, sizes)
    seed = call.sample_draws.next_seed()
    return NumberedDraw(draw, seed, call.sample_draws.layout_of(seed, draw))


def _rows_of_samples(sample_draws: SampleDraws, target: Tensor, layout: DrawLayout) -> tuple[int, DrawLayout]:
    """Return how many samples the target has, and in which layout. If all draw alike, each row is a sample."""
    if not sample_draws.alike:
        return len(sample_draws.positions), layout
    assert layout.axis is not None, "a draw without samples"
    return target.shape[layout.axis], layout._replace(rows=1, interleaved=False)


def _draw_complex(call: OperationCall) -> Any:
    """Fill a complex tensor by the draw of its real and imaginary parts."""
    target: Tensor = call.args[0]
    if call.name == "uniform_":
        torch.view_as_real(target).uniform_(*call.args[1:])
        return target
    if call.name == "normal_":
        return _complex_normal(*call.args)
    return call.torch_kernel(*call.args, **call.kwargs)  # raises: other distributions have no complex numbers


def _complex_normal(target: Tensor, mean: complex = 0.0, std: float = 1.0) -> Tensor:
    torch.view_as_real(target).normal_(0.0, std / math.sqrt(2))  # both parts share the variance
    return target.add_(mean)


def _draw_without_samples(call: OperationCall, numbered: NumberedDraw) -> Any:
    """Draw by torch's kernel: the same in all micro-batches or, if the shape varies, other numbers in each, noted."""
    draw, seed, layout = numbered
    if layout.varies:
        seed = hashed(seed, call.sample_draws.positions[0])
        shape = list(draw.shape or draw.sizes)
        work = " in evaluation" if call.sample_draws.work == EVALUATION else ""
        text = f"{shown_name(call.name)} of {shape}{work}: none of its dimensions is known to be that of the samples"
        call.sample_draws.draw_record.note(TopicKind.DRAWS.topic(call.name), text)
    target = call.args[0]
    if not isinstance(target, Tensor):  # `randperm`
        target = call.kwargs["out"]
    return _draw_seeded(call, target.device, seed, call.args)


def _draw_seeded(call: OperationCall, device: torch.device, seed: int, args: Sequence[Any]) -> Any:
    """Call torch's kernel with a generator of its own; the operations that it calls are torch's own, too."""
    generator = torch.Generator(device).manual_seed(hashed(seed))
    keywords = {**call.kwargs, "generator": generator}
    with SampleDraws.suspended():
        return call.torch_kernel(*args, **keywords)


def _draw_one_by_one(call: OperationCall, layout: DrawLayout, keys: Sequence[int]) -> Tensor:
    """Call torch's kernel for each sample, with its key. Holds the result twice. Waits for the device only where
    torch's kernel does, as that of multinomial.
    """
    target = call.args[0]
    base_name = call.name.partition(".")[0]
    is_in_place = base_name.endswith("_")
    written = None  # the index of the argument that the kernel fills
    if call.name.startswith("rrelu"):
        written = 1  # the noise, which the backward needs; the first argument is the input
    elif is_in_place:
        written = 0

    # Draw into copies, and copy what was drawn into the views of the whole tensor.
    results = []
    args_by_sample = [_split_argument(value, layout, len(keys)) for value in call.args]
    for key, *sample_args in zip(keys, *args_by_sample, strict=True):
        copies = [_contiguous_copy(value) for value in sample_args]
        results.append(_draw_seeded(call, target.device, key, copies))
        if written is not None:
            sample_args[written].copy_(copies[written])
    if written == 0:
        return target

    joined = layout.join(torch.stack(results))
    if is_in_place:
        return target.copy_(joined)
    return joined


def _split_argument(value: Any, layout: DrawLayout, samples: int) -> Sequence[Any]:
    """Return each sample's part of an argument: views of a tensor with the draw's layout, else the whole argument."""
    if isinstance(value, Tensor) and layout.fits_shape(value.shape, samples):
        return layout.split(value, samples).unbind()
    return [value] * samples


def _contiguous_copy(value: Any) -> Any:
    """Return a copy of a tensor, and any other value as it is: the order in which a kernel draws may follow strides."""
    if not isinstance(value, Tensor):
        return value
    return value.clone(memory_format=torch.contiguous_format)


# --- the operations that are computed by others


def _normal_around(call: OperationCall) -> Tensor:
    """`torch.normal(mean, std)`, where at least one of them is a tensor."""
    mean, std = (*call.args, 1.0)[:2]
    standard_normal = torch.empty_like(mean + std).normal_()
    return standard_normal.mul_(std).add_(mean)


def _into_out(call: OperationCall) -> Tensor:
    """`out=`, by the operation without it."""
    # `normal.Tensor_float_out` is `normal` with the overload `Tensor_float`, `bernoulli.out` its default.
    base, _, overload = call.name.removesuffix("_out").removesuffix(".out").partition(".")
    packet = getattr(torch.ops.aten, base)
    operation = getattr(packet, overload or "default")
    result = operation(*call.args)
    out: Tensor = call.kwargs["out"]
    return out.resize_(result.shape).copy_(result)


def _dropout(call: OperationCall) -> Any:
    """`native_dropout`, by the draw of `bernoulli_`: the result and the mask."""
    inputs, p, train = call.args
    if train is False or not 0 < p < 1:
        return call.torch_kernel(inputs, p, train)
    mask = torch.empty_like(inputs, dtype=torch.bool)
    if not fused.can_drop(inputs):
        mask.bernoulli_(1 - p)
        return _dropped(inputs, mask, p), mask

    # The same draw, whose kernel writes the result, too.
    bernoulli = torch.ops.aten.bernoulli_.float
    draw_mask = OperationCall(call.sample_draws, "bernoulli_.float", bernoulli, (mask, 1 - p), {})
    numbered = _next_draw(draw_mask)
    if numbered.layout.axis is None:
        _draw_without_samples(draw_mask, numbered)
        return _dropped(inputs, mask, p), mask
    samples, layout = _rows_of_samples(call.sample_draws, inputs, numbered.layout)
    sample_keys = call.sample_draws.sample_keys(inputs.device, samples)
    return fused.dropout(inputs, mask, p, layout, sample_keys, signed(hashed(numbered.seed))), mask


def _dropped(inputs: Tensor, mask: Tensor, p: float) -> Tensor:
    return inputs * mask * (1 / (1 - p))


def _note_fused(call: OperationCall) -> Any:
    """Call torch's kernel, and note that it draws."""
    if draws_numbers(_operator(call.name), call.args, call.kwargs):
        draw_record = call.sample_draws.draw_record
        draw_record.draws = True
        name = call.name.strip("_")
        text = f"{name} draws inside a fused kernel, by micro-batch; see `sdpa_kernel` of torch"
        draw_record.note(call.name, text)
    return call.torch_kernel(*call.args, **call.kwargs)


@functools.cache
def _operator(name: str) -> Any:
    """Return the operator of ATen: looking it up takes microseconds."""
    return getattr(torch.ops.aten, name).default

"""torch's random numbers, sample by sample: inside `rng.SampleDraws` they depend on the sample, not on the micro-batch.

Every random function of torch (`F.dropout`, `torch.randn_like`, the dropout of attention and `nn.LSTM`,
`torch.distributions`) ends in a few kernels of ATen: `uniform_`, `normal_`, `bernoulli_`, `random_` and some rare ones.
`install` replaces these leaves through `torch.library`, so that calls from C++ are reached, too. Outside of a
`SampleDraws`, and where a generator is passed, they call torch's own; what draws nothing pays nothing.

The common ones are computed for the whole micro-batch by SplitMix64 (see `data.sampler`) on int64 tensors: an element
is a hash of (key, number of the draw, position of the sample, coordinates in the sample), so that padding changes
nothing before it. For the others torch's own kernel draws one sample after the other, with a generator seeded for each.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainapp.rng import FACTORS, GAMMA, DrawLayout, RandomDraw, SampleDraws, hashed, signed, topic_of
from trainapp.torch_private import draws_numbers

# Elements drawn at a time, of one sample and of all: on the CPU they fit the cache, on a GPU launches are few.
BLOCK = {"cpu": 2**16, "cuda": 2**20}
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a mantissa

Fill = Callable[..., Tensor]  # (keys [k, 1], first element, number of elements, dtype, *arguments) -> [k, elements]


def belong_to_samples(draws: str, device: torch.device) -> bool:
    """Whether with this `train.draws` a forward on the device draws by sample."""
    return draws == "per_sample" and device.type in BLOCK


# --- random numbers from keys: [k, 1] of them and `count` elements, from the `first` on, give [k, count], of which an
# element depends on its number alone


@functools.cache
def _steps(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the table is used outside of it, too
        return torch.arange(1, BLOCK[device.type] + 1, device=device) * signed(GAMMA)


def _mix_(z: Tensor) -> Tensor:
    """`rng.hashed`'s finaliser, in place on int64."""
    shifted = torch.empty_like(z)
    for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1]), (31, None)):
        torch.bitwise_right_shift(z, shift, out=shifted).bitwise_and_((1 << 64 - shift) - 1)  # >> copies the sign
        z.bitwise_xor_(shifted)
        if factor is not None:
            z.mul_(signed(factor))
    return z


def _words(keys: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Random integers of `dtype`, [k, count]: a word of 64 bits gives one, two or four."""
    per_word = 8 // dtype.itemsize
    start = keys + signed(first // per_word * GAMMA)
    return _mix_(start + _steps(keys.device)[: -(-count // per_word)]).view(dtype)[:, :count]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)


def _unit(keys: Tensor, first: int, count: int, dtype: torch.dtype, is_open: bool = False) -> Tensor:
    """Uniform on [0, 1), with all bits of the mantissa, as torch's; is_open: on (0, 1), for logarithms."""
    bits = _BITS[dtype] - is_open
    words = _words(keys, first, count, torch.int64 if dtype is torch.float64 else torch.int32)
    unit = words.bitwise_and_((1 << bits) - 1).to(_wide(dtype))
    return (unit.add_(0.5) if is_open else unit).mul_(2.0**-bits)


def _uniform(keys: Tensor, first: int, count: int, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    unit = _unit(keys, first, count, dtype)
    return unit if (low, high) == (0.0, 1.0) else unit.mul_(high - low).add_(low)


def _normal(keys: Tensor, first: int, count: int, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """By Box and Muller, from pairs of neighbours."""
    unit = _unit(keys, first, count + count % 2, _wide(dtype), is_open=True)
    radius, angle = unit[:, ::2].contiguous().log_().mul_(-2).sqrt_(), unit[:, 1::2] * (2 * math.pi)
    torch.mul(angle.cos(), radius, out=unit[:, ::2])
    torch.mul(angle.sin_(), radius, out=unit[:, 1::2])
    return unit[:, :count] if (mean, std) == (0.0, 1.0) else unit[:, :count].mul_(std).add_(mean)


def _exponential(keys: Tensor, first: int, count: int, dtype: torch.dtype, rate: float = 1.0) -> Tensor:
    return _unit(keys, first, count, _wide(dtype), is_open=True).log_().mul_(-1 / rate)


def _bernoulli(keys: Tensor, first: int, count: int, dtype: torch.dtype, p: float | Tensor = 0.5) -> Tensor:
    """16 bits are enough for probabilities that are not extreme: off by at most 2**-17."""
    if isinstance(p, Tensor):
        return _unit(keys, first, count, _wide(p.dtype)) < p
    if 0.02 <= p <= 0.98:
        return _words(keys, first, count, torch.int16) < round(p * 2**16) - 2**15
    return _unit(keys, first, count, torch.float32) < p


def _integers(keys: Tensor, first: int, count: int, dtype: torch.dtype, low: int, high: int) -> Tensor:
    return _words(keys, first, count, torch.int64).bitwise_and_(2**63 - 1).remainder_(high - low).add_(low)


# --- the leaves

_FILLS: dict[str, Fill] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli,
    "random_.from": _integers,
    "random_.to": lambda keys, first, count, dtype, high: _integers(keys, first, count, dtype, 0, high),
}
_RARE = (  # by torch's own kernels
    *("random_", "geometric_", "cauchy_", "log_normal_", "multinomial", "poisson", "binomial", "_standard_gamma"),
    *("_sample_dirichlet", "rrelu_with_noise", "rrelu_with_noise_", "randperm.generator_out"),
)
_NORMAL = ("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")  # by `normal_`
_OUT = ("bernoulli.out", "multinomial.out", "rrelu_with_noise.out", *(f"{name}_out" for name in _NORMAL))
_FUSED = (  # on CUDA: what is drawn inside of a fused kernel is only noted
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_cudnn_rnn"),
)
LEAVES = (*_FILLS, *_RARE, *_NORMAL, *_OUT)
_Torchs = Callable[..., Any]  # torch's own kernel


@functools.cache
def install(device: str) -> torch.library.Library:
    """Replace the leaves of this type of device, once per process."""
    library, key = torch.library.Library("aten", "IMPL"), device.upper()
    for name in LEAVES if device == "cpu" else (*LEAVES, "native_dropout", *_FUSED):
        try:
            original = torch.library.get_kernel(f"aten::{name}", key)
        except RuntimeError:  # a plan for a GPU that this build of torch does not know, or another version
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            library.impl(name, _leaf(name, original), key, with_keyset=True)
    return library


def _leaf(name: str, original: Any) -> Callable[..., Any]:
    """The kernel in place of `original`."""
    special = {"native_dropout": _dropout}
    special |= dict.fromkeys(_NORMAL, _normal_around) | dict.fromkeys(_OUT, _into) | dict.fromkeys(_FUSED, _fused)
    draw = special.get(name, _draw)

    def leaf(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        drawing = SampleDraws.active
        if drawing is None or not drawing.covers_thread():
            return original.call_boxed(keyset, *args, **kwargs)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            drawing.note("own generator", "the forward draws from a generator of its own")
            return original.call_boxed(keyset, *args, **kwargs)
        return draw(drawing, name, functools.partial(original.call_boxed, keyset), args, kwargs)

    return leaf


def _draw(drawing: SampleDraws, name: str, torchs: _Torchs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    main, sizes = args[0], tuple(value for value in args if type(value) is int)
    is_tensor = isinstance(main, Tensor)  # `randperm` has none
    if is_tensor and main.is_complex():
        mean, std = [*args[1:], 0.0, 1.0][:2] if len(args) != 2 else [args[1], 1.0]
        torch.view_as_real(main).normal_(0.0, std / math.sqrt(2))
        return main.add_(mean)
    drawn = RandomDraw(name, tuple(main.shape) if is_tensor else (), sizes)
    seed = drawing.next_seed()
    place, samples = drawing.place(seed, drawn), len(drawing.positions)
    if place.axis is None:
        if place.varies:
            seed = hashed(seed, drawing.positions[0])
            shown = f"{name} of {list(drawn.shape or sizes)}"
            drawing.note(topic_of(name), f"{shown}: none of its dimensions is that of the samples")
        return _seeded(torchs, main.device if is_tensor else kwargs["out"].device, seed, args, kwargs)
    if drawing.alike:  # whichever rows are whose
        place, samples = place._replace(rows=1, interleaved=False), main.shape[place.axis]
    if not main.numel():
        return torchs(*args, **kwargs)
    keys = drawing.keys(main.device, samples) + signed(hashed(seed))
    if name in _FILLS and all(value is not None for value in args):
        return _filled(_FILLS[name], main, place, keys, args[1:])
    return _one_by_one(torchs, place, keys, args, kwargs)


def _seeded(torchs: _Torchs, device: torch.device, seed: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch's own kernel with a generator of its own; the leaves that it calls are torch's own, too."""
    with SampleDraws.suspended():
        return torchs(*args, **{**kwargs, "generator": torch.Generator(device).manual_seed(hashed(seed))})


def _one_by_one(
    torchs: _Torchs, place: DrawLayout, keys: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """torch's own kernel for each sample. Waits for the device, and holds the result twice."""
    main, name, results = args[0], place.kernel, []
    is_in_place = name.partition(".")[0].endswith("_")
    written = 1 if name.startswith("rrelu") else 0 if is_in_place else None

    def by_sample(value: Any) -> Any:
        is_split = (
            isinstance(value, Tensor)
            and value.dim() == main.dim()
            and place.fits(RandomDraw(name, value.shape), len(keys))
        )
        return _by_sample(value, place, len(keys)) if is_split else [value] * len(keys)

    for key, rows in zip(keys[:, 0].tolist(), zip(*map(by_sample, args), strict=True), strict=True):
        # Copies: the order in which a kernel draws may follow strides.
        own = [row.clone(memory_format=torch.contiguous_format) if isinstance(row, Tensor) else row for row in rows]
        results.append(_seeded(torchs, main.device, key, own, kwargs))
        if written is not None:
            rows[written].copy_(own[written])
    if written == 0:
        return main
    found = torch.stack(results)
    found = (
        (found.transpose(0, 1) if place.interleaved else found).flatten(0, 1).movedim(0, place.axis or 0).contiguous()
    )
    return main.copy_(found) if is_in_place else found


def _into(drawing: SampleDraws, name: str, torchs: _Torchs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`out=`, by the operation without it."""
    base, _, overload = name.removesuffix("_out").removesuffix(".out").partition(".")
    found = getattr(getattr(torch.ops.aten, base), overload or "default")(*args)
    out: Tensor = kwargs["out"]
    return out.resize_(found.shape).copy_(found)


def _normal_around(
    drawing: SampleDraws, name: str, torchs: _Torchs, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    mean, std = (*args, 1.0)[:2]
    return torch.empty_like(mean + std).normal_().mul_(std).add_(mean)


def _dropout(drawing: SampleDraws, name: str, torchs: _Torchs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, p, train = args
    if train is False or not 0 < p < 1:
        return torchs(source, p, train)
    mask = torch.empty_like(source, dtype=torch.bool).bernoulli_(1 - p)
    return source * mask * (1 / (1 - p)), mask


def _fused(drawing: SampleDraws, name: str, torchs: _Torchs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if draws_numbers(getattr(torch.ops.aten, name).default, args, kwargs):
        drawing.draw_record.draws = True
        drawing.note(
            name,
            f"{name.strip('_')} draws inside a fused kernel, by micro-batch; see `sdpa_kernel` of torch",
        )
    return torchs(*args, **kwargs)


# --- blocks of samples


def _by_sample(tensor: Tensor, place: DrawLayout, samples: int) -> Tensor:
    """A view, [samples, rows, ...]: a dimension can be split without a copy."""
    moved = tensor.movedim(place.axis or 0, 0)
    return moved.unflatten(0, (-1, samples)).transpose(0, 1) if place.interleaved else moved.unflatten(0, (samples, -1))


def _filled(fill: Fill, main: Tensor, place: DrawLayout, keys: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Fill a tensor block by block. Each row of a sample's last dimension has a key of its own."""
    samples, views = len(keys), _by_sample(main, place, len(keys))
    width, per, block = views.shape[-1], main.numel() // len(keys), BLOCK[main.device.type]
    offsets = _offsets(views.shape[1:-1], main.device)
    others = [_by_sample(one.expand_as(main), place, samples) if isinstance(one, Tensor) else one for one in args]
    for start, end in _ranges(samples, max(1, block // per)):
        part = views[start:end]
        own = [one[start:end].reshape(-1, width) if isinstance(one, Tensor) else one for one in others]
        try:
            flat = part.view(-1, width)
        except RuntimeError:  # the rows are not in one line: a copy
            flat = part.new_empty(len(offsets) * (end - start), width)
        of_rows = (keys[start:end] + offsets).view(-1, 1)
        for top, bottom in _ranges(len(flat), max(1, block // width)):
            for first, last in _ranges(width, block):
                taken = [one[top:bottom, first:last] if isinstance(one, Tensor) else one for one in own]
                flat[top:bottom, first:last] = fill(of_rows[top:bottom], first, last - first, main.dtype, *taken)
        if flat.data_ptr() != part.data_ptr():
            part.copy_(flat.view(part.shape))
    return main


def _offsets(shape: Sequence[int], device: torch.device) -> Tensor:
    """What the coordinates of each row add to its sample's key, flat."""
    offsets = torch.zeros(list(shape), dtype=torch.int64, device=device)
    for dimension, size in enumerate(shape):
        steps = torch.arange(size, device=device) * signed(hashed(dimension + 1) | 1)
        offsets.add_(steps.view(-1, *[1] * (len(shape) - dimension - 1)))
    return offsets.flatten()


def _ranges(end: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(end, start + size)) for start in range(0, end, size))

"""The precisions in which a task may be tried: fp64, on copies of a small model and its task; fp32; as it is trained.

Rounding may hide a difference that a check looks for: the first precision in which the task runs is used.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trainapp.draws.record import GLOBALS, ITERATORS, DrawRecord
from trainapp.errors import summary_of
from trainapp.losses.losses import CheckedTask
from trainapp.memory.cpu import uncompiled
from trainapp.state.stateful import Stateful, held_tensors
from trainapp.torch_private import copy_gradient_hooks
from trainapp.training.dependence import iterators_text
from trainapp.trials.modes import TrialSetup
from trainapp.trials.probe import ProbeInputs, TaskProbe, is_small, lacks_gradients
from trainapp.trials.samples import Samples
from trainapp.units import listed

FP64 = "fp64"  # the precision of copies
T = TypeVar("T")
log = logging.getLogger(__name__)


class ProbeFactory(NamedTuple):
    """A way to call a task in some precision."""

    precision: str  # in words
    make_probe: Callable[[], TaskProbe]


def precisions_to_try(
    setup: TrialSetup,
    samples: Samples,
    task: CheckedTask,
    noise: float | None = 0.0,
) -> list[ProbeFactory]:
    """Return how a task may be called, the most precise way first.

    Args:
        setup: has the model and the device.
        samples: the first ones.
        task: the task.
        noise: in small models' copies in fp64, see `probe_in_fp64`; None: no copies.
    """
    seed = setup.settings.seed
    inputs = ProbeInputs(task, setup.model, samples, setup.device, seed, setup.metric_names)
    return probe_factories(inputs, setup.autocast, noise)


def probe_factories(
    inputs: ProbeInputs, autocast: contextlib.AbstractContextManager[Any], noise: float | None = 0.0
) -> list[ProbeFactory]:
    """Return how a task may be called, the most precise way first.

    Args:
        inputs: the task and what it is called with.
        autocast: of forward and loss in training.
        noise: see `precisions_to_try`.
    """
    model = inputs.model
    factories = []

    # In fp64, which takes copies.
    if noise is not None and is_small(model, inputs.task.unchecked):
        factories.append(ProbeFactory(FP64, functools.partial(probe_in_fp64, inputs, noise)))

    # Without autocast.
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    precision = "fp32" if dtypes <= {torch.float32} else "the model's dtype"
    factories.append(ProbeFactory(precision, functools.partial(TaskProbe, inputs)))

    # With it.
    probe_as_trained = functools.partial(TaskProbe, inputs, call_context=lambda: autocast)
    factories.append(ProbeFactory("as trained", probe_as_trained))
    return factories


# --- the first precision that works


@dataclass(frozen=True)
class ProbeResult(Generic[T]):
    """The first result that raised no error."""

    value: T
    precision: str  # of its probe
    failures: dict[str, str]  # why there is none in a higher precision, by precision
    written_globals: Collection[str]  # names of the global variables that the calls have written
    advanced_iterators: Collection[str]  # names of the iterators from which the calls have taken items
    batchnorms_of_embed: Collection[str]  # see `DrawRecord`


def note_traces(result: ProbeResult[Any], draw_record: DrawRecord) -> None:
    """Record which global variables the calls have written, which iterators they have advanced, and which BatchNorm
    layers of an embedding loss see a micro-batch: what `training.dependence` says.
    """
    draw_record.batchnorms_of_embed.update(result.batchnorms_of_embed)
    if result.advanced_iterators:
        draw_record.depends[ITERATORS] = iterators_text(result.advanced_iterators)
    if result.written_globals:
        draw_record.depends[GLOBALS] = (
            f"the forward writes {listed(sorted(result.written_globals))}, which is part of no checkpoint, and "
            "restored when a step is retried only if it is a number, a string or a tuple of these; make it a buffer of "
            "the model, or return it from a state_dict"
        )


def first_working_result(
    factories: Sequence[ProbeFactory], use: Callable[[TaskProbe], T], is_trained: bool = False
) -> ProbeResult[T]:
    """Return what `use` returns for the first probe that raises no error. Raises the error of the last of them.

    Args:
        factories: of the probes, in the order in which they are tried.
        use: calls the task.
        is_trained: whether a run calls the task with gradients. A probe then does so, too, if the task needs them.
    """
    failures: dict[str, str] = {}
    for precision, make_probe in factories:
        try:
            with uncompiled():
                probe = make_probe()
                value = _use_with_gradients_if_needed(probe, use, is_trained)
        except Exception as error:
            failures[precision] = summary_of(error)
            if len(failures) == len(factories):
                raise
            continue

        lost = probe.snapshot.lost
        if lost:
            log.warning("a trial call of the task has changed %s in place; frozen, it had no copy", listed(lost))
        return ProbeResult(
            value, precision, failures, probe.written_globals, probe.advanced_iterators, probe.batchnorms_of_embed
        )
    raise ValueError("no way to call the task")


def _use_with_gradients_if_needed(probe: TaskProbe, use: Callable[[TaskProbe], T], is_trained: bool) -> T:
    """Return what `use` returns, with gradients where it fails for want of them, as with a gradient penalty."""
    try:
        return use(probe)
    except RuntimeError as error:
        if not (is_trained and lacks_gradients(error)):
            raise
    probe.with_gradients = True
    return use(probe)


# --- copies in fp64


def probe_in_fp64(inputs: ProbeInputs, noise: float) -> TaskProbe:
    """Return a probe of copies of task and model in fp64, also the default dtype of a call.

    Raises errors of copying, and `copy.Error` if a copy shares tensors of a module with its original. What else cannot
    be converted, such as a tensor in a closure, fails when called.

    Args:
        inputs: the originals, and what they are called with.
        noise: the standard deviation of what is added to parameters: a layer that begins at zero hides what is before
            it.
    """
    task = inputs.task
    model = inputs.model

    # Copy model and task in one call, so that what they share is shared by the copies, too.
    originals = _outermost_modules(model, task.unchecked)
    tensor_copies = _tensor_copies(originals.values(), task, model)
    copied_model, copied_task = copy.deepcopy((model, task.unchecked), tensor_copies)

    # Convert the copies, and nothing but them.
    copies = _outermost_modules(copied_model, copied_task)
    _require_separate(copies, originals)
    for module in copies.values():
        module.double()
    _add_noise(copied_model, noise)
    if inputs.written is None:  # in training, hooks may belong to the optimizer
        for original, parameter in zip(_parameters(originals), _parameters(copies), strict=True):
            copy_gradient_hooks(original, parameter)

    copied_inputs = dataclasses.replace(inputs, task=CheckedTask(copied_task, task.setting), model=copied_model)
    return TaskProbe(copied_inputs, call_context=_fp64_by_default, dtype=torch.float64)


def _outermost_modules(model: nn.Module, task: Any) -> dict[str, nn.Module]:
    """Return the model and the modules found outside of it, by name."""
    return {"model": model, **Stateful(model=model, task=task).modules}


def _parameters(modules: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    parameters: dict[nn.Parameter, None] = {}  # in order, each once
    for module in modules.values():
        parameters |= dict.fromkeys(module.parameters())
    return list(parameters)


def _tensor_copies(modules: Iterable[nn.Module], task: CheckedTask, model: nn.Module) -> dict[int, Tensor]:
    """Return, by id, for `copy.deepcopy`: the tensors in attributes, which `module.double()` does not reach, and those
    that it cannot copy (2.13: compressed sparse and nested ones).
    """
    registered = _ids_of_tensors(modules)
    copies = {}
    for tensor in held_tensors([model, task.unchecked]):
        can_be_copied = tensor.layout is torch.strided and not tensor.is_nested
        is_out_of_reach = id(tensor) not in registered and tensor.is_floating_point()
        if can_be_copied and not is_out_of_reach:
            continue
        tensor_copy = tensor.detach().clone()
        if tensor.is_floating_point():
            tensor_copy = tensor_copy.double().requires_grad_(tensor.requires_grad)
        copies[id(tensor)] = tensor_copy
    return copies


def _require_separate(copies: Mapping[str, nn.Module], originals: Mapping[str, nn.Module]) -> None:
    """Raise `copy.Error` where converting the copies would convert their originals: `copy.deepcopy` copies neither a
    function's closure nor what a class returns as its own copy.
    """
    original_tensors = _ids_of_tensors(originals.values())
    for name, module_copy in copies.items():
        for path, module in module_copy.named_modules(prefix=name):
            for tensor in _registered_tensors(module, recurse=False):
                if id(tensor) in original_tensors:
                    raise copy.Error(f"the copy shares {path} ({type(module).__name__}), such as by a closure")


def _ids_of_tensors(modules: Iterable[nn.Module]) -> set[int]:
    ids: set[int] = set()
    for module in modules:
        ids.update(id(tensor) for tensor in _registered_tensors(module))
    return ids


def _registered_tensors(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    # The class's own methods: those of a model may be overridden, without this argument.
    yield from nn.Module.parameters(module, recurse)
    yield from nn.Module.buffers(module, recurse)


def _add_noise(model: nn.Module, standard_deviation: float) -> None:
    """Add normal random numbers to the floating-point parameters, the same in every call."""
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same numbers on every device
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.device), alpha=standard_deviation)


@contextlib.contextmanager
def _fp64_by_default() -> Iterator[None]:
    """Make fp64 torch's default dtype inside the block."""
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype_before)

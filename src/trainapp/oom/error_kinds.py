"""Which errors a run recovers from: memory ran out, or another number of samples may avoid the model's own error."""

import re
from traceback import walk_tb

import torch
from torch import nn

from trainapp.data.loader import Fetcher
from trainapp.errors import NotFinite, OutOfMemory, UserError, add_note
from trainapp.losses.losses import CheckedTask
from trainapp.memory.detection import is_out_of_memory
from trainapp.models.inspect import batchnorms
from trainapp.sizes.failures import ErrorKind
from trainapp.training.memory_watch import refused_in_attempt
from trainapp.training.phase import Phase
from trainapp.training.session import Session

_NO_ENGINE = re.compile(r"unable to find an engine to execute|unable to find a valid cuDNN algorithm", re.IGNORECASE)
# Of kernels that are asked for more elements than 32 bits can index, or for more blocks than a launch takes. CUDA's
# error leaves the device intact.
_BEYOND_A_KERNEL = re.compile(
    r"CUDA error: invalid configuration argument|canUse32BitIndexMath|32-?bit index|less than INT_MAX elements"
    r"|int32 (?:index )?overflow",
    re.IGNORECASE,
)

# Of autograd where nothing is recorded.
_NO_GRAPH = re.compile(r"does not require grad|do(?:es)? not have a grad_fn|appears to not have been used in the graph")
# Of kernels that refuse an input whatever its number of samples.
_OF_ANY_NUMBER = re.compile(
    r"\bdtypes?\b|scalar type|type \([^)]*\) should be the same|on the same device|not implemented", re.IGNORECASE
)

# What models raise for too few samples. Not UserErrors, nor signals.
MODEL_ERRORS = (ValueError, RuntimeError, LookupError, AssertionError, ArithmeticError)


def recoverable_kind(session: Session, error: Exception) -> ErrorKind | None:
    """Return what kind of error to recover from this is. Call while the error is handled.

    None: it ends the run. Then it may have advice in a note, if the number of samples can have caused it.
    """
    if not session.config.oom.enabled or session.engine.phase is Phase.SAVE:
        return None
    if _lacks_deterministic_engine(session, error):
        return ErrorKind.NO_ENGINE
    if is_out_of_memory(error, refused_in_attempt(session)):
        return ErrorKind.OUT_OF_MEMORY
    if _is_too_large_for_kernel(session, error):
        return ErrorKind.TOO_LARGE_FOR_KERNEL
    if _has_too_few_samples(session, error):
        return ErrorKind.TOO_FEW_SAMPLES
    if _rejects_larger_size(session, error):
        return ErrorKind.SIZE_REJECTED
    if _refuses_technique(session, error):
        return ErrorKind.TECHNIQUE_REFUSED
    _advise_on_evaluation(session, error)
    return None


def _lacks_deterministic_engine(session: Session, error: Exception) -> bool:
    """Return whether cuDNN, asked for deterministic algorithms while a size is unsettled, has found none."""
    is_asked = session.sizes.autotuner is not None and torch.backends.cudnn.deterministic
    return is_asked and isinstance(error, RuntimeError) and bool(_NO_ENGINE.search(str(error)))


def _is_too_large_for_kernel(session: Session, error: Exception) -> bool:
    """Return whether a micro-batch whose size is not validated yet has too many elements for a kernel."""
    phase = session.engine.phase
    sizes = session.sizes.evaluation if phase is Phase.EVALUATE else session.sizes.train
    may_be_smaller = sizes.is_unvalidated and sizes.can_shrink and phase.depends_on_size and not phase.is_partly_applied
    if not (may_be_smaller and isinstance(error, RuntimeError) and _BEYOND_A_KERNEL.search(str(error))):
        return False
    return _device_works(session)


def _has_too_few_samples(session: Session, error: Exception) -> bool:
    """Return whether this error of the model may come from a micro-batch with too few samples, as BatchNorm's does for
    one: larger ones of this shape have run, or ran out of memory, and the step has more samples.

    An error that comes again with more samples is the user's: it is raised once no larger micro-batch is known to have
    run.
    """
    if not _is_of_model(session, error):
        return False
    samples_in_step = len(session.batches.share(session.state.progress).numbers)
    sizes = session.sizes.train
    if not (sizes.may_have_too_few and sizes.current.samples < samples_in_step):
        _advise_against_single_sample(session, error, samples_in_step)
        return False
    return _device_works(session)


def _rejects_larger_size(session: Session, error: Exception) -> bool:
    """Return whether this error of the model comes with a larger micro-batch than one that is validated, such as an odd
    one for a model that pairs its samples: the search tries sizes of its own.

    An error that comes again with the validated size is the user's.
    """
    return _is_of_model(session, error) and session.sizes.train.tries_larger_size and _device_works(session)


def _refuses_technique(session: Session, error: Exception) -> bool:
    """Return whether this error may come from the technique that was turned on last: no step was made with it yet, and
    a forward or a backward has failed, or a loss that it changes.
    """
    climb = session.recovery.climb
    if climb is None or session.meter.samples:
        return False
    if isinstance(error, (OutOfMemory, NotFinite)) or not isinstance(error, (*MODEL_ERRORS, UserError)):
        return False

    # Checkpointed blocks cannot be the cause of an error of the loss outside of the model.
    phase = session.engine.reported_phase
    if phase is Phase.FORWARD:
        can_be_cause = not climb.recomputes or _passed_through(error, (nn.Module,))
    else:
        can_be_cause = phase is Phase.BACKWARD or phase.updates_in_backward
    return can_be_cause and _device_works(session)


def _advise_on_evaluation(session: Session, error: Exception) -> None:
    """Add advice to an error that the number of samples of an evaluation micro-batch may have caused: that of a module
    or the task, in a number that no step has trained, or of collating. Likewise to a derivative that is taken without
    gradients.
    """
    if session.engine.phase is not Phase.EVALUATE or not isinstance(error, MODEL_ERRORS):
        return
    config = session.config
    if _NO_GRAPH.search(str(error)):
        work = f"mode={config.mode}" if config.activity.writes_rows else "an evaluation"
        add_note(
            error,
            f"{work} runs without gradients (torch.no_grad): what takes a derivative, such as a gradient penalty, must "
            "compute it inside `with torch.enable_grad():`, from inputs with requires_grad_(), or in training mode "
            "only (model.training)",
        )
        return
    if isinstance(error, KeyError | NotImplementedError) or _OF_ANY_NUMBER.search(str(error)):
        return

    setting = "batch.eval_micro_size"
    if config.activity.writes_rows:
        setting = f"{config.mode}.batch_size"
    collated_samples = _collated_samples(error)
    samples = collated_samples or session.sizes.evaluation.current.samples
    if collated_samples:
        advice = (
            f"if its samples are chunks of different lengths, such as a shorter last one, set {setting}=1, "
            "or pad them in the data's `collate`"
        )
    else:
        is_trained_number = samples in session.sizes.train.schedule.in_force.values()
        if is_trained_number or not _passed_through(error, (nn.Module, CheckedTask)):
            return
        advice = (
            f"if the model takes other numbers only, set {setting} to one that divides the number of "
            "samples in the evaluation set; the rest of a division is a smaller one"
        )
    size_text = f"{setting}={config.batch.eval_micro_size}"  # in other modes it has their setting's value
    if setting == "batch.eval_micro_size":
        size_text += f", batch.global_size={config.batch.global_size}"
    add_note(error, f"in an evaluation micro-batch of {samples} samples ({size_text}): {advice}")


def _collated_samples(error: Exception) -> int:
    """Return the number of samples in whose collating the error was raised; 0 if it was raised elsewhere."""
    fetching_frame = None
    for frame, _ in walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), Fetcher):
            fetching_frame = frame  # the innermost: fetching a sample has a frame of its own
    if fetching_frame is None or fetching_frame.f_code is not Fetcher.__getitem__.__code__:
        return 0
    return len(fetching_frame.f_locals.get("samples") or ())


def _passed_through(error: Exception, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(frame.f_locals.get("self"), kinds) for frame, _ in walk_tb(error.__traceback__))


def _is_of_model(session: Session, error: Exception) -> bool:
    return isinstance(error, MODEL_ERRORS) and session.engine.phase is Phase.FORWARD


def _advise_against_single_sample(session: Session, error: Exception, samples_in_step: int) -> None:
    """Add advice to an error that a single sample may have caused."""
    if session.sizes.train.current.samples != 1 or not batchnorms(session.state.model):
        return
    setting = "batch.micro_size=2"
    if samples_in_step == 1:
        setting = "data.drop_last=true, if an epoch ends on one sample for a rank,"
    add_note(error, f"the micro-batch has a single sample, which BatchNorm may not take: use {setting} or GroupNorm")


def _device_works(session: Session) -> bool:
    """Return whether the device still works: after an assertion in a kernel nothing can run."""
    try:
        session.memory.synchronize()
    except Exception:
        return False
    return True

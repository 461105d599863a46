"""What a user reads about an out-of-memory error: one line at once, or the message with which a run ends."""

import inspect

from trainapp.losses import losses
from trainapp.memory.live_tensors import Category
from trainapp.oom.failure import Failure
from trainapp.oom.report import sizes_of_phase
from trainapp.optim.optimizers import uses_foreach
from trainapp.sizes.failures import ErrorKind
from trainapp.techniques.advice import advised
from trainapp.techniques.catalogue import Situation
from trainapp.techniques.ladder import TurnedOn, overrides_turned_on
from trainapp.techniques.savings import Shortage, optimizer_state_size
from trainapp.training.phase import Phase
from trainapp.training.session import Session
from trainapp.units import bytes_text

# In which a forward's activations are in memory.
_PHASES_WITH_ACTIVATIONS = (
    *(Phase.FORWARD, Phase.LOSS, Phase.METRIC, Phase.BACKWARD, Phase.UPDATE_IN_BACKWARD),
    *(Phase.BACKWARD_AFTER_UPDATES, Phase.EVALUATE),
)


def one_line(failure: Failure) -> str:
    """Return the failure in one line, for the terminal and the trackers."""
    # Where: the phase, the module, the update.
    location = failure.location
    if failure.module:
        location += f" ({failure.module})"
    if failure.update:
        location += f" of update {failure.update}"
    action = failure.recovery.action
    if not failure.is_out_of_memory:
        return (
            f"the model cannot run {_rejected_samples(failure)} at step {failure.step} in {location} "
            f"({failure.message}): {action}"
        )

    # What was asked for, what was in use, and what happens now.
    if failure.swallowed:
        location = "a library, which caught the error and may have used another algorithm,"
    text = f"out of memory at step {failure.step} in {location}"
    if failure.requested:
        text += f" asking for {bytes_text(failure.requested)}"
    text += f", {bytes_text(failure.used)} of {bytes_text(failure.limit)} in use"
    if action:
        text += f": {action}"
    return text


def _rejected_samples(failure: Failure) -> str:
    if failure.kind is ErrorKind.TECHNIQUE_REFUSED:
        return f"with {failure.technique}"
    if failure.kind is ErrorKind.TOO_FEW_SAMPLES:
        if failure.samples == 1:
            return "a single sample"
        return f"{failure.samples} samples"
    if failure.recovery.old_size:
        return f"micro-batch {failure.recovery.old_size}"
    return "this micro-batch"


def final_message(session: Session, failure: Failure, size: int, is_constant: bool) -> str:
    """Return the message if no micro-batch fits: where the memory went, and which settings need less.

    Args:
        session: of the run.
        failure: the last one.
        size: of the micro-batch that failed.
        is_constant: whether fewer samples have asked for the same.
    """
    size_name = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    reason = _why_no_smaller(session, failure, is_constant)

    # Where the memory went, the largest category first.
    lines = [
        f"out of memory in {failure.location} with {size_name} {size}: {reason}.",
        failure.message,
        f"{'limit':<18}{bytes_text(failure.limit):>12}",
    ]
    by_size = sorted(failure.by_category.items(), key=lambda item: -item[1])
    for category, in_use in by_size:
        if in_use:
            lines.append(f"{category.label:<18}{bytes_text(in_use):>12}")

    # What would need less.
    if failure.phase is Phase.COMMIT and not failure.resident:
        lines.extend(_kernels_without_copies(session))
    lines.extend(_advice(session, failure, size))

    lines.extend(_tried(session.turned_on))

    # Where the run can continue from.
    checkpoint = session.checkpointer.newest_name()
    if checkpoint:
        lines.append(f"The last checkpoint is {checkpoint}.")
    else:
        lines.append("No checkpoint was written yet.")
    return "\n".join(lines)


def _tried(turned_on: TurnedOn) -> list[str]:
    """Return a line with the techniques that the run itself has tried, if any."""
    texts = []
    if turned_on.settings:
        texts.append(f"turned on, which was not enough: {overrides_turned_on(turned_on.settings)}")
    if turned_on.refused:
        texts.append(f"tried, but refused by the model: {', '.join(turned_on.refused)}")
    if not texts:
        return []
    return [f"Techniques that leave the result the same (oom.techniques=same): {'; '.join(texts)}."]


def _kernels_without_copies(session: Session) -> list[str]:
    """Return a line that names the optimizer's kernels that need no temporary copy of the parameters, if its class has
    any that it does not use.
    """
    optimizer = session.state.optimizer
    options = optimizer.defaults
    parameters = inspect.signature(type(optimizer)).parameters
    remedies = []
    if "fused" in parameters and not options.get("fused") and not options.get("dampening"):
        remedies.append("optimizer.fused=true")
    if uses_foreach(optimizer, session.state.device):
        remedies.append("+optimizer.foreach=false (slower)")
    if not remedies:
        return []
    name = type(optimizer).__name__
    return [f"{name} makes temporary copies of parameters in its step; with {' or '.join(remedies)} it needs fewer"]


def _advice(session: Session, failure: Failure, size: int) -> list[str]:
    """Return lines with the techniques that would relieve most of what filled memory at a micro-batch size."""
    situation = Situation(session.config, session.state.model, session.engine.knows_loss)
    shortage = shortage_of(session, failure, size)
    advised_techniques = advised(situation, shortage)
    if not advised_techniques:
        return []
    missing = ""
    if shortage.missing:
        missing = f"; at least {bytes_text(shortage.missing)} are missing"
    lines = [f"Settings that save memory, best first{missing} (add mode=plan to the command to compare their peaks):"]
    for advice in advised_techniques:
        technique = advice.technique
        saves = f"up to {bytes_text(advice.saved_bytes)} ({technique.saves})"
        lines.append(f"  {technique.setting}: saves {saves}; costs {technique.costs}")
    return lines


def shortage_of(session: Session, failure: Failure, size: int) -> Shortage:
    """Return what filled memory at a micro-batch size, with what the failed phase was about to make."""
    held = dict(failure.by_category)
    computes = failure.resident is None and failure.phase in _PHASES_WITH_ACTIVATIONS
    if not computes:  # then they are temporaries, of an update for example
        held.pop(Category.ACTIVATIONS, None)

    # Gradients, and optimizer state that some optimizers make in their first step, may not be there yet.
    gradients = session.meter.static.get(Category.GRADIENTS, 0)
    if failure.phase is Phase.BACKWARD and failure.resident is None:
        held[Category.GRADIENTS] = max(gradients, held.get(Category.GRADIENTS, 0))
    if failure.phase is Phase.COMMIT and not session.config.updates:
        state = int(gradients * (optimizer_state_size(session.config) or 0))
        held[Category.OPTIMIZER_STATE] = max(state, held.get(Category.OPTIMIZER_STATE, 0))

    # Before any sample, not all that stays in memory was counted when the limit was exceeded.
    requested = failure.requested or 0
    needed = failure.used + requested
    if failure.resident is not None:
        needed = max(needed, sum(failure.by_category.values()))
    return Shortage(
        held=held,
        requested=requested if computes else 0,
        missing=max(0, needed - failure.limit),
        logit_rows=_logit_rows(session, failure),
        in_evaluation=failure.evaluating,
        is_split=not failure.evaluating and session.batches.accumulation(size) > 1,
    )


def _logit_rows(session: Session, failure: Failure) -> int:
    """Return at most how many rows of logits the micro-batch has: one per sample, or one per target."""
    if losses.class_dim(session.task) == 1:
        return failure.samples
    return failure.elements // 2  # there is an input beside each target


def _why_no_smaller(session: Session, failure: Failure, is_constant: bool) -> str:
    setting = "batch.eval_micro_size" if failure.evaluating else "batch.global_size"

    # No size helps.
    if failure.resident:
        return "what is in memory before any sample exceeds the limit, so no other size can help"
    if not failure.phase.depends_on_size:
        return "what it asks for does not depend on the micro-batch"

    # Smaller micro-batches do not help, but fewer samples may.
    if losses.needs_whole_batch(session.task):
        return (
            f"its loss needs the whole batch (whole_batch=True), which is never split; a smaller {setting} helps, and "
            "so does the same loss of embeddings (embed and loss_of_embeddings, docs/extending.md), which may be split"
        )
    if is_constant:
        return f"what it asks for does not depend on the micro-batch{_why_split_needs_more(session, failure)}"

    # There are no smaller micro-batches.
    hint = ""
    if losses.has_embeddings(session.task) and not failure.evaluating:
        hint = f"; its loss keeps a whole batch, a smaller {setting} helps"
    sizes = sizes_of_phase(session, failure.phase)
    if sizes.stored_or_new_search(sizes.current.bucket).smallest > 1:
        return f"the model cannot run fewer samples{session.recovery.too_few_error}{hint}"
    return f"nothing is left to halve{hint}"


def _why_split_needs_more(session: Session, failure: Failure) -> str:
    """Return why a step that is split needs more memory than one that is not, if that is what failed."""
    if not failure.accumulates:
        return ""
    gradients = bytes_text(failure.by_category.get(Category.GRADIENTS, 0))
    return (
        f". A step of several micro-batches keeps the gradients of the earlier ones ({gradients}) beside those that "
        "the backward is computing, which a step of one micro-batch does not: a smaller batch.global_size may not need "
        "to be split"
    )

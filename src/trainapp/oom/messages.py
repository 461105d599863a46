"""What a user reads about an out-of-memory error: one line at once, or the message with which a run ends."""

import inspect

from trainapp.losses import losses
from trainapp.memory.live_tensors import Category
from trainapp.oom.failure import UPDATE_PHASES, Failure
from trainapp.oom.report import sizes_of_phase
from trainapp.sizes.failures import ErrorKind
from trainapp.techniques.catalogue import Situation, Technique, available
from trainapp.training.phase import Phase
from trainapp.training.session import Session
from trainapp.units import bytes_text


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
    techniques = _helpful_techniques(session, failure, size)
    if techniques:
        lines.append("Settings that save memory (add mode=plan to the command to see how much):")
    for technique in techniques:
        lines.append(f"  {technique.setting}: saves {technique.saves}; costs {technique.costs}")

    # Where the run can continue from.
    checkpoint = session.checkpointer.newest_name()
    if checkpoint:
        lines.append(f"The last checkpoint is {checkpoint}.")
    else:
        lines.append("No checkpoint was written yet.")
    return "\n".join(lines)


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

    # Unless it is told, torch's optimizers use these kernels on a GPU only.
    by_default = session.state.device.type == "cuda"
    uses_foreach = options.get("foreach", False)
    if uses_foreach is None:
        uses_foreach = by_default and not options.get("fused")
    if "foreach" in parameters and uses_foreach:
        remedies.append("+optimizer.foreach=false (slower)")
    if not remedies:
        return []
    name = type(optimizer).__name__
    return [f"{name} makes temporary copies of parameters in its step; with {' or '.join(remedies)} it needs fewer"]


def _helpful_techniques(session: Session, failure: Failure, size: int) -> list[Technique]:
    """Return the techniques that would need less of what was in memory, or was asked for, at a micro-batch size."""
    categories = _categories_involved(failure)
    is_split = not failure.evaluating and session.batches.accumulation(size) > 1
    situation = Situation(session.config, session.state.model, session.engine.knows_loss)
    techniques = []
    for technique in available(situation):
        # An update in the last backward keeps the gradients of all earlier ones.
        if is_split and "optimizer.in_backward" in technique.changes:
            continue
        if failure.evaluating and technique.is_for_backward:
            continue
        if technique.relieves & categories:
            techniques.append(technique)
    return techniques


def _categories_involved(failure: Failure) -> set[Category]:
    """Return the categories of what was in memory, and of what the phase makes."""
    categories = {category for category, size in failure.by_category.items() if size}
    if failure.resident:
        return categories

    # What the phase was about to make may not be there yet; an update has no activations but temporaries.
    if failure.phase is Phase.COMMIT:
        categories.add(Category.OPTIMIZER_STATE)
    if failure.phase is Phase.BACKWARD:
        categories.add(Category.GRADIENTS)
    if failure.phase in UPDATE_PHASES:
        categories.discard(Category.ACTIVATIONS)
    else:
        categories.add(Category.ACTIVATIONS)
    return categories


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

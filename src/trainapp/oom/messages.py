"""What a user reads about an out-of-memory error: one line at once, or the message with which a run ends."""

from trainapp.losses import losses
from trainapp.memory.live_tensors import Category
from trainapp.oom.report import OomReport, sizes_of_phase
from trainapp.techniques.catalogue import Situation, available
from trainapp.training.session import Session
from trainapp.units import bytes_text


def one_line(report: OomReport) -> str:
    """Return the report in one line, for the terminal and the trackers."""
    where = report.place
    if report.module:
        where += f" ({report.module})"
    if report.update:
        where += f" of update {report.update}"
    if not report.is_out_of_memory:
        return (
            f"the model cannot run {_rejected_samples(report)} at step {report.step} in {where} ({report.message}): "
            f"{report.action}"
        )
    if report.swallowed:
        where = "a library, which caught the error and may have used another algorithm,"
    request = f" asking for {bytes_text(report.requested)}" if report.requested else ""
    action = f": {report.action}" if report.action else ""
    return (
        f"out of memory at step {report.step} in {where}{request}, {bytes_text(report.used)} of "
        f"{bytes_text(report.limit)} in use{action}"
    )


def _rejected_samples(report: OomReport) -> str:
    if report.unsupported_samples == 1:
        return "a single sample"
    if report.unsupported_samples:
        return f"{report.unsupported_samples} samples"
    return f"micro-batch {report.old_size}" if report.old_size else "this micro-batch"


def final_message(session: Session, report: OomReport) -> str:
    """Return the message if no micro-batch fits: where the memory went, and which settings need less."""
    size_name = "evaluation micro-batch" if report.evaluating else "micro-batch"
    lines = [
        f"out of memory in {report.place} with {size_name} {report.old_size}: {_why_no_smaller(session, report)}.",
        report.message,
        f"{'limit':<18}{bytes_text(report.limit):>12}",
    ]
    for category, size in sorted(report.by_category.items(), key=lambda pair: -pair[1]):  # largest first
        if size:
            lines.append(f"{category.label:<18}{bytes_text(size):>12}")

    techniques = available(Situation(session.config, session.state.model, session.engine.knows_loss))
    if techniques:
        lines.append("Settings that save memory (add mode=plan to the command to see how much):")
    for technique in techniques:
        lines.append(f"  {technique.setting}: saves {technique.saves}; costs {technique.costs}")

    checkpoint = session.checkpointer.newest_name()
    lines.append(f"The last checkpoint is {checkpoint}." if checkpoint else "No checkpoint was written yet.")
    return "\n".join(lines)


def _why_no_smaller(session: Session, report: OomReport) -> str:
    setting = "batch.eval_micro_size" if report.evaluating else "batch.global_size"

    # No size helps.
    if report.resident:
        return "what is in memory before any sample exceeds the limit, so no other size can help"
    if not report.phase.depends_on_size:
        return "what it asks for does not depend on the micro-batch"

    # Smaller micro-batches do not help, but fewer samples may.
    if losses.needs_whole_batch(session.task):
        return f"its loss needs the whole batch (whole_batch=True), which is never cut; a smaller {setting} helps"
    if report.is_constant:
        return f"what it asks for does not depend on the micro-batch{_why_split_needs_more(session, report)}"

    # There are no smaller micro-batches.
    keeps_batch = losses.has_embeddings(session.task) and not report.evaluating
    hint = f"; its loss keeps a whole batch, a smaller {setting} helps" if keeps_batch else ""
    sizes = sizes_of_phase(session, report.phase)
    if sizes.search(sizes.current.bucket).smallest > 1:
        return f"the model cannot run fewer samples{session.recovery.too_few_error}{hint}"
    return f"nothing is left to halve{hint}"


def _why_split_needs_more(session: Session, report: OomReport) -> str:
    """Return why a step that is split needs more memory than one that is not, if that is what failed."""
    if not report.accumulates:
        return ""
    gradients = bytes_text(report.by_category.get(Category.GRADIENTS, 0))
    return (
        f". A step of several micro-batches keeps the gradients of the earlier ones ({gradients}) beside those that "
        "the backward is computing, which a step of one micro-batch does not: a smaller batch.global_size may not need "
        "to be split"
    )

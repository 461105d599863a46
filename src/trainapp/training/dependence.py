"""What depends on the micro-batch although nothing should: found while training, and said once."""

from trainapp.draws.record import PADDING
from trainapp.losses.losses import has_embeddings
from trainapp.models.inspect import batchnorms, instead_of_batchnorm, per_sample_buffers
from trainapp.training.phase import UpdateContext
from trainapp.training.session import Session
from trainapp.units import listed


def warn_of_padding(session: Session) -> None:
    """Warn before the first step of results that depend on the padding, as the check of the loss has found."""
    for topic, text in session.engine.draw_record.depends.items():
        if topic.startswith(PADDING):
            session.tracker.warn_once(text, topic=topic)


def note_dependence(session: Session, context: UpdateContext) -> None:
    """Warn once of what depends on the micro-batch, if steps are cut into several."""
    sizes = session.sizes.train
    size = max(sizes.sizes_in_force.values(), default=sizes.size)
    if session.batches.accumulation(size) > 1:
        record = session.engine.draw_record
        _note_writes(session, size)
        if record.draws and not session.engine.draws_by_sample:
            record.depends["draws"] = (
                f"the forward draws torch's own random numbers, which are those of the micro-batch ({size}); with "
                "train.draws=per_sample (not on mps) they do not depend on it"
            )
        for topic, text in record.depends.items():
            session.tracker.warn_once(f"step {context.step_number}: {text}", topic=topic)
    _note_shared_draws(session)


def _note_writes(session: Session, size: int) -> None:
    """Record which state the forward writes per micro-batch of this size: BatchNorm's statistics, and any other."""
    depends = session.engine.draw_record.depends
    written = session.snapshot.changes

    # BatchNorm's statistics have a message of their own, with a way out.
    norms = set(batchnorms(session.state.model))
    statistics = {name for name in written if _module_of(name) in norms}
    if statistics:  # without any, the layers are in evaluation mode
        depends["batchnorm"] = (
            f"in training, BatchNorm normalises each micro-batch ({size}) by its own mean and variance, so outputs, "
            "gradients and running statistics depend on the size of the micro-batch; "
            f"{instead_of_batchnorm(session.config.model)} does not"
        )

    # Any other state, except rows that belong to samples, and a task that sees the whole step.
    modules = {"model": session.state.model, **session.state.stateful.modules}
    other_state = written - statistics - per_sample_buffers(modules)
    if has_embeddings(session.engine.task):  # the task is called once per step
        other_state = {name for name in other_state if not _root_of(name).endswith("task")}
    if other_state:
        depends["writes"] = (
            f"the forward writes {listed(sorted(other_state))}, once per micro-batch ({size}), not per step: what a "
            "forward reads of them before writing them anew depends on the micro-batch"
        )


def _module_of(name: str) -> str:
    """Return the path in the model of the module that a state such as `model.norm.running_mean` belongs to."""
    return name.rpartition(".")[0].removeprefix("model.")


def _root_of(name: str) -> str:
    return name.partition(".")[0]


def _note_shared_draws(session: Session) -> None:
    """Say once which draws have no dimension of the samples, and are therefore the same for all of them."""
    kernels = set()
    for layouts in session.engine.draw_record.layouts.values():
        for layout in layouts.values():
            if layout.axis is None and not layout.varies:
                kernels.add(layout.kernel)
    if kernels:
        names = ", ".join(sorted(kernels))
        text = f"drawn once per step, for all samples, since no dimension has their number: {names}"
        session.tracker.warn_once(text, topic="shared draws")

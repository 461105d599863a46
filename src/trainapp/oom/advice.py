"""When no micro-batch fits: where the memory went, and which settings would need less."""

import dataclasses
import shlex

from trainapp.memory.kinds import MemoryKind
from trainapp.oom.incident import Incident
from trainapp.planning.step_peaks import of_one_rank, step_peaks
from trainapp.techniques import catalogue
from trainapp.techniques.lever import Lever, Situation, overrides_of
from trainapp.train import losses
from trainapp.train.run import Run
from trainapp.units import bytes_text


def memory_report(run: Run, failure: Incident) -> str:
    """The final message of a run that cannot continue: memory by kind, then what would help, largest saving first."""
    parts = sorted(failure.parts.items(), key=lambda item: -item[1])
    kind = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    lines = [
        f"out of memory in {failure.phase} with {kind} {failure.old_size}: {_why_no_smaller(run, failure)}.",
        failure.message,
        f"{'limit':<18}{bytes_text(failure.limit):>12}",
        *(f"{MemoryKind(name).label:<18}{bytes_text(size):>12}" for name, size in parts if size),
    ]
    savings = [(saving, lever) for saving, lever in _savings(run, failure) if saving > 0.01 * failure.limit]
    savings.sort(key=lambda saving: -saving[0])
    if savings:
        place = "" if run.state.device.type == "cpu" else ", activations as on the CPU"
        lines.append(f"What would help, largest saving first{place}:")
        for saving, lever in savings:
            overrides = shlex.join(overrides_of([lever]))
            lines.append(f"  {bytes_text(saving):>10}  {overrides}: costs {lever.costs}")
    saved = run.checkpointer.newest_name()
    lines.append(f"The last checkpoint is {saved}." if saved else "No checkpoint was written yet.")
    return "\n".join(lines)


def _why_no_smaller(run: Run, failure: Incident) -> str:
    sizes = run.sizes.evaluation if failure.evaluating else run.sizes.train
    if losses.needs_whole_batch(run.task):
        setting = "batch.eval_micro_size" if failure.evaluating else "batch.global_size"
        return f"its loss lives on the whole batch (whole_batch=True), which is never cut; a smaller {setting} helps"
    if failure.old_size <= sizes.smallest and losses.has_embeddings(run.task) and not failure.evaluating:
        return (
            "nothing is left to halve, and its loss keeps the inputs and embeddings of all samples of a step in "
            "memory: a smaller batch.global_size helps"
        )
    if failure.old_size <= sizes.smallest:
        return "nothing is left to halve"
    return "a smaller one cannot help, since what fails asks for the same memory at every size"


def _savings(run: Run, failure: Incident) -> list[tuple[int, Lever]]:
    """`(bytes, lever)` per lever: state from the sizes of its tensors, activations from a traced step."""
    situation = Situation(run.config, run.state.model, run.knows_loss)
    levers, used = catalogue.available_levers(situation), failure.used - sum(run.meter.static.values())
    lowered = [(lever.lowers(run.meter.static, situation, max(0, used)), lever) for lever in levers]
    found = [(saved, lever) for saved, lever in lowered if saved is not None]
    if failure.evaluating:  # the rest is of a training step
        return found
    # A trace is of one rank with the whole model.
    traced = [v for v in levers if v.state_saved is None and v.shows_in_a_trace and not v.is_of_several_ranks]
    return found + _traced_savings(run, failure.old_size, traced)


def _traced_savings(run: Run, samples: int, levers: list[Lever]) -> list[tuple[int, Lever]]:
    """How much less memory a step with micro-batches of `samples` would need with each of the levers.

    Nothing where the model cannot be traced: the rest of the report still helps. Takes some seconds.
    """
    own = of_one_rank(run)
    now, *others = step_peaks([own, *(dataclasses.replace(own, **lever.sections(own)) for lever in levers)], samples)
    return [
        (now - peak, lever) for lever, peak in zip(levers, others, strict=True) if now is not None and peak is not None
    ]

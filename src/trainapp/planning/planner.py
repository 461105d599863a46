"""The plan of a configuration: its peak by category, the largest sizes that fit, and the savings of techniques."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from trainapp.assembly.resolved_targets import choose_device, resolve_targets
from trainapp.config.claimed_settings import with_claimed_settings
from trainapp.config.schema import Config
from trainapp.memory.host import guarded, total_bytes
from trainapp.memory.picture import Picture, draw
from trainapp.planning import absent_gpu, pretend
from trainapp.planning.fitting import Estimator, Planner, choose_cheapest_modes, with_cheapest_modes
from trainapp.planning.measured import MeasuredEstimator
from trainapp.planning.process import Facts, MemoryPlan, call_in_subprocess, report
from trainapp.planning.ranking import rank_techniques
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import planned_world_size
from trainapp.planning.traced import TracedEstimator


def plan_and_draw(config: Config, picture: Path | None, only_modes: bool, method: str) -> Facts:
    """Return the facts of `plan`: what `process.plan_in_subprocess` calls. A trace for this machine's GPU is taken in a
    process that does not see it. Raises as `plan`.

    Args:
        config: the configuration.
        picture: also draw the step to this PNG.
        only_modes: see `plan`.
        method: see `plan`.
    """
    # Of this machine's device, unless another one is named.
    if config.plan.device is None:
        device = choose_device(config.train.device)
        if method != "measured" and device.type == "cuda":
            function = f"{__name__}.plan_and_draw"
            config = absent_gpu.with_device_spec(config, device)
            arguments = (config, picture, only_modes, method)
            return call_in_subprocess(function, *arguments, sees_devices=False, on_report=report)
        if method == "traced" and device.type == "mps":
            raise NotImplementedError("no trace knows what MPS allocates")

    with guarded(config.memory, total_bytes()):  # the user's code may allocate real memory
        facts, breakdown = plan(config, method, only_modes)
    if picture is not None and breakdown.events:
        phase = breakdown.phase.replace("_", " ")
        title = f"planned memory, micro-batch {facts['micro_size']}: {phase} binds"
        plot = Picture(breakdown.events, breakdown.numbered, facts["limit_bytes"], title, picture)
        draw(plot)
    return facts


def plan(config: Config, method: str = "traced", only_modes: bool = False) -> tuple[Facts, Breakdown]:
    """Return the content of plan.json, and the highest peak with its events. Sets global switches of this process.

    Reports, if it tries techniques, first the plan without them as `plan`, then what `rank_techniques` reports.

    Raises UserError for mistakes in the configuration, and errors of the model on tensors without data.

    Args:
        config: the configuration.
        method: one of `process.METHODS`.
        only_modes: only choose the blocks' modes, which are open. If no micro-batch fits, the plan also has the lowest
            peak.
    """
    started = time.monotonic()
    config = with_claimed_settings(config)
    estimator = estimator_of(config, method)
    if config.plan.device is not None:
        config = absent_gpu.with_data_on_cpu(config)

    # The blocks' modes come first: the peaks of all else depend on them.
    if only_modes:
        return asdict(_plan_of_modes(config, estimator)), Breakdown()
    config = with_cheapest_modes(config, estimator)

    planner = Planner(config, estimator)
    memory_plan, breakdown = planner.plan()
    if config.plan.techniques:
        report({"plan": asdict(memory_plan)})
        memory_plan.techniques, memory_plan.best = rank_techniques(planner, memory_plan, report)
    memory_plan.seconds = round(time.monotonic() - started, 3)
    return asdict(memory_plan), breakdown


def _plan_of_modes(config: Config, estimator: Estimator) -> MemoryPlan:
    """Return a plan with the blocks' modes; if no micro-batch fits with any modes, also with the lowest peak."""
    choice = choose_cheapest_modes(config, estimator)
    memory_plan = MemoryPlan(estimator.method, estimator.margin, modes=choice.config.activation_checkpointing.modes)
    lowest = choice.lowest_peak()
    if lowest.total > choice.planner.allowed_peak:
        memory_plan.largest_micro_size = 0
        memory_plan.micro_size = choice.planner.smallest
        memory_plan.peak_bytes = lowest.total
        memory_plan.phase = lowest.phase
        memory_plan.limit_bytes = choice.planner.limit
        memory_plan.notes = list(lowest.notes)
    return memory_plan


def estimator_of(config: Config, method: str) -> Estimator:
    """Return the estimator for a method. Raises UserError for settings that contradict each other."""
    world_size = planned_world_size(config)
    gpu = None
    if config.plan.device is not None:
        gpu = absent_gpu.find(config)
        config = absent_gpu.with_data_on_cpu(config)
    targets = resolve_targets(config)

    if method == "measured":
        device = choose_device(config.train.device)
        return MeasuredEstimator(targets, world_size, device, gpu)

    # A trace on tensors that claim to be on CUDA, where this platform can fake them.
    if gpu is not None:
        if method == "traced as on the CPU":
            gpu = replace(gpu, on_cpu=True, margin=0.3)
        else:
            pretend.give_autograd_a_device()
    return TracedEstimator(targets, world_size, gpu, refuses=method != "made up")

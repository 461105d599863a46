"""`mode=plan`: the plan on the terminal and in the run directory. Imports no torch."""

import logging
import textwrap
from pathlib import Path

from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.files import PLAN, atomic_write, strict_json
from trainapp.planning.process import Facts, modes_text, plan_in_subprocess
from trainapp.tracking.terminal import Progress
from trainapp.units import bytes_text

PICTURE = "plan.png"
WIDTH = 100
BAR = 40  # characters of the longest bar
log = logging.getLogger(__name__)
_HEADINGS = {"rounded": "at lower precision", "other": "with another training result"}


def print_plan(config: Config) -> float | None:
    """Plan, print the plan and write it. Return the peak in bytes, for Hydra's optimizing sweepers; None if unknown.

    The plan without techniques is printed as soon as it is known; each technique that is tried is logged.
    """
    run_dir = Path(config.run_dir)
    parts = _Parts(config)
    try:
        facts = plan_in_subprocess(config, picture=run_dir / PICTURE, on_report=parts.show)
    finally:
        parts.close()
    run_dir.mkdir(parents=True, exist_ok=True)
    with atomic_write(run_dir / PLAN) as file:
        file.write(strict_json(facts, indent=1) + "\n")
    print(parts.without_printed(plan_text(facts, config)), flush=True)
    peak = facts.get("peak_bytes")
    if peak is None:
        return None
    return float(peak)


class _Parts:
    """The parts of a plan that are shown while it is made: the plan itself, then a line and a bar for techniques."""

    def __init__(self, config: Config):
        self._config = config
        self._printed = ""
        self._progress: Progress | None = None

    def show(self, part: Facts) -> None:
        """Show what the planner reports: see `planner.plan`."""
        if "plan" in part:
            self._printed = "\n".join(_lines_without_techniques(part["plan"]))
            print(self._printed, flush=True)
            return

        if "search" in part:
            log.info("searching the largest micro-batch with %s", part["search"])
            return

        technique = part["technique"]
        if self._progress is None:
            self._progress = Progress(technique["most"], 0, unit="technique")
        peak_text = "no plan"  # it does not apply, or cannot be traced
        if technique["peak_bytes"] is not None:
            peak_text = f"peak {bytes_text(technique['peak_bytes'])}"
        log.info("%s with %s", peak_text, technique["overrides"])
        self._progress.advance(technique["tried"])

    def close(self) -> None:
        """Close the bar, if any."""
        if self._progress is not None:
            self._progress.close()

    def without_printed(self, text: str) -> str:
        """Return the text of the whole plan without what has been printed, unless this has changed."""
        return text.removeprefix(f"{self._printed}\n")


def plan_text(facts: Facts, config: Config) -> str:
    """Return the plan as text; if something fits, the last line has the overrides to paste."""
    if facts["method"] is None:
        return "\n".join(["no estimate:", *facts["notes"]])
    lines = _lines_without_techniques(facts)
    largest = facts["largest_micro_size"]

    # What to change.
    if facts["best"] is not None:
        lines += _technique_lines(facts)
        lines += _best_lines(facts)
    elif largest:
        lines.append(" ".join(size_overrides(config, largest)))
    return "\n".join(lines)


def _lines_without_techniques(facts: Facts) -> list[str]:
    """Return what the configuration needs, and what fits."""
    lines = _peak_lines(facts)
    largest = facts["largest_micro_size"]
    if largest:
        lines.append(f"largest that fits {bytes_text(facts['limit_bytes'])}: micro-batch {largest}")
    else:
        lines.append(_no_size_line(facts))
    return lines


def summary(facts: Facts) -> str:
    """Return the peak, its method and its margin: `47.9 MiB (traced, +-1%)`."""
    return f"{bytes_text(facts['peak_bytes'])} ({facts['method']}, +-{100 * facts['margin']:.0f}%)"


def _peak_lines(facts: Facts) -> list[str]:
    limit = bytes_text(facts["limit_bytes"])
    where = facts["phase"].replace("_", " ")
    if facts["module"]:
        where += f" ({facts['module']})"
    lines = [f"micro-batch {facts['micro_size']}: peak {summary(facts)} of {limit}, in {where}"]
    if facts["ranks"]["world"] > 1:
        lines.append(_ranks_line(facts["ranks"]))
    if facts["modes"]:
        lines.append(f"activation checkpointing: {modes_text(facts['modes'])}")
    lines += facts["notes"]
    if facts["step_seconds"] is not None:
        lines.append(f"measured: {bytes_text(facts['measured_bytes'])}, {facts['step_seconds']:.3g} s per step")

    lines.append("peak by phase")
    lines.extend(_bars(facts["phases"]))
    if facts["categories"]:
        lines.append("at the peak")
        lines.extend(_bars(facts["categories"]))
    return lines


def _ranks_line(ranks: Facts) -> str:
    text = f"{ranks['world']} ranks, {ranks['strategy']}"
    if ranks["strategy"] == "fsdp" and ranks["replicas"] > 1:
        text += f", {ranks['replicas']} replicas"
    return f"{text}: rank 0, which has the most"


def _bars(sizes: dict[str, int]) -> list[str]:
    """Return a line per name, with its bytes and a bar."""
    name_width = max(map(len, sizes), default=0)
    largest_size = max(sizes.values(), default=1)
    lines = []
    for name, size in sizes.items():
        label = name.replace("_", " ")
        bar = "#" * round(BAR * size / largest_size)
        line = f"  {label:<{name_width}} {bytes_text(size):>11}  {bar}"
        lines.append(line.rstrip())
    return lines


def _no_size_line(facts: Facts) -> str:
    """Return why no size fits: the peak exceeds the limit, or only the margin of the estimate does."""
    limit = bytes_text(facts["limit_bytes"])
    peak_bytes = facts["peak_bytes"]
    if peak_bytes > facts["limit_bytes"]:
        return f"no micro-batch fits {limit}"
    peak = bytes_text(peak_bytes)
    free = bytes_text(facts["limit_bytes"] - peak_bytes)
    margin = bytes_text(round(facts["margin"] * peak_bytes))
    return (
        f"no micro-batch is certain to fit {limit}: with {facts['micro_size']}, the peak of {peak} leaves {free} free, "
        f"less than the estimate's margin of {margin}; it may run, and mode=train tries it"
    )


def _technique_lines(facts: Facts) -> list[str]:
    """Return a table at most WIDTH characters wide, with a heading before each result but the same."""
    # The heading: two columns more where techniques have been measured.
    is_measured = any("measured_bytes" in entry for entry in facts["techniques"])
    columns = f"{'peak':>10}"
    if is_measured:
        columns += f"  {'measured':>10}  {'time':>7}"
    lines = [f"{columns}  {'largest':>7}  with micro-batch {facts['micro_size']} and"]

    # They come sorted by their result.
    result = "same"
    for entry in facts["techniques"]:
        if entry["result"] != result:
            result = entry["result"]
            lines.append(_HEADINGS[result])
        columns = f"{bytes_text(entry['peak_bytes']):>10}"
        if is_measured:
            columns += _measured_columns(entry, facts)
        largest = entry["largest_micro_size"]
        largest_text = "-" if largest is None else str(largest)
        columns += f"  {largest_text:>7}  "
        lines += textwrap.wrap(
            entry["overrides"],
            WIDTH,
            initial_indent=columns,
            subsequent_indent=" " * len(columns),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _measured_columns(entry: Facts, facts: Facts) -> str:
    """Return the measured peak, and the time relative to the plan's."""
    if entry.get("step_seconds") is None or not facts["step_seconds"]:
        return f"  {'-':>10}  {'-':>7}"
    peak = bytes_text(entry["measured_bytes"])
    ratio = entry["step_seconds"] / facts["step_seconds"]
    time = f"x {ratio:.2f}"
    return f"  {peak:>10}  {time:>7}"


def _best_lines(facts: Facts) -> list[str]:
    best = facts["best"]
    limit = bytes_text(facts["limit_bytes"])
    peak = bytes_text(best["peak_bytes"])
    if best["missing_bytes"]:
        missing = bytes_text(best["missing_bytes"])
        if best["peak_bytes"] <= facts["limit_bytes"]:
            text = (
                f"nothing is certain to fit {limit}; the closest has a peak of {peak}, and its margin is {missing} more"
            )
            return [f"{text} than is free:", best["overrides"]]
        return [f"nothing fits {limit}; the closest needs {peak}, {missing} too much:", best["overrides"]]
    changes = ", though it changes the training" if best["result"] == "other" else ""
    return [f"the least change that fits {limit}: peak {peak}{changes}:", best["overrides"]]

"""`mode=plan`: the plan on the terminal and in the run directory. Imports no torch."""

import textwrap
from pathlib import Path

from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.files import PLAN, atomic_write, strict_json
from trainapp.planning.process import Facts, modes_text, plan_in_subprocess
from trainapp.units import bytes_text

PICTURE = "plan.png"
WIDTH = 100
BAR = 40  # characters of the longest bar
_HEADINGS = {"rounded": "at lower precision", "other": "with another training result"}


def print_plan(config: Config) -> float | None:
    """Plan, print the plan and write it. Return the peak in bytes, for Hydra's optimizing sweepers; None if unknown."""
    run_dir = Path(config.run_dir)
    facts = plan_in_subprocess(config, picture=run_dir / PICTURE)
    run_dir.mkdir(parents=True, exist_ok=True)
    with atomic_write(run_dir / PLAN) as file:
        file.write(strict_json(facts, indent=1) + "\n")
    print(plan_text(facts, config), flush=True)
    peak = facts.get("peak_bytes")
    return None if peak is None else float(peak)


def plan_text(facts: Facts, config: Config) -> str:
    """Return the plan as text; if something fits, the last line has the overrides to paste."""
    if facts["method"] is None:
        return "\n".join(["no estimate:", *facts["notes"]])
    limit = bytes_text(facts["limit_bytes"])
    largest = facts["largest_micro_size"]
    lines = _peak_lines(facts)
    if largest:
        lines.append(f"largest that fits {limit}: micro-batch {largest}")
    else:
        lines.append(f"no micro-batch fits {limit}")
    if facts["best"] is not None:
        lines += _technique_lines(facts)
        lines += _best_lines(facts)
    elif largest:
        lines.append(" ".join(size_overrides(config, largest)))
    return "\n".join(lines)


def summary(facts: Facts) -> str:
    """Return the peak, its method and its margin: `47.9 MiB (traced, +-1%)`."""
    return f"{bytes_text(facts['peak_bytes'])} ({facts['method']}, +-{100 * facts['margin']:.0f}%)"


def _peak_lines(facts: Facts) -> list[str]:
    limit = bytes_text(facts["limit_bytes"])
    phase = facts["phase"].replace("_", " ")
    module = f" ({facts['module']})" if facts["module"] else ""
    lines = [f"micro-batch {facts['micro_size']}: peak {summary(facts)} of {limit}, in {phase}{module}"]
    if facts["ranks"]["world"] > 1:
        lines.append(_ranks_line(facts["ranks"]))
    if facts["modes"]:
        lines.append(f"activation checkpointing: {modes_text(facts['modes'])}")
    lines += facts["notes"]
    if facts["step_seconds"] is not None:
        lines.append(f"measured: {bytes_text(facts['measured_bytes'])}, {facts['step_seconds']:.3g} s per step")
    lines += ["peak by phase", *_bars(facts["phases"])]
    if facts["categories"]:
        lines += ["at the peak", *_bars(facts["categories"])]
    return lines


def _ranks_line(ranks: Facts) -> str:
    text = f"{ranks['world']} ranks, {ranks['strategy']}"
    if ranks["strategy"] == "fsdp" and ranks["replicas"] > 1:
        text += f", {ranks['replicas']} replicas"
    return f"{text}: rank 0, which has the most"


def _bars(sizes: dict[str, int]) -> list[str]:
    """Return a line per name, with its bytes and a bar."""
    name_width = max((len(name) for name in sizes), default=0)
    most = max(sizes.values(), default=1)
    lines = []
    for name, size in sizes.items():
        label = name.replace("_", " ")
        bar = "#" * round(BAR * size / most)
        lines.append(f"  {label:<{name_width}} {bytes_text(size):>11}  {bar}".rstrip())
    return lines


def _technique_lines(facts: Facts) -> list[str]:
    """Return a table at most WIDTH characters wide, with a heading before each result but the same."""
    is_measured = any("measured_bytes" in entry for entry in facts["techniques"])
    measured_columns = f"  {'measured':>10}  {'time':>7}" if is_measured else ""
    lines = [f"{'peak':>10}{measured_columns}  {'largest':>7}  with micro-batch {facts['micro_size']} and"]
    result = "same"
    for entry in facts["techniques"]:
        if entry["result"] != result:
            result = entry["result"]
            lines.append(_HEADINGS[result])
        columns = f"{bytes_text(entry['peak_bytes']):>10}"
        if is_measured:
            columns += _measured_columns(entry, facts)
        largest = "-" if entry["largest_micro_size"] is None else str(entry["largest_micro_size"])
        columns += f"  {largest:>7}  "
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
    time = f"x {entry['step_seconds'] / facts['step_seconds']:.2f}"
    return f"  {bytes_text(entry['measured_bytes']):>10}  {time:>7}"


def _best_lines(facts: Facts) -> list[str]:
    best = facts["best"]
    limit = bytes_text(facts["limit_bytes"])
    peak = bytes_text(best["peak_bytes"])
    if best["missing_bytes"]:
        missing = bytes_text(best["missing_bytes"])
        return [f"nothing fits {limit}; the closest needs {peak}, {missing} too much:", best["overrides"]]
    changes = ", though it changes the training" if best["result"] == "other" else ""
    return [f"the least change that fits {limit}: peak {peak}{changes}:", best["overrides"]]

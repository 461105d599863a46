"""`mode=plan`: the plan on the terminal and in the run directory. Imports no torch."""

import textwrap
from pathlib import Path
from typing import Any

from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.files import atomic_write, strict_json
from trainapp.planning.process import ask, modes_text
from trainapp.units import bytes_text

PLAN, PICTURE = "plan.json", "plan.png"
WIDTH = 100


def print_plan(config: Config) -> float | None:
    """Plan, print the plan and write it. Return the peak in bytes, for Hydra's optimizing sweepers; None if unknown."""
    run_dir = Path(config.run_dir)
    facts = ask(config, picture=run_dir / PICTURE)
    run_dir.mkdir(parents=True, exist_ok=True)
    with atomic_write(run_dir / PLAN) as file:
        file.write(strict_json(facts, indent=1) + "\n")
    print(plan_text(facts, config), flush=True)
    peak = facts.get("peak_bytes")
    return None if peak is None else float(peak)


def plan_text(facts: dict[str, Any], config: Config) -> str:
    """The plan as text; if something fits, the last line has the overrides to paste."""
    if facts["method"] is None:
        return "\n".join(["no estimate:", *facts["notes"]])
    limit, largest = bytes_text(facts["limit_bytes"]), facts["largest_micro_size"]
    fits = f"largest that fits {limit}: micro-batch {largest}" if largest else f"no micro-batch fits {limit}"
    lines = [*_peak(facts), fits]
    if facts["best"] is not None:
        lines += [*_techniques(facts), *_best(facts)]
    elif largest:
        lines.append(" ".join(size_overrides(config, largest)))
    return "\n".join(lines)


def summary(facts: dict[str, Any]) -> str:
    """The peak, its method and its margin: `47.9 MiB (traced, +-1%)`."""
    return f"{bytes_text(facts['peak_bytes'])} ({facts['method']}, +-{100 * facts['margin']:.0f}%)"


def _peak(facts: dict[str, Any]) -> list[str]:
    module = f" ({facts['module']})" if facts["module"] else ""
    ranks, of_ranks = facts["ranks"], list[str]()
    if ranks["world"] > 1:
        copies = f", {ranks['replicas']} replicas" if ranks["strategy"] == "fsdp" and ranks["replicas"] > 1 else ""
        of_ranks.append(f"{ranks['world']} ranks, {ranks['strategy']}{copies}: rank 0, which has the most")
    lines = [
        f"micro-batch {facts['micro_size']}: peak {summary(facts)} of {bytes_text(facts['limit_bytes'])}, "
        f"in {facts['phase'].replace('_', ' ')}{module}",
        *of_ranks,
        *([f"activation checkpointing: {modes_text(facts['modes'])}"] if facts["modes"] else []),
        *facts["notes"],
    ]
    if facts["step_seconds"] is not None:
        peak = bytes_text(facts["measured_bytes"])
        lines.append(f"measured: {peak}, {facts['step_seconds']:.3g} s per step")
    lines += ["peak by phase", *_rows(facts["phases"])]
    return [*lines, *(["at the peak", *_rows(facts["categories"])] if facts["categories"] else [])]


def _techniques(facts: dict[str, Any]) -> list[str]:
    """A table at most WIDTH characters wide."""
    is_measured = any("measured_bytes" in entry for entry in facts["techniques"])
    more = f"  {'measured':>10}  {'time':>7}" if is_measured else ""
    lines = [f"{'peak':>10}{more}  {'largest':>7}  with micro-batch {facts['micro_size']} and"]
    harm = {"same": "", "rounded": "at lower precision", "other": "with another training result"}
    last = "same"
    for entry in facts["techniques"]:
        if entry["result"] != last:
            last = entry["result"]
            lines.append(harm[last])
        start = f"{bytes_text(entry['peak_bytes']):>10}{_measured(entry, facts) if is_measured else ''}"
        largest = "-" if entry["largest_micro_size"] is None else str(entry["largest_micro_size"])
        start += f"  {largest:>7}  "
        lines += textwrap.wrap(
            entry["overrides"],
            WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _measured(entry: dict[str, Any], facts: dict[str, Any]) -> str:
    if entry.get("step_seconds") is None or not facts["step_seconds"]:
        return f"  {'-':>10}  {'-':>7}"
    time = f"x {entry['step_seconds'] / facts['step_seconds']:.2f}"
    return f"  {bytes_text(entry['measured_bytes']):>10}  {time:>7}"


def _best(facts: dict[str, Any]) -> list[str]:
    best, limit = facts["best"], bytes_text(facts["limit_bytes"])
    peak = bytes_text(best["peak_bytes"])
    if best["missing_bytes"]:
        line = f"nothing fits {limit}; the closest needs {peak}, {bytes_text(best['missing_bytes'])} too much:"
    else:
        changes = ", though it changes the training" if best["result"] == "other" else ""
        line = f"the least change that fits {limit}: peak {peak}{changes}:"
    return [line, best["overrides"]]


def _rows(sizes: dict[str, int]) -> list[str]:
    width = max((len(name) for name in sizes), default=0)
    most = max(sizes.values(), default=1)
    return [
        f"  {name.replace('_', ' '):<{width}} {bytes_text(size):>11}  {'#' * round(40 * size / most)}".rstrip()
        for name, size in sizes.items()
    ]

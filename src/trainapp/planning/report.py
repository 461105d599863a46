"""`mode=plan`: the plan on the terminal and in the run directory. Imports no torch."""

import sys
import textwrap
from pathlib import Path
from typing import Any

from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.files import atomic_write, strict_json
from trainapp.planning.answer import complete
from trainapp.planning.process import ask_in_parts
from trainapp.units import bytes_text

PLAN, PICTURE = "plan.json", "plan.png"
WIDTH = 100


def run(config: Config) -> float | None:
    """Plan, print and write. Returns the peak in bytes, for Hydra's optimizing sweepers; None if it is not known."""
    run_dir, known = Path(config.run_dir), {}

    def print_early(facts: dict[str, Any]) -> None:
        known.update(facts)
        print("\n".join(_before_levers(facts)), flush=True)
        if sys.stderr.isatty():
            print("the levers follow, each traced (plan.levers=false leaves them out)", file=sys.stderr, flush=True)

    facts = ask_in_parts(config, run_dir / PICTURE, print_early)
    run_dir.mkdir(parents=True, exist_ok=True)
    with atomic_write(run_dir / PLAN) as file:
        file.write(strict_json(complete(facts), indent=1) + "\n")
    print(_rest(facts, known, config) if known else text(facts, config), flush=True)
    peak = facts.get("peak_bytes")
    return None if peak is None else float(peak)


def _rest(facts: dict[str, Any], known: dict[str, Any], config: Config) -> str:
    """What `text` adds to what was printed early; all of it where that no longer holds."""
    printed, notes = "\n".join(_before_levers(known)) + "\n", known.get("notes", [])
    whole = text(facts | {"notes": notes}, config)
    if not whole.startswith(printed):
        return text(facts, config)
    return "\n".join([*facts.get("notes", [])[len(notes) :], whole.removeprefix(printed)])


def text(facts: dict[str, Any], config: Config) -> str:
    """The plan of this configuration as text; where something fits, the last line is the overrides to paste."""
    if "peak_bytes" not in facts:
        return "\n".join([f"{facts['certainty']}: {facts['reason']}", *facts.get("notes", [])])
    lines, largest = _before_levers(facts), facts["largest_micro_size"]
    if "best" in facts:
        lines += [*_levers(facts), *_best(facts)]
    elif largest:
        evaluation = facts["largest_eval_micro_size"]
        evaluating = [f"batch.eval_micro_size={evaluation}"] if evaluation else []
        lines.append(" ".join([*size_overrides(config, largest), *evaluating]))
    return "\n".join(lines)


def _before_levers(facts: dict[str, Any]) -> list[str]:
    limit, largest, largest_eval = (facts[f] for f in ("limit_bytes", "largest_micro_size", "largest_eval_micro_size"))
    evaluation = f", evaluation {facts['eval_micro_size']}" if facts["eval_micro_size"] else ""
    module = f" ({facts['binding_module']})" if facts["binding_module"] else ""
    lines = [
        f"micro-batch {facts['micro_size']}{evaluation}: {_needed_text(facts)}, in "
        f"{facts['binding_phase'].replace('_', ' ')}{module}",
        *([f"{facts['certainty']}: {facts['reason']}"] if "reason" in facts else []),
        *_of_ranks(facts["ranks"]),
        *_device_lines(facts),
        *facts.get("notes", []),
        "peak by phase",
        *_rows(facts["phases"]),
        "at the peak",
        *_rows(dict(sorted(facts["kinds"].items(), key=lambda kind: -kind[1]))),
    ]
    if largest is None:
        return lines
    fitting = _nothing_fits(limit)
    if largest:
        whole = " (all samples of a step)" if largest == facts["most_micro_size"] else ""
        fitting = f"largest sizes that fit {bytes_text(limit)}: micro-batch {largest}{whole}"
    if largest and largest_eval:
        most = " (the most that a run tries)" if largest_eval == facts["most_eval_micro_size"] else ""
        fitting += f", evaluation {largest_eval}{most}"
    elif largest and largest_eval == 0:
        fitting += "; no evaluation micro-batch fits"
    return [*lines, fitting]


def _nothing_fits(limit: int) -> str:
    return f"no micro-batch fits {bytes_text(limit)}"


def _levers(facts: dict[str, Any]) -> list[str]:
    """A table of WIDTH columns."""
    evaluated = facts["levers_eval_micro_size"]
    sizes = f"micro-batch {facts['micro_size']}" + (f", evaluation {evaluated}" if evaluated else "")
    header = f"with {sizes} and" if evaluated or not facts["eval_micro_size"] else f"training with {sizes} and"
    on_device = "reserved_bytes" in facts
    reserved = f"  {'reserved':>10}" if on_device else ""
    lines = [f"{'peak':>10}{reserved}  {'largest':>7}  {'time':>7}  {'certainty':<13}  {header}"]
    changes_training = False
    for entry in facts["levers"]:
        if entry["result"] == "other" and not changes_training:
            changes_training = True
            lines.append("what changes the training")
        peak = "-" if entry["peak_bytes"] is None else bytes_text(entry["peak_bytes"])
        largest = "-" if entry["largest_micro_size"] is None else str(entry["largest_micro_size"])
        time = "-" if entry["relative_time"] is None else f"x {entry['relative_time']:.2f}"
        if on_device:
            peak += f"  {'-' if entry['reserved_bytes'] is None else bytes_text(entry['reserved_bytes']):>10}"
        start = f"{peak:>{22 if on_device else 10}}  {largest:>7}  {time:>7}  {entry['certainty']:<13}  "
        lines += textwrap.wrap(
            entry["overrides"],
            WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
    notes = ["largest -: not searched"] if any(e["largest_micro_size"] is None for e in facts["levers"]) else []
    notes += ["time: by the GPU's data sheet, not confirmed by any run"] if on_device else []
    return [*lines, *([f"({'; '.join(notes)})"] if notes else [])]


def _best(facts: dict[str, Any]) -> list[str]:
    """What the best plan is, and its overrides to paste."""
    best, limit = facts["best"], bytes_text(facts["limit_bytes"])
    needed = best.get("reserved_bytes", best["peak_bytes"])
    peak, room = bytes_text(needed), needed - best["missing_bytes"]
    if best["missing_bytes"]:
        fitted = limit if room >= facts["limit_bytes"] else f"{bytes_text(room)}, what the plan may use of {limit}"
        line = f"nothing fits {fitted}; the closest needs {peak}, {bytes_text(best['missing_bytes'])} too much:"
    else:
        known = best["relative_time"] is not None
        line = f"the {'fastest' if known else 'least change'} that fits {limit}: "
        line += f"{peak} reserved" if "reserved_bytes" in best else f"peak {peak}"
        line += f", x {best['relative_time']:.2f} of the time" if known else ""
        line += ", though it changes the training:" if best["result"] == "other" else ":"
    return [line, best["overrides"]]


def _device_lines(facts: dict[str, Any]) -> list[str]:
    """What `plan.device` adds."""
    if "reserved_bytes" not in facts:
        return []
    device, segments = facts["device"], "expandable segments" if facts["expandable_segments"] else "fixed segments"
    outside, nccl = bytes_text(device["context_bytes"] + device["nccl_bytes"]), device["nccl_bytes"]
    return [
        f"on {device['name']}, predicted without it, with {segments}; outside of the allocator about {outside}"
        + (f", {bytes_text(nccl)} of it NCCL's buffers" if nccl else "")
    ]


def _of_ranks(ranks: dict[str, Any]) -> list[str]:
    """One line where there are several ranks: which one binds, and the others that differ."""
    if ranks["world"] == 1:
        return []
    copies = f", {ranks['replicas']} copies" if ranks["strategy"] == "fsdp" and ranks["replicas"] > 1 else ""
    peaks, binding = ranks["peak_bytes"], str(ranks["binding_rank"])
    others = [f"rank {rank}: {bytes_text(peak)}" for rank, peak in peaks.items() if peak != peaks[binding]]
    which = f"rank {binding} is the highest ({', '.join(others)})" if others else "all ranks alike"
    return [f"{ranks['world']} ranks, {ranks['strategy']}{copies}: {which}"]


def _needed_text(facts: dict[str, Any]) -> str:
    """What is needed, and of how much: on a GPU, what the allocator reserves has to fit."""
    limit = bytes_text(facts["limit_bytes"])
    if "reserved_bytes" not in facts:
        return f"peak {_peak_text(facts)} of {limit}"
    room = bytes_text(facts["device"]["room_bytes"])
    usable = limit if room == limit else f"the {room} that a plan of several ranks may use of {limit}"
    return f"reserved {bytes_text(facts['reserved_bytes'])} of {usable}, allocated {_peak_text(facts)}"


def _peak_text(facts: dict[str, Any]) -> str:
    if "range_bytes" not in facts:
        return f"{bytes_text(facts['peak_bytes'])} ({facts['certainty']})"
    low, high = (bytes_text(end) for end in facts["range_bytes"])
    return f"{low} to {high}" if low != high else f"{high} (range)"


def _rows(sizes: dict[str, int]) -> list[str]:
    width = max((len(name) for name in sizes), default=0)
    most = max(sizes.values(), default=1)
    return [
        f"  {name.replace('_', ' '):<{width}} {bytes_text(size):>11}  {'#' * round(40 * size / most)}".rstrip()
        for name, size in sizes.items()
    ]

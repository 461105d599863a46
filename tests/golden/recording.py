"""What runs leave behind, as JSON that can be compared: the terminal's text, files of results, checkpoints' contents.

`record` performs a scenario and describes it; `differences` compares two descriptions. What differs between two runs of
the same program, or between machines, is replaced by its name in angle brackets.
"""

import csv
import difflib
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import faults
import helpers
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from golden.scenarios import BEFORE, Command, Scenario
from trainapp.signals import TO_BE_CONTINUED

Json = Any
TESTS = Path(__file__).resolve().parents[1]
EXPECTED = Path(__file__).parent / "expected"
FOLDER_BEFORE = Path(__file__).parent / "before"
RECORDED_IN = Path("/tmp/trainapp_before")
UNINTERRUPTED = "uninterrupted.json"
LINKS = ("golden/parts.py", "helpers/faults.py", "helpers/own_models.py", "zoo")
TOLERANCE = 2e-3  # relative: processors round differently

# What other programs write into exports, copies of the terminal's text, and settings, which are in manifests, too.
ONLY_NAMED = (
    *("config.json", "generation_config.json", "adapter_config.json", "trainapp.log", "lr_find.log"),
    *("config.yaml", "overrides.yaml"),
)
PLAIN_SCENARIO = Scenario("", ())
LOGS = ("metrics.jsonl", "evaluations.jsonl", "callbacks.jsonl")
LIMIT = 240  # seconds for a command
ABSENT = "-"  # in a column of a log
LINE = 150  # the most characters of a value in one line of an expected record

# Values of these keys, wherever they are, depend on the clock or the machine.
VARYING_KEYS = frozenset(
    {
        *("seconds", "seconds_lost", "samples_per_second", "tokens_per_second", "data_wait", "started", "threads"),
        *("host", "python", "torch", "trainapp", "sha256", "is_emulated"),
    }
)
VARYING_PARTS = ("host_rss",)  # and of keys with these parts
# Texts, in order. The names of folders come before them.
VARYING_TEXTS = (
    (r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?", "<date>"),
    (r"\b[0-9a-f]{64}\b", "<digest>"),
    (r"\b\d+ samples/s|samples/s \d+", "<speed>"),
    (r"(\b(\d+:)?\d\d:\d\d|\?) left", "<time> left"),
    (r"\b\d+(\.\d+)? (s|min|h)\b", "<time>"),
    (r"\(process \d+ on host \S+", "(process <number> on host <name>"),
    (r"\btorch-?\d+\.\d+\.\d+\S*|\bpython \d+\.\d+\.\d+", "<version>"),
    (r"; emulated: this CPU has no .*", ""),
    # A table names what all rows have in common above its columns, by chance the time, too.
    (r"^(all: .*?)(, time <time>|time <time>, )", r"\1"),
    (r"^(# +job .*?) +time\b|^((?:\d+|-)  .*?) +<time>", r"\1\2"),
)
# Lines of libraries: C++ logs, warnings of Python, Hydra's and multiprocessing's announcement of a traceback.
FOREIGN_LINE = re.compile(
    r"\[?[WEI]\d{4} [\d:.]+ |\[(rank\d+|Gloo)\]|.*/site-packages/|Error executing job with overrides: "
    r"|Process \w+-\d+:$|Warning: Detected no triton"
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


# --- performing a scenario


def record(scenario: Scenario, folder: Path) -> Json:
    """Run the commands of a scenario in an empty folder, and describe what they print and write."""
    prepare(folder)
    if scenario.is_continued:
        copy_before(folder)
    text = Normalised(folder, scenario)
    commands = [perform(command, folder, text) for command in scenario.commands]
    files = describe_files(folder, text)
    described = {"commands": commands, "files": files, "torch": torch_version()}
    return json.loads(json.dumps(described))  # as it is read again: keys are strings


def torch_version() -> str:
    """Return the part of torch's version on which results depend."""
    return ".".join(torch.__version__.split(".")[:2])


def prepare(folder: Path) -> None:
    """Make the folder, with links to the tests' parts that runs import."""
    folder.mkdir(parents=True)
    for target in LINKS:
        (folder / Path(target).name).symlink_to(TESTS / target)


def perform(command: Command, folder: Path, text: "Normalised") -> Json:
    """Run a command in the folder and describe how it ended and what it printed. All of its faults must strike."""
    marks = folder.with_name(f"{folder.name}_fired")
    marks.mkdir(exist_ok=True)
    environment = {}
    if command.faults:
        environment[faults.ENVIRONMENT] = faults.environment(marks, *command.faults)[faults.ENVIRONMENT]
    for path in command.touches:
        (folder / path).touch()
    arguments = [_filled(text, folder) for text in shlex.split(command.arguments)]
    done = helpers.run_cli(*arguments, cwd=folder, env=environment, timeout=LIMIT)
    missed = [fault for fault in command.faults if faults.fired(marks, fault) != fault.times]
    assert not missed, f"did not strike: {missed}\n{done.stdout}{done.stderr}"
    printed, logged = (text.lines(stream) for stream in (done.stdout, done.stderr))
    if command.is_unordered:
        printed, logged = sorted(printed), sorted(logged)
    return {"status": done.returncode, "stdout": printed, "stderr": logged}


def _filled(argument: str, folder: Path) -> str:
    """Replace `<micro_schedule of RUN>` by that of the run's result.json."""

    def schedule(match: re.Match[str]) -> str:
        return json.dumps(helpers.result(folder / match[1])["micro_schedule"])

    return re.sub(r"<micro_schedule of (\w+)>", schedule, argument)


# --- what an earlier version has begun


def record_before() -> None:
    """Write the folder `before`, and the logs of the same runs without an interruption.

    The folder in which they run is in their checkpoints, whose manifests have digests: it has the same name everywhere.
    """
    try:
        _perform_before(is_stopped=True)
        shutil.rmtree(FOLDER_BEFORE, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.log", "*.html", "leaderboard.*", *(Path(link).name for link in LINKS))
        shutil.copytree(RECORDED_IN, FOLDER_BEFORE, ignore=ignored)
        for path in FOLDER_BEFORE.rglob("command.json"):
            command = json.loads(path.read_text()) | {"host": "host"}
            path.write_text(json.dumps(command, indent=1) + "\n")
        _perform_before(is_stopped=False)
        write_json(FOLDER_BEFORE / UNINTERRUPTED, logs_below(RECORDED_IN))
    finally:
        shutil.rmtree(RECORDED_IN, ignore_errors=True)


def _perform_before(is_stopped: bool) -> None:
    shutil.rmtree(RECORDED_IN, ignore_errors=True)
    prepare(RECORDED_IN)
    for arguments, stops in BEFORE:
        command = Command(f"{arguments} {stops}" if is_stopped else arguments)
        done = perform(command, RECORDED_IN, Normalised(RECORDED_IN))
        assert done["status"] == (TO_BE_CONTINUED if is_stopped else 0), done


def copy_before(folder: Path) -> None:
    """Copy the folder `before` into another one, as if its runs had been started there."""
    shutil.copytree(FOLDER_BEFORE, folder, ignore=shutil.ignore_patterns(UNINTERRUPTED), dirs_exist_ok=True)
    for name in ("command.json", "sweep.jsonl"):
        for path in folder.rglob(name):
            path.write_text(path.read_text().replace(str(RECORDED_IN), str(folder)))


def logs_below(folder: Path) -> Json:
    """Return what the runs in a folder have logged, without memory and speed."""
    logs = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if path.name in LOGS:
            columns = _columns(helpers.lines(path))
            kept = {key: values for key, values in columns.items() if key in ("step", "samples", "epoch", "lr", "loss")}
            logs[path.relative_to(folder).as_posix()] = kept
    return logs


# --- normalising


class Normalised:
    """Texts and values without what varies.

    folder: the one in which the commands ran. scenario: has further keys of values that vary, and what is not steady.
    """

    def __init__(self, folder: Path, scenario: Scenario = PLAIN_SCENARIO):
        self.has_settings = scenario.has_settings
        self._varying_keys = VARYING_KEYS.union(scenario.varying)
        self._varying_texts = (*VARYING_TEXTS, (scenario.varying_text, "<varying>"))
        self._unsteady = re.compile(scenario.unsteady)
        known = {
            str(folder): "<folder>",
            str(TESTS.parent): "<root>",
            sys.prefix: "<prefix>",
            sys.base_prefix: "<prefix>",
        }
        longest_first = sorted(known, key=len, reverse=True)
        self._folders = [(path, known[path]) for path in longest_first]

    def is_unsteady(self, text: str) -> bool:
        """Whether a line or the name of a file may be missing."""
        return self._unsteady.search(text) is not None

    def text(self, text: str) -> str:
        """Return one line. Columns are apart by two spaces, whatever their width."""
        for path, name in self._folders:
            text = text.replace(path, name)
        for pattern, name in self._varying_texts:
            text = re.sub(pattern, name, text)
        return re.sub(r"(?<=\S) {2,}(?=\S)", "  ", text).rstrip()

    def lines(self, text: str) -> list[str]:
        """Return the lines of a text without those of libraries; of tracebacks only the last error."""
        kept: list[str] = []
        is_in_traceback = False
        for line in text.splitlines():
            if line.startswith("Traceback (most recent call last)"):
                is_in_traceback = True
                if "<traceback>" in kept:  # another error while one was handled
                    del kept[kept.index("<traceback>") :]
                kept.append("<traceback>")
            elif is_in_traceback and line.startswith(" "):
                continue
            elif not FOREIGN_LINE.match(line) and not self.is_unsteady(line):
                kept.append(self.text(_without_module(line) if is_in_traceback else line))
                is_in_traceback = False
        return kept

    def value(self, value: Json, key: str = "") -> Json:
        """Return a JSON value without what varies. None stays None: whether there is a value does not vary."""
        if isinstance(value, dict):
            return {self.text(name): self.value(item, name) for name, item in value.items()}
        if value is None or (isinstance(value, bool) and key != "is_emulated"):
            return value
        if key in self._varying_keys or any(part in key for part in VARYING_PARTS):
            return f"<{key}>"
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value


# --- files


def describe_files(folder: Path, text: Normalised) -> dict[str, Json]:
    """Return the content of each file by its path; None where only its name counts. Links are left out."""
    described: dict[str, Json] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if _is_linked(path, folder) or text.is_unsteady(relative.as_posix()):
            continue
        if path.is_dir() and path.name == "checkpoints":
            described[relative.as_posix()] = _describe_checkpoints(path, text)
        elif path.is_file() and "checkpoints" not in relative.parts:
            described[_file_name(relative)] = _describe_file(path, text)
    return described


def _is_linked(path: Path, folder: Path) -> bool:
    """Whether the path is, or is below, a link to the tests' parts, or compiled from one."""
    below = [folder, *(folder / part for part in path.relative_to(folder).parents)]
    return "__pycache__" in path.parts or path.is_symlink() or any(parent.is_symlink() for parent in below)


def _file_name(path: Path) -> str:
    """Return the path without the time, host and process in the name of an event file."""
    return re.sub(r"events\.out\.tfevents\.\S+", "events.out.tfevents", path.as_posix())


def _describe_file(path: Path, text: Normalised) -> Json:
    if path.name in ONLY_NAMED or path.suffix in (".html", ".png"):
        return None
    if path.name.startswith("events.out.tfevents"):
        return _describe_events(path.parent)
    if path.suffix == ".safetensors":
        return _describe_safetensors(path)
    content = path.read_text()
    if path.suffix == ".json":
        value = json.loads(content)
        if isinstance(value, dict) and "trace" in value:  # names files and lines of the program
            value["trace"] = _without_module(value["trace"][-1])
        if path.name == "command.json":  # those of the scenario
            value["arguments"] = f"{len(value['arguments'])} texts"
        return text.value(value)
    if path.suffix == ".jsonl":
        rows = [text.value(json.loads(line)) for line in content.splitlines()]
        return _columns(rows) if path.name in LOGS else [_without_settings(row) for row in rows]
    if path.suffix == ".csv":
        return [text.value(row) for row in csv.DictReader(content.splitlines())]
    return text.lines(content)


def _without_module(error: str) -> str:
    """Return an error as Python prints it without the module of its class, if that is the program's."""
    return re.sub(r"^trainapp(\.\w+)*\.(?=\w+(:|$))", "", error)


def _columns(rows: Sequence[Mapping[str, Json]]) -> dict[str, list[Json]]:
    """Return the values of each key in all rows, `ABSENT` where a row lacks it."""
    keys = {key for row in rows for key in row}
    return {key: [row.get(key, ABSENT) for row in rows] for key in keys}


def _without_settings(row: Json) -> Json:
    """Shorten the line of a sweep's journal that has the settings of its jobs, as manifests have them."""
    if "asked" in row:
        row["config"] = sorted(row["config"])
    return row


def _describe_events(folder: Path) -> Json:
    """Return the number of TensorBoard's entries by kind and tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow: a second

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    read = {"scalars": accumulator.Scalars, "tensors": accumulator.Tensors, "images": accumulator.Images}
    return {kind: {tag: len(entries(tag)) for tag in sorted(tags[kind])} for kind, entries in read.items()}


def _describe_safetensors(path: Path) -> Json:
    from safetensors.torch import load_file

    return {name: _shape(tensor.dtype, tensor.shape) for name, tensor in load_file(path).items()}


# --- checkpoints


def _describe_checkpoints(folder: Path, text: Normalised) -> Json:
    """Return the content of the checkpoints by their names; what is as in the one before refers to it."""
    described: dict[str, Json] = {}
    before, name_before = {}, ""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            described[path.name] = text.lines(path.read_text())
            continue
        if not (path / "manifest.json").exists():  # a save was interrupted
            described[path.name] = sorted(file.name for file in path.iterdir())
            continue
        content = _describe_checkpoint(path, text)
        described[path.name] = {
            key: f"as in {name_before}" if before.get(key) == part else part for key, part in content.items()
        }
        before, name_before = content, path.name
    return described


def _describe_checkpoint(path: Path, text: Normalised) -> Json:
    manifest = json.loads((path / "manifest.json").read_text())
    for facts in manifest["files"].values():
        facts["bytes"] = "<bytes>"
    settings = manifest.pop("config")
    values = torch.load(path / "values.pt", weights_only=True)
    return {
        "manifest": text.value(manifest),
        **({"settings": text.value(settings)} if text.has_settings else {}),
        "tensors": _tensors(path),
        **{f"values.{name}": text.value(_plain(part), name) for name, part in values.items()},
    }


def _tensors(path: Path) -> dict[str, str]:
    """Return dtype and shape of each tensor, as torch has written them, and in how many shards."""
    described = {}
    for name, metadata in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if isinstance(metadata, TensorStorageMetadata):
            shards = f" in {len(metadata.chunks)} shards" if len(metadata.chunks) > 1 else ""
            described[name] = _shape(metadata.properties.dtype, metadata.size) + shards
        else:
            described[name] = "bytes"
    return described


def _shape(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _plain(value: Any) -> Json:
    """Return nested values with tensors as their dtype and shape, and other types by name where JSON has none."""
    if isinstance(value, torch.Tensor):
        return _shape(value.dtype, value.shape)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {type(value).__name__: sorted(map(str, value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"<{type(value).__name__}>"


# --- comparing


def differences(expected: Json, got: Json, path: str = "") -> Iterator[str]:
    """Yield where two descriptions differ: what was expected, and what has come."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(expected.keys() - got.keys()):
            yield f"{path}/{key}: missing; expected {_short(expected[key])}"
        for key in sorted(got.keys() - expected.keys()):
            yield f"{path}/{key}: not expected; got {_short(got[key])}"
        for key in sorted(expected.keys() & got.keys()):
            yield from differences(expected[key], got[key], f"{path}/{key}")
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) == len(got):
            for number, (one, other) in enumerate(zip(expected, got, strict=True), start=1):
                yield from differences(one, other, f"{path}[{number}]")
        else:
            yield f"{path}: expected {len(expected)} entries, got {len(got)}:\n{_changed_entries(expected, got)}"
    elif not _is_alike(expected, got):
        yield f"{path}:\n  expected {_short(expected)}\n  got      {_short(got)}"


def _changed_entries(expected: Sequence[Json], got: Sequence[Json]) -> str:
    """Return the entries that only one of the lists has."""
    before, after = ([_short(entry) for entry in entries] for entries in (expected, got))
    return "\n".join(f"  {line}" for line in difflib.ndiff(before, after) if line.startswith(("-", "+")))


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _is_alike(expected: Json, got: Json) -> bool:
    """Whether two values that contain no others are equal; floats, and those in texts, nearly."""
    if isinstance(expected, float) and isinstance(got, float) and not math.isnan(expected):
        return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=1e-9)
    if isinstance(expected, str) and isinstance(got, str):
        return _is_alike_text(expected, got)
    return type(expected) is type(got) and (expected == got or (expected != expected and got != got))  # nan


def _is_alike_text(expected: str, got: str) -> bool:
    if NUMBER.split(expected) != NUMBER.split(got):
        return False
    return all(map(_is_alike_number, NUMBER.findall(expected), NUMBER.findall(got)))


def _is_alike_number(expected: str, got: str) -> bool:
    """Whether two numbers in texts are equal. Those with a point or an exponent may differ in their last digit."""
    if expected == got:
        return True
    if not (re.search(r"[.e]", expected) and re.search(r"[.e]", got)):
        return False
    tolerance = max(TOLERANCE * abs(float(expected)), 1.01 * _last_digit(expected))
    return abs(float(expected) - float(got)) <= tolerance


def _last_digit(number: str) -> float:
    """Return the value of a one in the number's last digit if that has at least three; otherwise 0."""
    digits, _, exponent = number.lstrip("+-").partition("e")
    if len(digits.replace(".", "").lstrip("0")) < 3:
        return 0.0
    return float(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


# --- files of expected records


def write_json(path: Path, content: Json) -> None:
    """Write JSON with keys in order, an entry per line unless several fit into one."""
    path.write_text(_layout(content) + "\n")


def read_expected(name: str) -> Json:
    """Return the record of a scenario as it was before."""
    return json.loads((EXPECTED / f"{name}.json").read_text())


def write_expected(name: str, content: Json) -> None:
    """Write the record of a scenario."""
    EXPECTED.mkdir(exist_ok=True)
    write_json(EXPECTED / f"{name}.json", content)


def _layout(value: Json, indent: str = "") -> str:
    """Return JSON whose containers take one line where they fit. Otherwise each entry has one; numbers share theirs."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or len(line) <= LINE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_layout(value[key], inner)}" for key in sorted(value)]
    else:
        entries = _filled_lines([_layout(item, inner) for item in value])
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}{end}"


def _filled_lines(entries: list[str]) -> list[str]:
    """Return the entries of a list with neighbours on one line where all are short."""
    if max(map(len, entries)) > LINE // 4:
        return entries
    lines = [entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + len(entry) + 2 <= LINE:
            lines[-1] += f", {entry}"
        else:
            lines.append(entry)
    return lines

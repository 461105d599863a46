"""Whether the data of an interrupted prediction is still the same: from a few samples and the times of files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainapp.checkpoint.plain import digest, encoded
from trainapp.data.eval_stream import EvalStream
from trainapp.data.sampler import EvalBatches
from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.train.run import Run

SAMPLES = 8  # that are compared: from the first to the last


def data_facts(run: Run, batches: EvalBatches | EvalStream, settings: Any) -> dict[str, Any]:
    """Plain values: size and time of the files that `settings` names, and digests of some samples (of a stream, none).

    Samples that are not the same when they are read twice are left out.
    """
    facts: dict[str, Any] = {"files": {str(path): _stamp(path) for path in _files(settings)}}
    if isinstance(batches, EvalBatches):
        with preserved_rng(run.state.device), run.state.stateful.preserved_generators():
            facts["contents"] = _contents(batches)
    return facts


def _contents(batches: EvalBatches) -> list[str]:
    try:
        digests = [_digest(sample) for sample in batches.spread(SAMPLES)]
    except UserError:  # of a sample that cannot be read: its own batch says so
        return []
    once, again = digests[: len(digests) // 2], digests[len(digests) // 2 :]
    return once if once == again else []


def _files(settings: Any) -> Iterator[Path]:
    if isinstance(settings, dict):
        for value in settings.values():
            yield from _files(value)
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from _files(value)
    elif isinstance(settings, str) and 0 < len(settings) < 4096 and "\0" not in settings:
        try:
            path = Path(settings).expanduser()
            if path.is_file():
                yield path.resolve()
        except (OSError, RuntimeError):  # no path: a name too long for a file, or `~NAME` without such a user
            pass


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _digest(sample: Any) -> str:
    return digest(encoded(sample, "", strict=False))

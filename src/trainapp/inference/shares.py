"""Lines of several ranks: each writes those of its share of the samples; rank 0 puts them together in their order."""

import json
from collections.abc import Iterator
from pathlib import Path

from trainapp import strict_json
from trainapp.errors import TrainingStopped
from trainapp.files import atomic_write
from trainapp.inference.lines import Lines
from trainapp.parallel.rank_zero import answered_by_rank_zero
from trainapp.parallel.ranks import Ranks


def share_path(path: Path, rank: int, world: int) -> Path:
    """The file of one rank; of a single one, the file itself."""
    return path if world == 1 else path.with_name(f"{path.name}.rank_{rank}_of_{world}")


def publish_shares(path: Path, lines: Lines, ranks: Ranks, interleaved: bool, setting: str) -> int:
    """All ranks have written their lines: give the file its name. Returns how many there are. Collective.

    interleaved: whether the shares alternate sample by sample, as those of a stream; otherwise one follows the other.
    Raises TrainingStopped, on all ranks, where rank 0 cannot read the others' files, or cannot write.
    """
    if ranks.world == 1:
        lines.publish()
        return lines.done
    lines.sync()
    counts = ranks.all_gather_object(lines.done)
    answered_by_rank_zero(ranks, lambda: _put_together(path, counts, interleaved, setting))
    lines.remove()
    return sum(counts)


def _put_together(path: Path, counts: list[int], interleaved: bool, setting: str) -> None:
    shares = [share_path(path, rank, len(counts)) for rank in range(len(counts))]
    try:
        _merge(path, [share.with_name(f"{share.name}.partial") for share in shares], counts, interleaved)
    except FileNotFoundError as error:
        raise TrainingStopped(
            f"{setting}={path}: rank 0 cannot read {error.filename}, which another rank has written; name a file "
            "on a file system that all nodes share"
        ) from None
    except OSError as error:
        raise TrainingStopped(
            f"{setting}={path}: cannot be written ({error.strerror}); the lines of each rank are kept, and the "
            "same command continues there"
        ) from None


def _merge(path: Path, parts: list[Path], counts: list[int], interleaved: bool) -> None:
    with atomic_write(path, sync=True) as file:
        files = [open(part) for part in parts]  # noqa: SIM115  # closed below
        try:
            for number, rank in enumerate(_order(counts, interleaved)):
                row = json.loads(files[rank].readline())  # whose index is among this rank's lines
                file.write(strict_json.dumps(row | {"index": number}) + "\n")
        finally:
            for own in files:
                own.close()


def _order(counts: list[int], interleaved: bool) -> Iterator[int]:
    """The rank of each line."""
    if not interleaved:
        for rank, count in enumerate(counts):
            yield from (rank for _ in range(count))
        return
    for number in range(max(counts)):
        yield from (rank for rank, count in enumerate(counts) if number < count)

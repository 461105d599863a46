"""What a job of a sweep is: its overrides, directory, configuration and command. All are checked before any trains."""

import hashlib
import itertools
import multiprocessing
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pydantic
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from pydantic import TypeAdapter

from trainapp.config import command_line, compose, mistakes, resume_rules
from trainapp.config.arguments import messages
from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import strict_json
from trainapp.sweep.space import Space, Values
from trainapp.units import listed

CHECKED = 300  # jobs of a grid; composing one takes 0.2 s
# Hydra's own overrides that are about the sweep.
_OF_THE_SWEEP = (
    "hydra.mode=",
    "hydra.sweep.",
    "hydra/sweeper",
    "hydra.sweeper",
    "hydra/launcher",
    "hydra.launcher",
    "hydra.run.dir=",
)


def settings_of(composed: DictConfig) -> Sweep:
    """The settings `sweep.*`. Raises UserError with all mistakes."""
    plain = cast(Any, OmegaConf.to_container(composed.sweep, resolve=True))
    try:
        return TypeAdapter(Sweep).validate_python(plain)
    except pydantic.ValidationError as error:
        known = list(composed.sweep)
        raise UserError("\n".join(messages(error, "sweep", lambda location: known))) from None


@dataclass(frozen=True)
class Composed:
    """overrides: what the job's command line has, without Hydra's."""

    number: int
    name: str  # the overrides in which jobs differ
    overrides: list[str]
    folder: Path
    config: Config

    @property
    def digest(self) -> str:
        """Equal for equal configurations."""
        return hashlib.sha256(strict_json(resume_rules.settings(self.config.to_dict())).encode()).hexdigest()


class Composer:
    """Composes jobs from the sweep's own configuration."""

    def __init__(self, loader: ConfigLoader, sweep: DictConfig, space: Space):
        self.folder = Path(str(sweep.hydra.sweep.dir)).resolve()
        self._loader, self._sweep, self.space = loader, sweep, space

    def job(self, number: int, values: Values) -> Composed:
        """Raises UserError for mistakes in its settings."""
        swept = self.space.swept(values)
        overrides = [*self.space.fixed, *swept]
        try:
            config = self._loader.load_sweep_config(self._sweep, [*map(command_line.for_composition, overrides)])
        except Exception as error:
            message = mistakes.explain(error, overrides)
            if message is None:
                raise
            raise UserError(message) from None
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        with _resolved_by(config):
            folder = self.folder / str(OmegaConf.select(config, "hydra.sweep.subdir"))
            with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
                config.hydra.runtime.output_dir = str(folder)
            task = config.copy()
            with open_dict(task):
                del task["hydra"]
            checked = compose.from_hydra(task, str(folder), "", overrides)
            return Composed(number, " ".join(swept), overrides, folder, checked)

    def check(self, numbers: Mapping[Values, int]) -> dict[str, str]:
        """Compose all jobs of a grid of up to CHECKED, otherwise each choice and both ends of each interval. Returns
        the digests of a whole grid's jobs, by name. Raises UserError that names those that could not start.

        numbers: of jobs that have one.
        """
        is_whole = self.space.size <= CHECKED
        chosen = list(self.space.grid() if is_whole else self.space.covering())
        print(f"checking {len(chosen)} jobs", flush=True)
        coming = itertools.count(len(numbers))
        errors: dict[str, str] = {}
        digests: dict[str, str] = {}
        configs: dict[str, Config] = {}
        folders: dict[Path, str] = {}
        for values in chosen:
            name = " ".join(self.space.swept(values)) or "the job"
            try:
                job = self.job(numbers[values] if values in numbers else next(coming), values)
                configs[name], digests[job.name] = job.config, job.digest
                if (other := folders.setdefault(job.folder, name)) != name:
                    errors[name] = f"hydra.sweep.subdir: its directory is that of {other}; name hydra:job.num in it"
            except UserError as error:
                errors[name] = str(error)
        # In a process of its own, since it imports torch and users' modules, which this one does not need.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            errors |= process.submit(_errors_in, configs).result()
        if errors:
            by_text: dict[str, list[str]] = {}
            for name, text in errors.items():
                by_text.setdefault("; ".join(text.splitlines()), []).append(name)
            lines = [f"{listed(names)}: {text}" for text, names in by_text.items()]
            raise UserError("\n".join(["sweep: nothing has run, since these jobs could not start:", *lines]))
        return digests if is_whole else {}

    def command(self, job: Composed, more: list[str], folder: Path | None = None) -> list[str]:
        """How to start the job as a process. more: other overrides. folder: in place of its own."""
        given = cast(Any, OmegaConf.to_container(self._sweep.hydra.overrides.hydra, resolve=False))
        return [
            *(sys.executable, "-m", "trainapp", *command_line.flags(self._sweep.hydra)),
            *(*job.overrides, *more, *(text for text in given if not text.startswith(_OF_THE_SWEEP))),
            *("hydra.mode=RUN", command_line.override("hydra.run.dir", str(folder or job.folder))),
            *(f"hydra.job.num={job.number}", f"hydra.job.id='{job.number}'"),
            command_line.override("hydra.sweep.dir", str(self.folder)),
        ]


def _errors_in(configs: dict[str, Config]) -> dict[str, str]:
    """The mistakes in the classes that configurations name, and in their arguments."""
    from trainapp.assembly.components import located

    errors = {}
    for name, config in configs.items():
        try:
            located(config)
        except UserError as error:
            errors[name] = str(error)
    return errors


@contextmanager
def _resolved_by(config: DictConfig) -> Iterator[None]:
    """Inside the block, `${hydra:...}` refers to this job."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before

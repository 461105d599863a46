"""The jobs of a sweep: their overrides, directories, configurations and commands. All are checked before any trains."""

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
from trainapp.config.claimed_settings import with_claimed_settings
from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import strict_json
from trainapp.sweep.space import Space, Values
from trainapp.units import listed

MOST_CHECKED = 300  # jobs of a grid; composing one takes 0.2 s
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


def read_settings(composed: DictConfig) -> Sweep:
    """Return the settings `sweep.*`. Raises UserError with all mistakes."""
    plain = cast(Any, OmegaConf.to_container(composed.sweep, resolve=True))
    try:
        return TypeAdapter(Sweep).validate_python(plain)
    except pydantic.ValidationError as error:
        names = list(composed.sweep)
        raise UserError("\n".join(messages(error, "sweep", lambda location: names))) from None


@dataclass(frozen=True)
class ComposedJob:
    """A job as its overrides determine it."""

    number: int
    name: str  # the overrides in which jobs differ
    overrides: list[str]  # of its command line, without Hydra's
    folder: Path
    config: Config

    @property
    def digest(self) -> str:
        """A checksum, equal for equal configurations."""
        settings = resume_rules.settings(self.config.to_dict())
        return hashlib.sha256(strict_json(settings).encode()).hexdigest()


class Composer:
    """Composes jobs from the sweep's own configuration."""

    def __init__(self, loader: ConfigLoader, sweep: DictConfig, space: Space):
        self.folder = Path(str(sweep.hydra.sweep.dir)).resolve()
        self.space = space
        self._loader = loader
        self._sweep = sweep

    def job(self, number: int, values: Values) -> ComposedJob:
        """Return the job with this number and these values. Raises UserError for mistakes in its settings."""
        swept = self.space.swept_overrides(values)
        overrides = [*self.space.fixed, *swept]

        # Fill in what Hydra's own sweeper does: settings may refer to it.
        composed = self._compose(overrides)
        with open_dict(composed):
            composed.hydra.job.num = number
            composed.hydra.job.id = str(number)

        # The directory's name may refer to the job's settings, and these to the directory.
        with _resolved_by(composed):
            folder = self.folder / str(OmegaConf.select(composed, "hydra.sweep.subdir"))
            with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
                composed.hydra.runtime.output_dir = str(folder)
            task = composed.copy()
            with open_dict(task):
                del task["hydra"]
            config = compose.from_hydra(task, str(folder), "", overrides)
        return ComposedJob(number, " ".join(swept), overrides, folder, config)

    def _compose(self, overrides: list[str]) -> DictConfig:
        """Return what Hydra composes from the overrides. Raises UserError for mistakes in them."""
        texts = [command_line.for_composition(text) for text in overrides]
        try:
            return self._loader.load_sweep_config(self._sweep, texts)
        except Exception as error:
            message = mistakes.explain(error, overrides)
            if message is None:
                raise
            raise UserError(message) from None

    def check(self, numbers: Mapping[Values, int]) -> dict[str, str]:
        """Compose all jobs of a grid of up to MOST_CHECKED, otherwise each choice and both ends of each interval.

        Args:
            numbers: of the jobs that have one.

        Returns:
            The digests of a whole grid's jobs, by name; otherwise nothing.

        Raises UserError that names the jobs that could not start.
        """
        is_whole = self.space.size <= MOST_CHECKED
        if is_whole:
            configurations = list(self.space.grid())
        else:
            configurations = list(self.space.covering())
        print(f"checking {len(configurations)} jobs", flush=True)

        # Settings, as each job has them, and directories, which no two jobs may share.
        next_numbers = itertools.count(len(numbers))
        errors: dict[str, str] = {}
        digests: dict[str, str] = {}
        configs: dict[str, Config] = {}
        names_by_folder: dict[Path, str] = {}
        for values in configurations:
            name = " ".join(self.space.swept_overrides(values)) or "the job"
            number = numbers.get(values)
            if number is None:
                number = next(next_numbers)
            try:
                job = self.job(number, values)
            except UserError as error:
                errors[name] = str(error)
                continue
            configs[name] = job.config
            digests[job.name] = job.digest
            first_name = names_by_folder.setdefault(job.folder, name)
            if first_name != name:
                errors[name] = f"hydra.sweep.subdir: its directory is that of {first_name}; name hydra:job.num in it"

        # Classes, in a process of its own, since it imports torch and users' modules, which this one does not need.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            errors |= process.submit(_errors_of_classes, configs).result()
        if errors:
            raise UserError("sweep: nothing has run, since these jobs could not start:\n" + _by_message(errors))
        return digests if is_whole else {}

    def command(self, job: ComposedJob, more_overrides: list[str], folder: Path | None = None) -> list[str]:
        """Return the command that starts the job as a process.

        Args:
            job: the job.
            more_overrides: overrides that it gets besides its own.
            folder: its directory, if not `job.folder`.
        """
        command = [sys.executable, "-m", "trainapp"]
        command += command_line.flags(self._sweep.hydra)
        command += job.overrides
        command += more_overrides

        # What the user has overridden of Hydra itself, such as its logging.
        overrides_of_hydra = cast(Any, OmegaConf.to_container(self._sweep.hydra.overrides.hydra, resolve=False))
        command += [text for text in overrides_of_hydra if not text.startswith(_OF_THE_SWEEP)]

        # A single run that sees the same Hydra values as a job of Hydra's own sweeper.
        run_dir = folder or job.folder
        command.append("hydra.mode=RUN")
        command.append(command_line.override("hydra.run.dir", str(run_dir)))
        command.append(f"hydra.job.num={job.number}")
        command.append(f"hydra.job.id='{job.number}'")
        command.append(command_line.override("hydra.sweep.dir", str(self.folder)))
        return command


def _errors_of_classes(configs: dict[str, Config]) -> dict[str, str]:
    """Return the mistakes in the classes that configurations name, and in their arguments, by the jobs' names."""
    from trainapp.assembly.resolved_targets import locate_targets

    errors = {}
    for name, config in configs.items():
        try:
            locate_targets(with_claimed_settings(config))
        except UserError as error:
            errors[name] = str(error)
    return errors


def _by_message(errors: dict[str, str]) -> str:
    """Return the errors of jobs as text, with a line per message."""
    names_by_message: dict[str, list[str]] = {}
    for name, message in errors.items():
        one_line = "; ".join(message.splitlines())
        names = names_by_message.setdefault(one_line, [])
        names.append(name)
    lines = [f"{listed(names)}: {message}" for message, names in names_by_message.items()]
    return "\n".join(lines)


@contextmanager
def _resolved_by(config: DictConfig) -> Iterator[None]:
    """Resolve `${hydra:...}` by this job's configuration inside the block."""
    previous = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = previous

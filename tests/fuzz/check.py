"""What must hold of every random run."""

import signal
import tempfile
from pathlib import Path
from typing import Any

from faults import Fault, Injector
from zoo.catalogue import ALL, Cell
from zoo.harness import Training, check_samples, compare, configure

from trainapp.errors import TrainingStopped, UserError
from trainapp.training.session import Session

from .cases import Case, Raise, Stop

# Settings that decide sizes or recovery, not results: a replay has none of them.
ONLY_SIZES = ("batch.micro_size", "memory.limit", "oom.grow", "oom.clean_steps")


class BrokenDisk(RuntimeError):
    """What the data set raises."""


class Story:
    """Carries out a case: the run, restarted after every stop and every error of the data set."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder
        self.pending = [event for event in case.events if not isinstance(event, Fault)]
        self.injector = Injector([event for event in case.events if isinstance(event, Fault)])
        self.trained: dict[tuple[int, int], list[list[int]]] = {}
        self.failures = self.restarts = self.samples = 0

    @property
    def cell(self) -> Cell:
        """The zoo's, with the samples spoiled where the case asks for it."""
        cell = ALL[self.case.name]
        return cell._replace(data="data.Spoiled") if "data.spoiled" in self.case.settings else cell

    def tell(self) -> Training:
        """The last session."""
        changes = dict(self.case.settings)
        while True:
            config = configure(self.cell, self.folder / "run", changes)
            session = Training(
                self.cell, config, injector=self.injector, on_batch=self.on_batch, on_sample=self.on_sample
            )
            if session.began is not None:
                self.trained = {at: samples for at, samples in self.trained.items() if at < session.began}
            self.trained |= session.trained
            self.failures += len(session.failures)
            if not isinstance(session.error, (SystemExit, BrokenDisk)):
                return session
            later = self.case.later[self.restarts % len(self.case.later)] if self.case.later else {}
            changes |= later
            self.restarts += 1

    def on_batch(self, session: Session) -> None:
        for event in self.pending:
            if isinstance(event, Stop) and session.state.progress.step == event.after:
                self.pending.remove(event)
                session.stop.signal = int(signal.SIGTERM)
                return

    def on_sample(self, session: Session) -> None:
        for event in self.pending:
            if isinstance(event, Raise) and session.state.progress.step == event.after:
                self.samples += 1
                if self.samples >= event.sample:
                    self.samples = 0
                    self.pending.remove(event)
                    raise BrokenDisk("the disk is broken")
                return


ONE_SAMPLE = "Expected more than 1 value per channel when training"


def check(case: Case) -> str:
    """Raises AssertionError unless the case keeps the promise. Returns how it ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        story = Story(case, folder)
        session = story.tell()
        if session.error is not None:
            if ONE_SAMPLE in str(session.error):  # of BatchNorm: a last step of one sample, as in any loop
                return "refused"
            assert isinstance(session.error, UserError), f"{type(session.error).__name__}: {session.error}"
            text = str(session.error)
            assert text.strip(), "an error without a message"
            assert "Traceback" not in text
            return "stopped" if isinstance(session.error, TrainingStopped) else "refused"
        session.trained = story.trained
        check_samples(session)
        memory = session.run.memory
        assert memory.limit is None or memory.peak <= memory.limit
        assert session.run.sizes.train.size >= 1
        replay = Training(story.cell, configure(story.cell, folder / "replay", replay_of(case, session)))
        assert replay.error is None, f"the replay ended with {type(replay.error).__name__}: {replay.error}"
        assert not replay.failures
        found = compare(session.record(), replay.record(), exact_evaluations=False)
        if not story.cell.sums or story.failures or story.restarts:
            found = [difference for difference in found if not difference.startswith(("evaluations", "metrics"))]
        assert found == [], f"{found[:8]} after {session.schedule}"
        counts = f"{story.failures} errors, {story.restarts} restarts"
        return f"replayed after {'no' if not (story.failures or story.restarts) else 'some'} faults ({counts})"


def replay_of(case: Case, session: Training) -> dict[str, Any]:
    """The settings of the replay: those of the case, and the sizes that were used."""
    settings = {key: value for key, value in case.settings.items() if key not in ONLY_SIZES}
    assert session.run is not None
    sizes = {
        "batch.micro_size": "auto",
        "batch.micro_schedule": session.schedule,
        "batch.eval_micro_size": session.run.sizes.evaluation.size,
    }
    return {**settings, **sizes, "checkpointing.save": False}

"""Ctrl-C and SIGTERM, sent to the real program."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import helpers
import psutil
import pytest
import runs

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.hooks.metric_state import TorchMetric
from trainapp.signals import TO_BE_CONTINUED, AtWork, Interrupted, Stopped, StopRequest
from trainapp.training import loop, stopping
from trainapp.training.engine import Engine

# The module slows each step down, so that a signal arrives in the middle of the run, not after it.
SLOW_MODEL = """
import os
import time
from pathlib import Path
from trainapp.models.mlp import MLP
from trainapp.parallel.ranks import DistributedRanks

if "RANK" in os.environ:
    Path("rank_" + os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ.get("NO_HINT") == "True":
    DistributedRanks.announced = lambda self, own: own


class SlowMLP(MLP):
    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, seconds: float = 0.05, slow_from: int = 0,
        slow_to_build: float = 0.0, slow_to_evaluate: float = 0.0,
    ):
        super().__init__(image_shape, num_classes, width=16, dropout=0.1)
        self.seconds, self.slow_from, self.forwards = seconds, slow_from, 0
        self.slow_to_evaluate, self.evaluated = slow_to_evaluate, 0
        if slow_to_build:
            Path("building").touch()
        time.sleep(slow_to_build)

    def forward(self, images):
        self.forwards += self.training
        time.sleep(30 if self.slow_from and self.forwards >= self.slow_from else self.seconds)
        if self.slow_to_evaluate and not self.training and os.environ.get("RANK", "0") == "0":
            self.evaluated += 1
            if self.evaluated == 5:
                Path("evaluating").touch()
            time.sleep(self.slow_to_evaluate)
        return super().forward(images)
"""
SETTINGS = (
    *runs.own_model("slow_model.SlowMLP"),
    "user_packages=[slow_model]",
    "train.device=cpu",
    "train.max_epochs=null",
    "every.eval=null",
    "every.save=null",
    "every.log=1",
)

HANDLED_OUTSIDE = """
import signal
import sys
from pathlib import Path


def queue_again(number, frame):
    print("queued again with", len(list(Path("run/checkpoints").glob("step_*"))), "checkpoints", flush=True)
    sys.exit(7)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, queue_again)
    from trainapp.__main__ import main

    main()
"""


def start(folder, run_dir, *overrides, program=("-m", "trainapp"), more=None, **options):
    (folder / "slow_model.py").write_text(SLOW_MODEL)
    command = [sys.executable, *program, *SETTINGS, *overrides, f"hydra.run.dir={run_dir}"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=helpers.environment(more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def line_with(text, process):
    """The next line of its errors with this text."""
    read = []
    while text not in (line := process.stderr.readline()):
        read.append(line)
        assert line, "".join(read)
    return line


def leaves(process, said="SIGTERM"):
    """The exit status after SIGTERM, within seconds."""
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=30)[1]
    assert time.monotonic() - sent < 5, errors
    assert said in errors
    assert "Traceback" not in errors
    return process.returncode


def wait_for_steps(run_dir, steps, process):
    helpers.wait_until(lambda: helpers.lines_in(run_dir / "metrics.jsonl") >= steps, process)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 2), (signal.SIGINT, 0)])
def test_saves_and_continues_as_if_never_stopped(tmp_path, monkeypatch, number, workers):
    """The step is finished and saved; the printed command, run verbatim, ends with the same weights. `timeout` sends
    the signal to the command, then to its group, with the loader's workers: the step still gets its data, and one line
    reports it.
    """
    folder = tmp_path / "with a blank"
    folder.mkdir()
    run_dir = folder / "stopped run"
    process = start(folder, run_dir, "train.max_steps=40", f"data.num_workers={workers}", start_new_session=True)
    wait_for_steps(run_dir, 4, process)
    process.send_signal(number)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == TO_BE_CONTINUED, errors
    assert "Traceback" not in errors
    # On a busy machine it is said when the step has ended.
    again = "press Ctrl-C" if number == signal.SIGINT else "send the signal"
    said = rf"{signal.Signals(number).name}: finishing the \w+; {again} again to quit immediately"
    assert len(re.findall(said, errors)) == 1
    assert re.search(f"{signal.Signals(number).name}: saved [0-9.]+ s after it", errors)
    saved = list((run_dir / "checkpoints").glob("step_*"))
    assert len(saved) == 1
    step = int(saved[0].name[-8:])
    assert 4 <= step < 40
    assert helpers.metrics(run_dir)[-1]["step"] == step

    command = re.search(r"Resume with:\n  (.*)\n", output)[1]
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = helpers.run_cli(*arguments, cwd=folder, command=[sys.executable])
    assert done.returncode == 0, done.stderr
    assert f"step {step}" in done.stderr
    monkeypatch.syspath_prepend(folder)
    settings = ("batch.global_size=64", "memory.guard=true", "train.max_steps=40", "+model.seconds=0.0")
    runs.run(folder / "whole", *SETTINGS, *settings)
    for part in ("model", "optimizer", "progress"):
        assert runs.differences(runs.saved(run_dir, 40)[part], runs.saved(folder / "whole", 40)[part]) == []
    losses = [[line["loss"] for line in helpers.metrics(path)] for path in (run_dir, folder / "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 40


@pytest.mark.slow
def test_a_second_signal_says_what_is_lost(tmp_path):
    """In the middle of a step that takes half a minute, after one that is in no checkpoint."""
    process = start(tmp_path, tmp_path / "run", "train.max_steps=40", "train.check_loss=false", "+model.slow_from=2")
    wait_for_steps(tmp_path / "run", 1, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert "SIGINT: finishing the step" in line_with("SIGINT", process)
    time.sleep(1.1)
    assert process.poll() is None
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert "leaving at once; lost: 1 steps since step 0" in line_with("SIGTERM", process)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - sent < 2
    process.communicate()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_leaves_at_once_where_nothing_is_lost(tmp_path):
    """While data are prepared; then in the first step after a checkpoint, which stays as it is."""
    process = start(tmp_path, tmp_path / "run", "train.max_steps=2", "+model.slow_to_build=60")
    helpers.wait_until((tmp_path / "building").exists, process)
    assert leaves(process, "leaving; nothing is lost") == 128 + signal.SIGTERM

    words = ("train.check_loss=false", "+model.slow_from=3")
    process = start(tmp_path, tmp_path / "run", "train.max_steps=40", "every.save=2", *words)
    wait_for_steps(tmp_path / "run", 2, process)
    saved = tmp_path / "run" / "checkpoints" / "step_00000002"
    helpers.wait_until(saved.exists, process)
    written = saved.stat().st_mtime_ns
    time.sleep(0.5)
    assert leaves(process, "leaving; nothing is lost") == TO_BE_CONTINUED
    assert [path.stat().st_mtime_ns for path in saved.parent.glob("step_*")] == [written]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lr_find", "train", "plan"])
def test_what_was_not_saved_ends_with_the_signals_own_status(tmp_path, mode):
    """And leaves no process behind: a plan has one."""
    slow = "+model.slow_to_build=60" if mode == "plan" else "+model.seconds=0.5"
    process = start(tmp_path, tmp_path / "run", f"mode={mode}", "train.max_steps=99", "checkpointing.save=false", slow)
    if mode == "plan":
        helpers.wait_until((tmp_path / "building").exists, process)
    else:
        line_with("step 1", process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert bool(children) == (mode == "plan")
    assert leaves(process) == 128 + signal.SIGTERM
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "run" / "checkpoints").exists()


# The main thread waits in C, without the GIL, and runs no handler.
IN_C = """
import ctypes, logging, signal
from trainapp.signals import AtWork, StopRequest

logging.basicConfig(format="%(message)s")
with StopRequest() as stop:
    stop.at_work = lambda: AtWork("step", "all", may_end={leaves})
    stop.PATIENCE = 1.0
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    print("ready", flush=True)
    c.pthread_mutex_lock(mutex), c.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("leaves", [True, False])
def test_signals_are_heard_while_c_code_runs(leaves):
    """The thread ends the process: after some patience, or at the second signal."""
    command = [sys.executable, "-c", IN_C.format(leaves=leaves)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=helpers.environment(), **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            finishing = "finishing the step; send the signal again to quit immediately"
            said = "leaving; nothing is lost" if leaves else finishing
            assert line_with("SIGTERM", process) == f"SIGTERM: {said}\n"
            if not leaves:
                time.sleep(1.5)  # longer than the patience
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                assert "a second signal: leaving at once; lost: all" in line_with("SIGTERM", process)
            assert process.wait(10) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.slow
def test_who_handled_a_signal_before_gets_it_after_the_save(tmp_path):
    """As in a submitit job, whose own handler requeues it."""
    (tmp_path / "job.py").write_text(HANDLED_OUTSIDE)
    process = start(tmp_path, "run", "train.max_steps=400", program=["job.py"])
    wait_for_steps(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7, output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    assert output.index("Resume with") < output.index("queued again with 1 checkpoints")


def test_handlers_are_put_back():
    """A forked child's signals are its own."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest() as stop:
        if (child := os.fork()) == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(stop.requested())
        assert os.waitpid(child, 0)[1] == 0
        assert not stop.requested()
        with pytest.raises(Interrupted) as left:
            signal.raise_signal(signal.SIGTERM)
    assert (stop.requested(), left.value.code) == (signal.SIGTERM, 128 + signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


# --- interrupts that are lost

# Python drops an exception raised here. "lossy" is touched when the signal may come.
LOSSY_MODEL = """
import os
import time
import weakref
from pathlib import Path
from trainapp.memory.live_tensors import LiveTensors
from trainapp.models.mlp import MLP

PLACE = os.environ.get("PLACE")


def wait_in_python(*_):
    Path("lossy").touch()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


class Finalized:
    def __del__(self):
        wait_in_python()


class Referenced:
    pass


def free_storage(self, key):
    if not Path("lossy").exists():
        wait_in_python()
    forget(self, key)


if PLACE == "storage":
    forget, LiveTensors._forget = LiveTensors._forget, free_storage


class LossyMLP(MLP):
    def __init__(self, image_shape: tuple[int, int, int], num_classes: int):
        super().__init__(image_shape, num_classes, width=16, dropout=0.1)
        self.forwards = 0

    def forward(self, images):
        self.forwards += self.training
        if PLACE and self.forwards == 3:
            if PLACE == "__del__":
                Finalized()
            elif PLACE == "weak reference":
                observed = Referenced()
                reference = weakref.ref(observed, wait_in_python)
                del observed
            elif PLACE == "bare except":
                try:
                    wait_in_python()
                except:
                    pass
            time.sleep(30)
        result = super().forward(images)
        if PLACE == "storage" and Path("lossy").exists():
            time.sleep(30)
        return result
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["__del__", "weak reference", "bare except", "storage"])
def test_an_interrupt_that_is_lost_is_repeated(tmp_path, place):
    """The run leaves the step in which it was lost, half a minute before its end, and says so once. Resumed, it ends as
    one that was never interrupted.
    """
    (tmp_path / "lossy_model.py").write_text(LOSSY_MODEL)
    settings = (*runs.own_model("lossy_model.LossyMLP"), "user_packages=[lossy_model]", "train.device=cpu")
    settings = (*settings, "train.max_epochs=null", "train.max_steps=4", "train.check_loss=false", "every.eval=null")
    settings = (*settings, "every.save=2", "every.log=1", "batch.global_size=64")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "trainapp", *settings, "hydra.run.dir=run"]
    with subprocess.Popen(command, cwd=tmp_path, env=helpers.environment({"PLACE": place}), **pipes) as process:
        try:
            helpers.wait_until((tmp_path / "lossy").exists, process)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    is_saved = place != "storage"  # there, in the first step
    assert process.returncode == (TO_BE_CONTINUED if is_saved else 128 + signal.SIGINT), errors
    # A second line would say that the listener has ended the process, or that the step has ended and was saved.
    assert re.findall("SIGINT: .*", errors) == ["SIGINT: leaving; nothing is lost"]
    assert not re.search("Exception ignored|Traceback", errors)
    assert sorted(path.name for path in tmp_path.glob("run/checkpoints/step_*")) == ["step_00000002"] * is_saved
    assert ("Resume with" in output) == is_saved
    if place != "__del__":
        return
    for run_dir in ("run", "whole"):
        done = helpers.run_cli(*settings, f"hydra.run.dir={run_dir}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("resumed from" in done.stderr) == (run_dir == "run")
    for part in ("model", "optimizer", "progress"):
        assert runs.differences(runs.saved(tmp_path / "run", 4)[part], runs.saved(tmp_path / "whole", 4)[part]) == []


class Raises:
    """A signal arrives in its finalizer."""

    def __del__(self):
        signal.raise_signal(signal.SIGUSR2)


def lose_twice(kind):
    """In a finalizer, then in a bare except. Each wait is longer than a busy machine needs to repeat it."""
    with StopRequest() as stop:
        stop.at_work = lambda: AtWork(may_end=kind is Interrupted)
        stop.interrupts = kind is Stopped
        Raises()
        swallowed = []
        try:
            time.sleep(5)
        except BaseException as error:
            swallowed.append(type(error))
        assert swallowed == [kind]
        time.sleep(5)


@pytest.mark.parametrize("kind", [Interrupted, Stopped])
def test_what_is_lost_is_repeated_until_it_arrives(kind):
    """The former handler gets the signal once."""
    passed_on = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: passed_on.append(number))
    try:
        with pytest.raises(kind):
            lose_twice(kind)
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert passed_on == [signal.SIGUSR2] * (kind is Interrupted)


def test_a_signal_that_another_thread_gets_ends_a_wait():
    """Here the main thread blocks it. Otherwise the system decides."""

    def waiting():
        with StopRequest():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            os.kill(os.getpid(), signal.SIGUSR2)  # the listener's
            time.sleep(8)
            pytest.fail("the handler has not run")

    try:
        started = time.monotonic()
        with pytest.raises(Interrupted):
            waiting()
        assert time.monotonic() - started < 7
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])


def test_what_has_arrived_is_not_repeated():
    """While the main thread cleans up, whatever that takes, nor after the block."""
    cleaned = []

    def interrupted():
        with StopRequest():
            try:
                signal.raise_signal(signal.SIGUSR2)
            finally:
                time.sleep(0.5)
                cleaned.append(True)

    with pytest.raises(Interrupted):
        interrupted()
    time.sleep(0.5)
    assert cleaned


def test_what_is_lost_where_work_may_not_be_ended_is_only_heard():
    """As when a step ends that began after a save: the run finishes it."""
    with StopRequest() as stop:
        Raises()
        stop.at_work = lambda: AtWork(may_end=False)
        time.sleep(0.5)
        assert stop.requested() == signal.SIGUSR2


# --- an evaluation in this process

F1 = "+metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 10, average: macro}"
OTHER = "+eval.other={_target_: trainapp.data.sets.synthetic.SyntheticImages, image_shape: [1, 8, 8], val_size: 90}"
EVALUATED = (*runs.TINY, *runs.MODELS["mlp"], "train.max_steps=6", "every.eval=2", "every.save=4", F1, OTHER)
EVALUATED = (*EVALUATED, "batch.eval_micro_size=90", "checkpointing.keep_last=9", "optimizer.lr=0.01")
BATCHES = 5  # micro-batches of an evaluation: four of the data's own set, one of the other


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.run(run_dir, *EVALUATED)
    assert [line["step"] for line in helpers.evaluations(run_dir)] == [2, 4, 6]
    return run_dir


def signalled(monkeypatch, owner, method, at):
    """Counts a method's calls once training has begun; SIGTERM arrives in one of them. Returns those that ended."""
    original, train, begun, ended = getattr(owner, method), loop.train, [], []

    def training(session):
        begun.clear(), ended.clear()
        train(session)

    def counted(*arguments):
        begun.append(method)
        if len(begun) == at:
            signal.raise_signal(signal.SIGTERM)
        found = original(*arguments)
        ended.append(method)
        return found

    monkeypatch.setattr(loop, "train", training)
    monkeypatch.setattr(owner, method, counted)
    return ended


def differing(run_dir, undisturbed):
    """What differs from the undisturbed run, in the end."""
    evaluated = [[own | {"time": 0} for own in helpers.evaluations(path)] for path in (run_dir, undisturbed)]
    best = [(path / "checkpoints" / "best").read_text() for path in (run_dir, undisturbed)]
    states = runs.differences(runs.end(run_dir), runs.end(undisturbed))
    return [*states, *["evaluations"] * (evaluated[0] != evaluated[1]), *["best"] * (best[0] != best[1])]


@pytest.mark.parametrize(
    ("owner", "method", "at", "ended", "step"),
    [
        (Engine, "evaluate", BATCHES + 2, BATCHES + 2, 4),
        (Engine, "evaluate", 2 * BATCHES, 2 * BATCHES, 4),
        (Engine, "evaluate", 2 * BATCHES + 1, 2 * BATCHES + 1, 6),  # after the last step
        (TorchMetric, "compute", 3, 2, 4),  # interrupted
        (Engine, "commit", 4, 4, 4),  # an evaluation is due after this step
    ],
)
def test_an_evaluation_is_cut_short_and_repeated(undisturbed, tmp_path, monkeypatch, owner, method, at, ended, step):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        calls = signalled(patch, owner, method, at)
        with pytest.raises(Interrupted) as stopped:
            runs.run(run_dir, *EVALUATED)
        assert stopped.value.code == TO_BE_CONTINUED
        assert len(calls) == ended
    facts = helpers.result(run_dir)
    assert (facts["steps"], facts["ended"], facts["stopped"]["signal"]) == (step, "SIGTERM", "SIGTERM")
    assert facts["stopped"]["during"] == ("step" if method == "commit" else "micro-batch of evaluation")
    assert 0 < facts["stopped"]["seconds"] < 5
    assert [line["step"] for line in helpers.evaluations(run_dir)] == list(range(2, step, 2))
    runs.run(run_dir, *EVALUATED)
    assert differing(run_dir, undisturbed) == []
    assert helpers.result(run_dir)["stopped"] is None


def test_a_resumed_run_that_dies_leaves_no_result_of_the_stop(tmp_path, monkeypatch):
    """A script that requeues what was stopped would requeue it for ever."""
    with monkeypatch.context() as patch:
        signalled(patch, Engine, "commit", 4)
        with pytest.raises(Interrupted):
            runs.run(tmp_path, *EVALUATED)
    assert helpers.result(tmp_path)["ended"] == "SIGTERM"
    monkeypatch.setattr(Engine, "commit", None)
    with pytest.raises(TypeError):
        runs.run(tmp_path, *EVALUATED)
    assert "failed" in helpers.result(tmp_path)
    assert "ended" not in helpers.result(tmp_path)


def test_a_stopped_evaluation_of_a_run_shows_no_numbers(undisturbed, tmp_path, monkeypatch, capsys):
    """With `mode=eval`, which keeps nothing."""
    words = ("mode=eval", f"checkpointing.resume={undisturbed}", "batch.eval_micro_size=90")
    runs.run(tmp_path / "whole", *runs.TINY, *words)
    assert "eval accuracy" in capsys.readouterr().out
    signalled(monkeypatch, Engine, "evaluate", BATCHES - 1)
    with pytest.raises(Interrupted) as stopped:
        runs.run(tmp_path / "cut", *runs.TINY, *words)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not re.search("eval accuracy|Resume with", capsys.readouterr().out)


@pytest.mark.parametrize("without", ["hint", "new checkpoint"])
def test_what_the_end_of_an_evaluation_rests_on(undisturbed, tmp_path, monkeypatch, without):
    """Negative controls of the test above."""
    if without == "hint":
        monkeypatch.setattr(stopping, "stop_requested", lambda session: 0)
    else:
        kept = property(lambda self: self.kept, lambda self, step: setattr(self, "kept", step) if step >= 0 else None)
        monkeypatch.setattr(Checkpointer, "saved_at", kept, raising=False)
    with monkeypatch.context() as patch:
        calls = signalled(patch, Engine, "evaluate", 2 * BATCHES + 1)
        with contextlib.suppress(Interrupted):
            runs.run(tmp_path / "run", *EVALUATED)
    assert len(calls) == (3 * BATCHES if without == "hint" else 2 * BATCHES + 1)
    if without == "new checkpoint":
        runs.run(tmp_path / "run", *EVALUATED)
        assert "best" in differing(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "to"), [("ddp", "idle rank"), ("ddp", "launcher"), ("fsdp", "busy rank"), ("ddp", "control")]
)
def test_ranks_leave_an_evaluation_together(tmp_path, parallel, to):
    """Rank 1 has evaluated its share and waits, rank 0 takes a minute; with FSDP they evaluate in step."""
    words = (f"parallel={parallel}", "parallel.devices=2", "every.eval=2", "every.save=2", "batch.eval_micro_size=2")
    words = (*words, "train.max_steps=6", "train.check_loss=false", "+model.slow_to_evaluate=0.5")
    process = start(tmp_path, tmp_path / "run", *words, more={"NO_HINT": str(to == "control")})
    helpers.wait_until((tmp_path / "evaluating").exists, process)
    time.sleep(3.0)
    pids = [process.pid, *(int((tmp_path / f"rank_{rank}").read_text()) for rank in (0, 1))]
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(pids[{"launcher": 0, "busy rank": 1}.get(to, 2)], signal.SIGTERM)
    if to == "control":
        time.sleep(6.0)
        assert process.poll() is None  # rank 0 is still evaluating
        process.kill()
        [own.kill() for own in workers]
        return
    _, errors = process.communicate(timeout=30)
    assert process.returncode == TO_BE_CONTINUED, errors
    facts = helpers.result(tmp_path / "run")
    assert (facts["steps"], facts["ended"], facts["stopped"]["during"]) == (2, "SIGTERM", "micro-batch of evaluation")
    assert facts["stopped"]["seconds"] < 5
    assert not helpers.lines_in(tmp_path / "run" / "evaluations.jsonl")
    assert psutil.wait_procs(workers, 5)[1] == []

"""One run per directory: refused, freed by the death of its process, and never in the way of the next run."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers import environment, files, run_cli
from runs import TINY

from trainapp.errors import UserError
from trainapp.run import lock

HOLD = """
import sys, time
from pathlib import Path
from trainapp.run import lock
run_dir = Path(sys.argv[1])
{}
print("held", flush=True)
sys.stdin.read()
"""
AS_RUN = "lock.acquire(run_dir, *sys.argv[2:])"
AS_WORKER = "held = lock.held_by_worker(run_dir); held.__enter__()"


class Holder:
    """Another process that holds the lock of a directory until it is told to end."""

    def __init__(self, run_dir, *arguments, how=AS_RUN):
        run_dir.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD.format(how), str(run_dir), *arguments],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def nothing_held():
    yield
    for path in list(lock._held):
        lock.release(path.parent)


def test_the_second_is_refused_with_host_and_process(tmp_path):
    with Holder(tmp_path / "run") as first:
        before = (tmp_path / "run" / lock.NAME).read_text()
        with pytest.raises(UserError) as refused:
            lock.acquire(tmp_path / "run")
        assert f"hydra.run.dir={tmp_path / 'run'}: another run is using this directory" in str(refused.value)
        assert f"process {first.process.pid} on host {socket.gethostname()}, since 20" in str(refused.value)
        assert "delete" not in str(refused.value)
        assert refused.value.exit_code == 2
        assert (tmp_path / "run" / lock.NAME).read_text() == before
        lock.acquire(tmp_path / "other")


def test_without_the_lock_both_would_run(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(lock, "_lock", lambda *_: True)
    with Holder(tmp_path / "run"):
        lock.acquire(tmp_path / "run")


def test_a_killed_holder_is_not_in_the_way(tmp_path):
    with Holder(tmp_path / "run") as first:
        first.process.kill()
        first.process.wait()
        assert json.loads((tmp_path / "run" / lock.NAME).read_text())["pid"] == first.process.pid  # its file stays
        lock.acquire(tmp_path / "run")
        assert json.loads((tmp_path / "run" / lock.NAME).read_text())["pid"] == os.getpid()


def test_what_the_file_says_does_not_decide(tmp_path):
    """A process of that id may exist: ids are reused, and a file may be copied with its directory."""
    (tmp_path / lock.NAME).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "started": 9e9}))
    lock.acquire(tmp_path)


def test_released_it_leaves_nothing(tmp_path):
    lock.acquire(tmp_path / "run")
    lock.acquire(tmp_path / "run")  # no effect
    assert lock.is_held(tmp_path / "run")
    lock.release(tmp_path / "run")
    lock.release(tmp_path / "run")
    assert files(tmp_path) == set()
    assert not lock.is_held(tmp_path / "run")
    with Holder(tmp_path / "run"):
        pass


def test_a_file_that_was_removed_meanwhile_is_not_locked(tmp_path, monkeypatch):
    """Between opening and locking, the holder may end and remove the file, and a third run make a new one."""
    locked, fresh = [], tmp_path / lock.NAME

    def slow(descriptor, byte):
        if not locked:
            fresh.unlink()
            fresh.write_text("")
        locked.append(os.fstat(descriptor).st_ino)
        return right(descriptor, byte)

    right = lock._lock
    monkeypatch.setattr(lock, "_lock", slow)
    lock.acquire(tmp_path)
    assert os.fstat(lock._held[fresh]).st_ino == fresh.stat().st_ino != locked[0]


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "and its directory removed"])
def test_a_holder_that_ends_while_it_is_asked_for(tmp_path, monkeypatch, fails):
    """The file is gone when the refusal is about to be written: the lock is taken after all, not left."""
    with Holder(tmp_path / "run") as first:

        def slow(path):
            found = right(path)
            first.process.kill()
            first.process.wait()
            path.unlink(missing_ok=True)
            if fails:
                path.parent.rmdir()
            return found

        right = lock._holder
        monkeypatch.setattr(lock, "_holder", slow)
        lock.acquire(tmp_path / "run")
        assert lock.is_held(tmp_path / "run")
        assert json.loads((tmp_path / "run" / lock.NAME).read_text())["pid"] == os.getpid()


@pytest.fixture
def as_another_user():
    """A directory that anyone may enter; root, to whom nothing is forbidden, becomes another user inside the test."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        (Path(folder) / lock.NAME).touch(0o444)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(was)
            os.chmod(folder, 0o777)


def test_another_users_lock_file_is_refused(as_another_user):
    with pytest.raises(UserError, match=rf"{lock.NAME} \(of \w+\) cannot be opened for writing.*delete that file"):
        lock.acquire(as_another_user)
    assert not lock.is_held(as_another_user)
    (as_another_user / lock.NAME).unlink()
    lock.acquire(as_another_user)
    assert lock.is_held(as_another_user)


def test_a_directory_that_cannot_be_written_is_left_to_the_first_write(as_another_user):
    (as_another_user / lock.NAME).unlink()
    (as_another_user / "run").mkdir(0o555)
    lock.acquire(as_another_user / "run")
    assert not lock.is_held(as_another_user / "run")


def test_a_forked_child_does_not_keep_it(tmp_path):
    """A loader's worker may outlive a killed run for a while."""
    forks = AS_RUN + "\nimport os\nif not os.fork(): time.sleep(60); os._exit(0)"
    with Holder(tmp_path / "run", how=forks) as first:
        children = subprocess.run(["pgrep", "-P", str(first.process.pid)], capture_output=True, text=True).stdout
        first.process.kill()
        first.process.wait()
        os.kill(int(children), 0)  # it lives
        lock.acquire(tmp_path / "run")
        os.kill(int(children), signal.SIGKILL)


def test_the_workers_of_a_killed_launcher_are_waited_for(tmp_path, monkeypatch):
    with Holder(tmp_path / "run", how=AS_WORKER) as worker:
        monkeypatch.setattr(lock, "_ORPHANS", 0.2)
        with pytest.raises(UserError, match="another run is using this directory"):
            lock.acquire(tmp_path / "run")
        assert not lock.is_held(tmp_path / "run")
        monkeypatch.setattr(lock, "_ORPHANS", 20)
        worker.process.stdin.close()  # it ends
        lock.acquire(tmp_path / "run")


def test_the_launchers_of_several_nodes_are_one_run(tmp_path):
    with Holder(tmp_path / "run", "big-run"):
        lock.acquire(tmp_path / "run", "big-run")
        assert not lock.is_held(tmp_path / "run")  # the first of them holds it
        for other in ("another-run", None):
            with pytest.raises(UserError, match="another run is using"):
                lock.acquire(tmp_path / "run", other)


@pytest.mark.parametrize(
    ("holder", "is_refused"),
    [
        ({"host": "elsewhere", "pid": 1, "started": 1e9}, True),
        ({"pid": os.getpid(), "started": 9e9}, True),
        ({"pid": os.getpid(), "started": 1e9}, False),  # the id has been reused: the process is younger
        ({"pid": 2**22 + 1, "started": 9e9}, False),  # no such process
        ({"pid": "x", "started": None}, False),
        ("not JSON", False),
    ],
)
def test_a_file_system_without_locks(tmp_path, monkeypatch, holder, is_refused):
    """There the file's text decides, and the message says how to get rid of it."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(lock, "_POLL", 0.001)
    text = holder if isinstance(holder, str) else json.dumps({"host": socket.gethostname(), **holder})
    (tmp_path / lock.NAME).write_text(text)
    if is_refused:
        with pytest.raises(UserError, match=rf"has no locks: if no such process exists, delete .*{lock.NAME}"):
            lock.acquire(tmp_path)
        assert (tmp_path / lock.NAME).read_text() == text
    else:
        lock.acquire(tmp_path)
        assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == os.getpid()
        lock.release(tmp_path)
        assert files(tmp_path) == set()


def contents(run_dir):
    """The files that Hydra would write before the program runs."""
    return {path.name: path.read_text() for path in (run_dir / ".hydra").iterdir()}


TINY_MLP = (*TINY, "model=mlp", "model.width=4")
ENDLESS = (*TINY_MLP, "train.max_steps=100000", "every.save=20")


@pytest.fixture
def in_progress(tmp_path):
    """A run of the real program that has saved a checkpoint and continues."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "trainapp", *ENDLESS, f"hydra.run.dir={run_dir}"]
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    try:
        while not (run_dir / "checkpoints" / "latest").exists():
            assert time.monotonic() < until
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.02)
        yield run
    finally:
        run.kill()
        run.communicate()


def assert_refused(tmp_path, run, *overrides):
    """With one message, and before anything was written."""
    run_dir = tmp_path / "run"
    before = contents(run_dir)
    second = run_cli(*ENDLESS, *overrides, f"hydra.run.dir={run_dir}", cwd=tmp_path)
    assert second.returncode == 2, second.stderr
    expected = f"another run is using this directory (process {run.pid} on host {socket.gethostname()}, since"
    assert expected in second.stderr
    assert "Traceback" not in second.stderr
    assert contents(run_dir) == before
    assert "another run" not in (run_dir / "trainapp.log").read_text()
    assert run.poll() is None


@pytest.mark.slow
def test_two_runs_in_one_directory(tmp_path, in_progress):
    """The second is refused; a killed one does not block the next."""
    run_dir = tmp_path / "run"
    assert_refused(tmp_path, in_progress, "train.seed=7")
    in_progress.kill()
    in_progress.wait()
    assert (run_dir / lock.NAME).exists()
    last = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))
    again = run_cli(*ENDLESS, f"train.max_steps={last + 1}", f"hydra.run.dir={run_dir}", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert re.search(rf"resumed from \S+step_{last:08d}", (run_dir / "trainapp.log").read_text())
    assert not (run_dir / lock.NAME).exists()


@pytest.mark.slow
def test_a_run_in_progress_is_evaluated_from_another_directory(tmp_path, in_progress):
    """In its own, an evaluation would write into the same files."""
    named = f"checkpointing.resume={tmp_path / 'run'}"
    assert_refused(tmp_path, in_progress, named, "mode=eval")
    assert_refused(tmp_path, in_progress, named, "mode=export")
    reading = run_cli(*TINY_MLP, named, "mode=eval", f"hydra.run.dir={tmp_path / 'other'}", cwd=tmp_path)
    assert reading.returncode == 0, reading.stderr
    assert in_progress.poll() is None


@pytest.mark.slow
def test_jobs_of_a_sweep_in_one_directory_follow_each_other(tmp_path):
    """One after the other they may share it, as runs of one experiment."""
    sweep = ("-m", *TINY, "model=mlp", "model.width=4", "train.max_steps=2,3", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    done = run_cli(*sweep, "hydra.sweep.subdir=same", "checkpointing=off", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lock.NAME not in files(tmp_path / "sweep" / "same")

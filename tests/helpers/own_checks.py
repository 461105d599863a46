"""Steps for `scripts/gpu_check` that go wrong in every way that a real one may."""

import os
import signal
import subprocess
import sys
import time


def good(table, device, folder):
    table.expect("one and one", "2", "2", True)
    table.measured("seconds", "0.1")
    (folder / "file").write_text(device)


def missed(table, device, folder):
    table.expect("one and one", "2", "3 | 4", False)


def needs_cuda(table, device, folder):
    table.needs_cuda("a kernel")


def raises_in_part(table, device, folder):
    with table.attempt("a part", "works"):
        raise ValueError("first line\nsecond line")
    table.expect("another part", "works", "works", True)


def crashes(table, device, folder):
    table.expect("before", "kept", "kept", True)
    os.kill(os.getpid(), signal.SIGSEGV)


def fails(table, device, folder):
    raise RuntimeError("no such thing")


def never_ends(table, device, folder):
    """It also leaves a process of a session of its own, as a launcher's worker may be."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "child").write_text(str(child.pid))
    table.measured("before", "kept")
    time.sleep(600)

"""Starts the workers of a run through torch's elastic launcher, which restarts all of them when one dies."""

import logging
import os
import signal
import socket
import uuid
from pathlib import Path

import psutil
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.launch.worker import Outcome, run_worker, take_error
from trainapp.signals import StopRequest, pass_on
from trainapp.sizes.record import read_restart
from trainapp.torch_private import Restart, asked_before_restarts

SIGNALS = (*StopRequest.NAMES, "SIGHUP", "SIGQUIT")  # forwarded to the workers
log = logging.getLogger(__name__)


def run_workers(config: Config) -> Outcome:
    """Run the workers of this node until they end.

    Raises UserError for settings that conflict or do not suit this machine, and TrainingStopped when a worker failed
    with an error that a restart would only repeat, twice with the same error at the same step, or more than
    `parallel.max_restarts` times (see `Failures`).
    """
    settings = config.parallel
    if settings.nodes > 1 and not (settings.endpoint and settings.run_id):
        raise UserError(
            f"parallel.nodes={settings.nodes}: set parallel.endpoint=HOST:PORT (the first node) and "
            "parallel.run_id=NAME, both the same on every node"
        )
    endpoint = settings.endpoint or "127.0.0.1:0"
    is_host, address = None, None
    if settings.nodes > 1:
        is_host, address, interface = _places(endpoint)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo's default is what the host name resolves to
    launch = LaunchConfig(
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        nproc_per_node=workers_per_node(config),
        run_id=settings.run_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={} if is_host is None else {"is_host": is_host},
        local_addr=address,
        rdzv_timeout=int(settings.timeout),
        max_restarts=settings.max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        signals_to_handle=",".join(SIGNALS),
    )
    # With the launcher's own store shared, restarted workers would find the addresses of the dead ones (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    handlers = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    failures = Failures(Path(config.run_dir))
    try:
        with asked_before_restarts(failures.decide):
            outcomes: dict[int, Outcome] = elastic_launch(launch, run_worker)(config)
    except SignalException as error:
        pass_on(error.sigval, handlers[error.sigval])
        return Outcome(exit_code=128 + error.sigval)
    except ChildFailedError as error:
        raise TrainingStopped(_why_it_ended(error, failures)) from None
    ended = list(outcomes.values())
    return next((outcome for outcome in ended if outcome.error or outcome.exit_code), ended[0])


class Failures:
    """How often workers of this node failed, and with which error, if a restart cannot cure it: one of Python code
    (see `leave_error`), or any for the second time at the same step.

    A restart with a smaller micro-batch is not counted: a search for the size may need many, and ends at 1 anyway.
    """

    def __init__(self, run_dir: Path):
        self.run_dir, self.count, self.for_memory = run_dir, 0, 0
        self.incurable: str | None = None
        self._before: set[str] = set()
        self._recoveries = 0

    def decide(self, ranks: list[int]) -> Restart:
        """Called after each failure, before the workers are restarted."""
        left = [error for rank in ranks if (error := take_error(self.run_dir, rank)) is not None]
        self.incurable = min((own.text for own in left if own.repeats or own.text in self._before), default=None)
        if self.incurable is not None:
            return Restart.REFUSED
        self._before = {error.text for error in left}
        # Free only if the count has risen: where restart.json stays on another node's disk, the same size would fail
        # for ever, uncounted.
        recoveries = (read_restart(self.run_dir) or {}).get("oom_restarts", 0)
        if recoveries > self._recoveries:
            self._recoveries = recoveries
            self.for_memory += 1
            return Restart.FREE
        self.count += 1
        self._recoveries = 0  # after a crash the workers resume with the checkpoint's, which is lower
        return Restart.COUNTED


def _why_it_ended(error: ChildFailedError, failures: "Failures") -> str:
    log_place = f"its log is in {failures.run_dir}/ranks (rank 0: trainapp.log)"
    if failures.incurable is not None:
        return f"a rank failed with an error that a restart would repeat: {failures.incurable}; {log_place}"
    rank, failure = error.get_first_failure()
    message = failure.message  # its traceback is in the rank's log, and elastic has printed it
    reason = message["message"] if isinstance(message, dict) else message
    free = f" (and {failures.for_memory} with a smaller micro-batch)" if failures.for_memory else ""
    return (
        f"rank {rank} failed (exit code {failure.exitcode}) after {failures.count - 1} restarts{free}: {reason}; "
        f"{log_place}"
    )


def workers_per_node(config: Config) -> int:
    """How many processes to start on this node: one per GPU, or `parallel.devices`. Raises UserError for too many."""
    wanted = config.parallel.devices
    if config.train.device == "cpu" or not torch.cuda.is_available():
        if wanted == "auto":
            raise UserError(
                "parallel.devices=auto: this machine has no GPUs; set parallel.devices=N for N processes on the CPU"
            )
        return wanted
    available = torch.cuda.device_count()
    if wanted != "auto" and wanted > available:
        raise UserError(f"parallel.devices={wanted}: this machine has {available} GPUs")
    return available if wanted == "auto" else wanted


def _places(endpoint: str) -> tuple[bool, str, str]:
    """Whether the endpoint is on this machine, which then hosts the rendezvous; the address and the interface with
    which this machine reaches it. Sends nothing.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"parallel.endpoint={endpoint}: must be HOST:PORT of the first node")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address, remote = probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        raise UserError(f"parallel.endpoint={endpoint}: this machine has no route to it: {error}") from None
    interfaces = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    return remote in interfaces, address, interfaces.get(address, "lo")

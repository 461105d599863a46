"""Starts the workers of a run through torch's elastic launcher, and starts them again when one dies."""

import logging
import os
import signal
import socket
import uuid

import psutil
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.launch.worker import Outcome, work
from trainapp.signals import StopRequest, pass_on

SIGNALS = (*StopRequest.NAMES, "SIGHUP", "SIGQUIT")  # what the launcher hands to its workers
log = logging.getLogger(__name__)


def start(config: Config) -> Outcome:
    """Run the workers of this node to their end. Raises TrainingStopped when they failed too often."""
    settings = config.parallel
    if settings.nodes > 1 and not (settings.endpoint and settings.run_id):
        raise UserError(
            f"parallel.nodes={settings.nodes}: set parallel.endpoint=HOST:PORT (the first node) and "
            "parallel.run_id=NAME alike on every node"
        )
    endpoint = settings.endpoint or "127.0.0.1:0"
    host, address = None, None
    if settings.nodes > 1:
        address, interface = _towards(endpoint)
        host = _is_here(endpoint)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo takes what the host's name resolves to
    launch = LaunchConfig(
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        nproc_per_node=devices(config),
        run_id=settings.run_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={} if host is None else {"is_host": host},
        local_addr=address,
        rdzv_timeout=int(settings.timeout),
        max_restarts=settings.max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        signals_to_handle=",".join(SIGNALS),
    )
    # Else workers that are started again meet the addresses of the dead ones in the launcher's own store (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        outcomes = elastic_launch(launch, work)(config)
    except SignalException as error:
        pass_on(error.sigval, before[error.sigval])
        return Outcome(exit_code=128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise TrainingStopped(
            f"rank {rank} failed (exit code {failure.exitcode}) after {settings.max_restarts} restarts: "
            f"{_reason(failure)}; its log is in {config.run_dir}/ranks (rank 0: trainapp.log)"
        ) from None
    ended = list(outcomes.values())
    return next((outcome for outcome in ended if outcome.error or outcome.exit_code), ended[0])


def _reason(failure: ProcessFailure) -> str:
    """The error in one line; its trace is in the rank's log, and elastic has printed it."""
    message = failure.message
    return message["message"] if isinstance(message, dict) else message


def devices(config: Config) -> int:
    """Processes on this node. Raises UserError for more than there are GPUs."""
    wanted = config.parallel.devices
    if config.train.device == "cpu" or not torch.cuda.is_available():
        if wanted == "auto":
            raise UserError(
                "parallel.devices=auto: this machine has no GPUs to take; set parallel.devices=N for N processes on "
                "the CPU"
            )
        return wanted
    there = torch.cuda.device_count()
    if wanted != "auto" and wanted > there:
        raise UserError(f"parallel.devices={wanted}: this machine has {there} GPUs")
    return there if wanted == "auto" else wanted


def _towards(endpoint: str) -> tuple[str, str]:
    """This machine's own address, and its interface, on the way to `endpoint`. Sends nothing."""
    host, port = _split(endpoint)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"parallel.endpoint={endpoint}: this machine has no way there: {error}") from None
    return address, next((name for name, addresses in _interfaces() if address in addresses), "lo")


def _is_here(endpoint: str) -> bool:
    """Whether the endpoint is one of this machine's addresses: this node then hosts the rendezvous."""
    host = socket.gethostbyname(_split(endpoint)[0])
    return any(host in addresses for _, addresses in _interfaces())


def _interfaces() -> list[tuple[str, set[str]]]:
    return [(name, {entry.address for entry in entries}) for name, entries in psutil.net_if_addrs().items()]


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"parallel.endpoint={endpoint}: must be HOST:PORT of the first node")
    return host, int(port)

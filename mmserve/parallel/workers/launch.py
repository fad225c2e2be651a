"""Ranks that a launcher has started, on one host or several: every rank runs the caller's script, and rank 0 drives.

What torchrun puts in the environment says who is who (https://docs.pytorch.org/docs/stable/elastic/run.html). The ranks
meet at its store; after that each talks to rank 0 over a TCP connection of its own::

    RANK, WORLD_SIZE            this rank's number, and how many there are
    LOCAL_RANK                  its number on its host: which CUDA device it takes
    MASTER_ADDR, MASTER_PORT    where the store is, on the host of rank 0
"""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError, WorkerError
from mmserve.parallel.layout import Layout
from mmserve.parallel.workers.crew import Crew, Member
from mmserve.parallel.workers.wire import Arrival, receive, send

__all__ = ["Launch", "find_launch", "gather", "work"]

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENGINES = "mmserve/engines"
_ADDRESS = "mmserve/address"
_LOOPBACK = "127.0.0.1"
_KEY_BYTES = 32
_GREETING_SECONDS = 10.0
_SILENT_SECONDS = 60
"""A host that has lost its power or its cable is noticed after about so long."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher says of this process.

    Attributes:
        rank: Of `size` ranks. local_rank: Among those of its host; None: it was not said.
        master: The host of rank 0.
    """

    rank: int
    size: int
    local_rank: int | None
    master: str


def find_launch(environment: Mapping[str, str], layout: Layout) -> Launch | None:
    """What a launcher says of this process; None if there was none, or it started this process alone.

    Args:
        environment: Variables of the process.
        layout: Of the engine that is to be started.

    Raises:
        ConfigError: A variable is missing or no number, or there are not as many ranks as `layout` has.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    if environment.get("WORLD_SIZE") == "1":
        return None
    missing = [name for name in _NAMES if not environment.get(name)]
    if missing:
        said = " and ".join(name for name in _NAMES[:2] if name in environment)
        raise ConfigError(
            f"{said} in the environment say that a launcher started "
            f"this process, but {', '.join(missing)} is not there: start it with torchrun, or without any of them"
        )
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    _number(environment, "MASTER_PORT")
    if size != layout.size:
        raise ConfigError(
            f"tensor_parallel {layout.tensor} x pipeline_parallel {layout.pipeline} take {layout.size} ranks, and the "
            f"launcher started {size} (WORLD_SIZE): make them equal, or start the script without a launcher"
        )
    if not 0 <= rank < size:
        raise ConfigError(f"RANK {rank} is not one of {size} ranks, 0 to {size - 1}")
    local = _number(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else None
    return Launch(rank, size, local, environment["MASTER_ADDR"])


def gather(launch: Launch, timeout: float, options: Mapping[str, str]) -> tuple[list[Member], str]:
    """On rank 0: wait for all other ranks; them, in order, and the address by which they reach this host.

    Args:
        launch: Of this rank.
        timeout: Seconds to wait.
        options: What the script said here of the parts that ranks load; it has to say the same on every rank.

    Raises:
        ConfigError: This launch has had its pipeline, or a rank's script says other things.
        WorkerError: A rank did not come within `timeout` seconds.
    """
    store = _store(timeout)
    if store.add(_ENGINES, 1) > 1:
        raise ConfigError(
            "ranks that a launcher started serve one pipeline and end with it, and this is the second: take "
            "MMPipeline without a launcher, or launch again"
        )
    key = secrets.token_bytes(_KEY_BYTES)
    # Everyone who finds the store may come; the key keeps out those who only find the port.
    with socket.create_server(("", 0), backlog=launch.size) as server:
        port = server.getsockname()[1]
        store.set(_ADDRESS, f"{socket.gethostname()} {port} {key.hex()}")
        arrived: dict[int, Member] = {}
        try:
            _receive_all(server, key, launch, timeout, arrived, options)
        except BaseException:
            Crew(tuple(arrived.values())).kill()
            raise
    members = [arrived[rank] for rank in range(1, launch.size)]
    here = socket.gethostname()
    return members, _LOOPBACK if all(member.host == here for member in members) else launch.master


def _receive_all(
    server: socket.socket,
    key: bytes,
    launch: Launch,
    timeout: float,
    arrived: dict[int, Member],
    options: Mapping[str, str],
) -> None:
    limit = time.monotonic() + timeout
    while len(arrived) < launch.size - 1:
        server.settimeout(max(0.001, limit - time.monotonic()))
        try:
            connected, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, launch.size) if rank not in arrived)
            raise WorkerError(
                f"rank {missing} did not come within {timeout:g} s: every rank runs the same script up to MMPipeline"
            ) from None
        connection = _connection(connected)
        arrival = _admit(connection, key)
        if arrival is None or not 0 < arrival.rank < launch.size or arrival.rank in arrived:
            connection.close()
            continue
        arrived[arrival.rank] = Member(
            arrival.rank,
            connection,
            None,
            f"process {arrival.process_id} on {arrival.host}",
            host=arrival.host,
            local_rank=arrival.local_rank,
        )
        _check_same(arrived[arrival.rank], arrival.options, options)


def _check_same(member: Member, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if names:
        said = [", ".join(f"{name}={options.get(name)}" for name in names) for options in (theirs, ours)]
        raise ConfigError(
            f"{member} was started with {said[0]}, and rank 0 with {said[1]}: all ranks run the same script with the "
            "same arguments"
        )


def _admit(connection: Connection, key: bytes) -> Arrival | None:
    """Who is at the other end; None if it does not have the key. Nothing is unpickled before that is known."""
    try:
        if not wait([connection], _GREETING_SECONDS):
            return None
        if not hmac.compare_digest(connection.recv_bytes(_KEY_BYTES), key):
            return None
        arrival = receive(connection)
    except (EOFError, OSError):
        return None
    return arrival if isinstance(arrival, Arrival) else None


def work(launch: Launch, folder: Path, timeout: float, options: Mapping[str, str]) -> int:
    """On another rank: work for rank 0 until its pipeline is closed; the exit status.

    Args:
        launch: Of this rank.
        folder: The model, as this host has it.
        timeout: Seconds to wait for rank 0's pipeline.
        options: As for `gather`.

    Raises:
        WorkerError: Rank 0 did not make a pipeline, or can not be reached.
    """
    from mmserve.parallel.workers.worker import serve

    store = _store(timeout)
    try:
        host, port, key = store.get(_ADDRESS).decode().split()
    except RuntimeError as error:
        raise WorkerError(f"rank 0 made no MMPipeline of {launch.size} ranks within {timeout:g} s") from error
    address = _LOOPBACK if host == socket.gethostname() else launch.master
    try:
        connected = socket.create_connection((address, int(port)), timeout)
    except OSError as error:
        raise WorkerError(f"rank {launch.rank} can not reach rank 0 at {address} port {port}: {error}") from error
    connected.settimeout(None)
    connection = _connection(connected)
    connection.send_bytes(bytes.fromhex(key))
    send(connection, Arrival(launch.rank, launch.local_rank, os.getpid(), socket.gethostname(), options))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, which tells the others
    return serve(connection, folder)


def _store(timeout: float) -> Any:
    """The launcher's."""
    from torch.distributed import rendezvous

    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous("env://", timeout=limit))
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"the launcher's store at MASTER_ADDR and MASTER_PORT can not be reached: {error}") from error
    store.set_timeout(limit)
    return store


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _SILENT_SECONDS // 2), ("TCP_KEEPINTVL", _SILENT_SECONDS // 6)):
        if hasattr(socket, name):  # Linux' names
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} in the environment is a number, not {environment[name]!r}") from None

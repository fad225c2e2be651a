"""The driver's hold on its workers: starts them, talks to them, notices when one is gone, and leaves none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

from mmserve.errors import MMServeError, WorkerError
from mmserve.parallel.workers.wire import Hello, Leave, Left, Lost, Setup, Stop, encode, receive, send

__all__ = ["Crew", "Member", "child_environment", "start_local"]

T = TypeVar("T")

_LOOK_SECONDS = 0.01
"""Between two looks at whether something is done that can not be waited for together with workers."""
_PATIENCE = 5.0
"""Seconds for a worker to end by itself, or to say why something else went wrong, before it is ended."""


@dataclass(slots=True)
class Member:
    """One worker.

    Attributes:
        process: None for one that a launcher started, which ends when its connection does.
        host, local_rank: Of one that a launcher started.
    """

    rank: int
    connection: Connection
    process: subprocess.Popen[bytes] | None
    where: str = ""
    host: str = ""
    local_rank: int | None = None

    def __str__(self) -> str:
        return f"the worker of rank {self.rank}" + (f" ({self.where})" if self.where else "")


def child_environment() -> dict[str, str]:
    """This process's environment and module path, for a child that runs the same interpreter."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def start_local(count: int, module: str = "mmserve.parallel.workers.worker") -> list[Member]:
    """`count` worker processes on this machine, ranks 1 to `count`.

    They run this interpreter on this process's module path, in sessions of their own (Ctrl-C is the driver's), and
    import nothing of the caller's script: a script needs no `if __name__ == "__main__"`.

    Args:
        count: How many.
        module: What they run, with the number of their end of a connection as its argument.
    """
    members: list[Member] = []
    environment = child_environment()
    try:
        for rank in range(1, count + 1):
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            members.append(Member(rank, Connection(ours.detach()), process, f"process {process.pid}"))
    except BaseException:
        Crew(members).kill()
        raise
    return members


class Crew:
    """All workers of one engine.

    Args:
        members: Connected, ranks 1 and up.
        keep: Whether they wait for another engine after `close`, instead of ending.
    """

    def __init__(self, members: Sequence[Member], *, keep: bool = False) -> None:
        self._members = tuple(members)
        self._keep = keep
        self._by_rank = {member.rank: member for member in members}
        self._closed = False
        self._early: dict[int, Any] = {}

    def greet(self, setups: Iterable[Setup], timeout: float) -> None:
        """Send each worker its setup and wait until all are up.

        Raises:
            WorkerError: One has died, or is silent for longer than `timeout` seconds.
        """
        setups = list(setups)
        for setup in setups:
            self.tell([setup.rank], setup)
        for member, hello in self.hear_all(timeout):
            if not isinstance(hello, Hello):
                raise WorkerError(f"{member} answered with a {type(hello).__name__} instead of a greeting")
            member.where = f"process {hello.process_id} on {hello.host}"

    def while_up(self, work: Callable[[], T]) -> T:
        """What `work` gives, which waits for workers and does not hear when one is lost.

        It runs in a thread of its own, which is left behind if a worker is lost meanwhile: what it waits for has a
        limit of its own. What workers say meanwhile is kept for `hear_all`.

        Raises:
            MMServeError: A worker is gone or has failed: as `hear`.
            Exception: What `work` raises.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)

        thread = threading.Thread(target=run, name="mmserve-meet", daemon=True)
        thread.start()
        while thread.is_alive():
            for member in self._members:
                if member.rank not in self._early and member.connection.poll():
                    self._early[member.rank] = self._take(member)
            thread.join(_LOOK_SECONDS)
        return done.result()

    def tell(self, ranks: Iterable[int], message: object) -> None:
        """Send a message, encoded once, to some workers.

        Raises:
            WorkerError: One is gone.
        """
        raw: bytes | None = None
        for rank in ranks:
            raw = encode(message) if raw is None else raw
            try:
                self._by_rank[rank].connection.send_bytes(raw)
            except OSError as error:
                self.explain(error)

    def hear(self, rank: int, timeout: float) -> Any:
        """The next message of one worker; another's last words end the waiting.

        Raises:
            WorkerError: A worker is gone, has failed, or all are silent for `timeout` seconds.
            MMServeError: A worker has failed with one: that one.
        """
        limit = time.monotonic() + timeout
        wanted = self._by_rank[rank]
        while True:
            ready = wait([member.connection for member in self._members], max(0.0, limit - time.monotonic()))
            if not ready:
                raise WorkerError(f"{wanted} was silent for {timeout:g} s")
            for member in self._members:
                # Others speak out of turn only to say that they are lost.
                if member.connection in ready and (member is wanted or wanted.connection not in ready):
                    message = self._take(member)
                    if member is wanted:
                        return message
                    raise WorkerError(f"{member} sent a {type(message).__name__} out of turn")

    def hear_all(self, timeout: float) -> list[tuple[Member, Any]]:
        """One message of each worker, in the order in which they come.

        Raises:
            MMServeError: As `hear`.
        """
        limit = time.monotonic() + timeout
        heard = [(self._by_rank[rank], message) for rank, message in self._early.items()]
        waiting = {member.connection: member for member in self._members if member.rank not in self._early}
        self._early = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                silent = ", ".join(str(member) for member in waiting.values())
                raise WorkerError(f"{silent} did not answer within {timeout:g} s")
            for connection in ready:
                member = waiting.pop(connection)  # type: ignore[call-overload]
                heard.append((member, self._take(member)))
        return heard

    def explain(self, error: BaseException) -> NoReturn:
        """Something failed here that a worker's end may have caused: raise what that worker says, or how it ended.

        Raises:
            MMServeError: The reason, with `error` as its cause.
        """
        limit = time.monotonic() + _PATIENCE
        connections = [member.connection for member in self._members]
        while connections and (ready := wait(connections, max(0.0, limit - time.monotonic()))):
            for member in self._members:
                if member.connection in ready:
                    try:
                        self._take(member)
                    except MMServeError as reason:
                        raise reason from reason.__cause__ or error
        raise WorkerError(f"rank 0 failed, and no worker says why: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Ask all workers to end, and end those that do not; or to wait for another engine. Twice is fine."""
        if self._closed:
            return
        for member in self._members:
            with suppress(OSError):  # it is gone already
                send(member.connection, Leave() if self._keep else Stop())
        if self._keep and all(self._has_left(member) for member in self._members):
            self._closed = True
        else:
            self._end(_PATIENCE)

    def kill(self) -> None:
        """End all workers now."""
        if not self._closed:
            self._end(0.0)

    def _has_left(self, member: Member) -> bool:
        """Read what a worker still has to say of steps that nobody waits for, until it has left."""
        try:
            while member.connection.poll(_PATIENCE):
                if isinstance(self._take(member), Left):
                    return True
        except MMServeError:
            pass  # it is lost: there is nothing to keep
        return False

    def _take(self, member: Member) -> Any:
        """A worker's message, which is there to be read."""
        try:
            message = receive(member.connection)
        except (EOFError, OSError):
            raise WorkerError(f"{member} {self._how_it_ended(member)}; start a new pipeline") from None
        if isinstance(message, Lost):
            trace = WorkerError(f"in {member}:\n{message.trace}")
            if type(message.error) is WorkerError:
                raise WorkerError(f"{member} failed: {message.error}") from trace
            raise message.error from trace
        return message

    def _how_it_ended(self, member: Member) -> str:
        if member.process is None:
            return "is gone: its connection broke"
        try:
            status = member.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _end(self, patience: float) -> None:
        self._closed = True
        limit = time.monotonic() + patience
        for member in self._members:
            if member.process is not None:
                try:
                    member.process.wait(max(0.0, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    member.process.kill()
                    member.process.wait()
            member.connection.close()

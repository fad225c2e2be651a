"""A worker process: loads one rank's part, and runs each step that the driver runs.

    python -m mmserve.parallel.workers.worker FD     started by the driver, which is at the other end of FD

It ends when the driver says so, when the driver is gone, or with the first thing that goes wrong, which it tells the
driver. Ctrl-C is the driver's to handle.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmserve.engine.batch import StepOutput
    from mmserve.engine.runner import ModelRunner
    from mmserve.parallel.layout import Place
    from mmserve.parallel.workers.wire import Setup, Step

__all__ = ["main", "serve"]

_WATCH_SECONDS = 1.0


def serve(connection: Connection, folder: Path | None = None) -> int:
    """Answer the driver at the other end of `connection` until it is done; the exit status.

    Args:
        connection: To the driver.
        folder: The model as this host has it; None: where the driver has it.
    """
    from mmserve.parallel.workers.wire import Hello, Left, Lost, Setup, receive, send

    try:
        while isinstance(setup := receive(connection), Setup):
            send(connection, Hello(os.getpid(), socket.gethostname()))
            if not _work(connection, setup, folder):
                break
            send(connection, Left())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the driver is gone, and there is nobody to tell
    except Exception as error:  # noqa: BLE001 - the border of the process: the driver must hear of it
        lost = Lost(_portable(error), traceback.format_exc())
        try:
            send(connection, lost)
        except OSError:
            return 1
        return 1
    return 0


def _work(connection: Connection, setup: Setup, folder: Path | None) -> bool:
    """Be one rank of one engine; whether another engine may come."""
    import torch

    from mmserve.engine.runner import ModelRunner
    from mmserve.engine.trial import run_trial
    from mmserve.model.load import load_model
    from mmserve.parallel.rank import RankShape
    from mmserve.parallel.workers.meet import join_store, meet
    from mmserve.parallel.workers.wire import Leave, Ready, Start, Trial, receive, send

    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    if folder is not None:
        _check_same(folder, setup)
    place = setup.layout.place(setup.rank)
    device = torch.device(setup.device)
    store = join_store(setup.host, setup.port, setup.timeout)
    groups = meet(store, setup.name, place, device, setup.host, setup.timeout)
    model = load_model(
        folder or Path(setup.folder),
        dtype=setup.dtype,
        device=device,
        attention_backend=setup.attention_backend,
        block_size=setup.block_size,
        replace=setup.replace,
        trust_remote_code=setup.trust_remote_code,
        allow_pickled_weights=setup.allow_pickled_weights,
        ignore_weights=setup.ignore_weights,
        rank=RankShape(place, groups.tensor, groups.pipeline, setup.plan),
    )
    send(connection, Ready(model.cache_spec(), dict(model.describe())))
    role: dict[str, Any] = {"device": device, "samples": place.samples, "encodes": place.is_first}
    start = receive(connection)
    if isinstance(start, Trial):
        send(connection, run_trial(start, model, **role))
        start = receive(connection)
    if not isinstance(start, Start):
        return isinstance(start, Leave)
    runner = ModelRunner.for_limits(model, start.limits, unsampled=start.unsampled, **role)
    return _run_steps(connection, runner, place)


def _check_same(folder: Path, setup: Setup) -> None:
    from mmserve.errors import WeightsError
    from mmserve.model.fingerprint import differences, fingerprint

    own = fingerprint(folder, allow_pickled=setup.allow_pickled_weights)
    if different := differences(own, setup.files):
        raise WeightsError(
            f"rank {setup.rank} has another model in {str(folder)!r} on {socket.gethostname()} than rank 0 has in "
            f"{setup.folder!r}: {', '.join(different[:4])} differ; copy one to all hosts"
        )


def _run_steps(connection: Connection, runner: ModelRunner, place: Place) -> bool:
    from mmserve.parallel.workers.wire import Leave, Result, Step, receive, send

    try:
        while isinstance(step := receive(connection), Step):
            output = _run(runner, step)
            if place.samples:
                send(connection, Result(output))
        return isinstance(step, Leave)
    finally:
        runner.close()


def _run(runner: ModelRunner, step: Step) -> StepOutput:
    for sampled in step.learned:
        runner.learn(sampled)
    return runner.run(step.batch, failed=step.failed)


def _portable(error: Exception) -> Exception:
    """The error itself if it can be put on the wire, else one that says as much."""
    from mmserve.errors import MMServeError, WorkerError
    from mmserve.parallel.workers.wire import decode, encode

    if isinstance(error, MMServeError):
        try:
            decode(encode(error))
        except Exception:  # noqa: BLE001 - whatever an error of somebody's own does when it is copied
            return WorkerError(f"{type(error).__name__}: {error}")
        return error
    return WorkerError(f"{type(error).__name__}: {error}")


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone, even in the middle of a long computation."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="mmserve-watch", daemon=True).start()


def main() -> int:
    """The process's whole life; `sys.argv[1]` is the inherited descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what a library prints is not the driver's output
    _leave_with_parent()
    return serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())

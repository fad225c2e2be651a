"""Memory that the ranks of one host share, for sums and gathers on the CPU: what a socket takes, at memory speed.

The memory is a file without a name, which the first rank makes and the others open among its descriptors: there is
nothing that a process could leave behind, however it ends, and nowhere that two engines could meet. The compiled
kernels exchange in it (`csrc/exchange.h`); here ranks agree on whether they can.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError
from mmserve.kernels.library import native_module, status

__all__ = ["SWITCH", "Agreement", "Say", "agree"]

SWITCH = "MMSERVE_SHARED_MEMORY"
"""A variable of the environment: "off" on any rank, and all talk through sockets alone; "on" is as if it were unset."""

Say = Callable[[str], list[str]]
"""Tells all ranks a few words; what each of them said."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What ranks agreed on.

    Attributes:
        exchange: This rank's end, the compiled library's `SharedExchange`; None if they do not share memory.
        reason: Why so; the same on all ranks.
    """

    exchange: Any | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others of itself.

    Attributes:
        missing: Why it can not share memory; empty if it can, and what follows is empty if not.
        host: Equal where processes know each other by the same numbers.
        process: Its number.
        memory: Its descriptor of the file; of the first rank. file: Device and number of that.
    """

    missing: str = ""
    host: str = ""
    process: int = 0
    memory: int = -1
    file: Sequence[int] = ()


def agree(rank: int, size: int, timeout: float, say: Say) -> Agreement:
    """Share memory with the other ranks if all of them can; all ranks call it.

    Args:
        rank: This rank's number. size: Ranks in the group.
        timeout: Seconds until an exchange to which a rank does not come is given up.
        say: Reaches the other ranks; what it raises passes through.

    Raises:
        ConfigError: The switch says neither on nor off.
    """
    with ExitStack() as stack:
        offers = [_Offer(**json.loads(said)) for said in say(json.dumps(asdict(_offer(rank, size, stack))))]
        reason = _refusal(offers)
        if reason is not None:
            return Agreement(None, reason)
        exchange, failed = None, ""
        try:
            exchange = _open(rank, timeout, offers)
        except (OSError, RuntimeError) as error:
            failed = f"rank {rank} can not open the memory of rank 0: {error}"
        # The first rank's descriptor stays open until all have answered.
        reason = next((said for said in say(failed) if said), None)
    return Agreement(exchange, "all ranks are on one host") if reason is None else Agreement(None, reason)


def _offer(rank: int, size: int, stack: ExitStack) -> _Offer:
    if (missing := _missing()) is not None:
        return _Offer(missing)
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        host = f"{boot.read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/pid')}"
        if rank != 0:
            return _Offer("", host, os.getpid())
        memory = os.memfd_create("mmserve-ranks")
        stack.callback(os.close, memory)
        module = native_module()
        assert module is not None
        os.ftruncate(memory, module.SharedExchange.bytes(size))
        about = os.fstat(memory)
        return _Offer("", host, os.getpid(), memory, (about.st_dev, about.st_ino))
    except OSError as error:
        return _Offer(f"rank {rank} can not share memory: {error}")


def _missing() -> str | None:
    """What this process lacks."""
    said = os.environ.get(SWITCH) or "on"
    if said not in ("on", "off"):
        raise ConfigError(f"{SWITCH} in the environment is 'on' or 'off', not {said!r}")
    if said == "off":
        return f"switched off by {SWITCH}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this system has no files in memory, or can not watch processes"
    if native_module() is None:
        return f"there are no compiled kernels: {status().reason}"
    return None


def _refusal(offers: Sequence[_Offer]) -> str | None:
    """Why these ranks can not share memory."""
    for rank, offer in enumerate(offers):
        if offer.missing:
            return offer.missing
        if offer.host != offers[0].host:
            return f"rank {rank} is on another host or in another container than rank 0"
    return None


def _open(rank: int, timeout: float, offers: Sequence[_Offer]) -> Any:
    """This rank's end.

    Raises:
        OSError, RuntimeError: The file can not be opened or mapped, or a process can not be watched.
    """
    module = native_module()
    assert module is not None
    first = offers[0]
    with ExitStack() as stack:
        memory = os.open(f"/proc/{first.process}/fd/{first.memory}", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, memory)
        about = os.fstat(memory)
        if [about.st_dev, about.st_ino] != list(first.file):
            raise OSError("another file is in its place")
        peers = []
        for offer in offers:
            # Ranks that are threads of this process end with it.
            peers.append(-1 if offer.process == os.getpid() else os.pidfd_open(offer.process))
            if peers[-1] >= 0:
                stack.callback(os.close, peers[-1])
        return module.SharedExchange(memory, rank, len(offers), peers, timeout)

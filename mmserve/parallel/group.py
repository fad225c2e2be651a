"""Ranks that exchange tensors: the few operations that sharded layers need, and a count of the bytes they move.

A group is an object, not torch's global default group: a process may hold several engines, and the user's own
`init_process_group` is left alone. The backend is gloo on the CPU and NCCL between CUDA devices; ranks of one host
can exchange through memory instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mmserve.errors import ConfigError
from mmserve.parallel.shared_memory import agree

__all__ = ["ExchangeError", "Group", "Refusal", "Traffic", "make_group"]

_LOOPBACK = ("127.0.0.1", "localhost")
_SUMMED_IN_MEMORY = (torch.bfloat16, torch.float32)


@dataclass(slots=True)
class Traffic:
    """What this rank has sent, as counted on paper: an all-reduce over n ranks sends 2 (n-1)/n of its tensor."""

    calls: int = 0
    sent_bytes: int = 0

    def add(self, tensor: torch.Tensor, share: float) -> None:
        """Count one exchange in which `share` times the tensor's bytes leave this rank."""
        self.calls += 1
        self.sent_bytes += round(tensor.numel() * tensor.element_size() * share)


@dataclass(slots=True)
class Refusal:
    """Why ranks must not exchange anything for a while, and how often it was tried."""

    reason: str
    count: int = 0


class ExchangeError(RuntimeError):
    """A rank of the group is gone or silent; what is known of it is in the message."""


class Group:
    """One rank's end of a group.

    Every method is called by all ranks of the group, in the same order, with tensors of the same shape and dtype. A
    rank that has died ends the call with an ExchangeError, at once where its connection breaks, after the timeout
    otherwise.

    Args:
        process_group: A c10d process group, or what takes its place.
        rank: This rank's number in the group.
        size: Ranks in it.
        through: What it is, in a word.

    Attributes:
        through: What sums and gathers go through. reason: Why that, if there was a choice.
    """

    def __init__(self, process_group: Any, rank: int, size: int, through: str = "") -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.through = through
        self.reason = ""
        self._memory: Any | None = None
        self._refusal: Refusal | None = None
        self._alone = False
        self._group = process_group

    def share_memory(self, timeout: float) -> None:
        """From now on sums, gathers and broadcasts go through memory, if all ranks are on one host and can share it.

        Args:
            timeout: Seconds until a rank that does not come to an exchange counts as lost.

        Raises:
            ExchangeError: A rank is gone.
            ConfigError: The environment's switch says neither on nor off.
        """
        agreement = agree(self.rank, self.size, timeout, self._say)
        self._memory, self.reason = agreement.exchange, agreement.reason
        if self._memory is not None:
            self.through = "shared memory"
        self.traffic = Traffic()  # of tensors, not of this

    def all_reduce(self, tensor: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over all ranks, bit-equal on all of them; in place, unless the tensor is not contiguous.

        Args:
            tensor: This rank's part.
            onto: Added to the sum after that was rounded to the dtype; contiguous, of the same shape and dtype.
        """
        if self.size > 1 and not self._alone:
            self._check_allowed()
            tensor = tensor.contiguous()
            self.traffic.add(tensor, 2 * (self.size - 1) / self.size)
            with _exchanging():
                if self._memory is not None and tensor.dtype in _SUMMED_IN_MEMORY:
                    self._memory.sum(tensor, onto)
                    return tensor
                self._group.allreduce([tensor]).wait()
        return tensor if onto is None else tensor.add_(onto)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in the order of ranks."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return [tensor]
        self._check_allowed()
        self.traffic.add(tensor, self.size - 1)
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _exchanging():
            if self._memory is not None:
                self._memory.gather(tensor, found)
            else:
                self._group.allgather([found], [tensor]).wait()
        return found

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The source's tensor, in place; returns `tensor`."""
        if self.size > 1:
            self._check_allowed()
            if self.rank == source:
                self.traffic.add(tensor, self.size - 1)
            with _exchanging():
                if self._memory is not None:
                    self._memory.broadcast(tensor, source)
                else:
                    options = dist.BroadcastOptions()
                    options.rootRank = source
                    self._group.broadcast([tensor], options).wait()
        return tensor

    @contextmanager
    def refuse(self, reason: str) -> Iterator[Refusal]:
        """While ranks do different things: whoever begins an exchange gets a RuntimeError at once, and is counted.

        Better an error on this rank than waiting for ranks that never come.
        """
        self._refusal = Refusal(reason)
        try:
            yield self._refusal
        finally:
            self._refusal = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this rank tries its own part of a layer as if that were a whole one: sums are of its part alone, and
        other exchanges get a RuntimeError."""
        self._alone = True
        try:
            with self.refuse("this rank tried its own part of a layer"):
                yield
        finally:
            self._alone = False

    def _check_allowed(self) -> None:
        if self._refusal is not None:
            self._refusal.count += 1
            raise RuntimeError(f"an exchange between ranks was begun while {self._refusal.reason}")

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send; the tensor must stay as it is until the returned work was waited for."""
        self.traffic.add(tensor, 1.0)
        with _exchanging():
            return self._group.send([tensor.contiguous()], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill the tensor with what `source` sends; returns `tensor`."""
        with _exchanging():
            self._group.recv([tensor], source, 0).wait()
        return tensor

    def _say(self, words: str) -> list[str]:
        """What every rank says, in the order of ranks."""
        raw = words.encode()
        lengths = torch.cat(self.all_gather(torch.tensor([len(raw)]))).tolist()
        padded = torch.tensor(list(raw.ljust(max(lengths))), dtype=torch.uint8)
        return [
            bytes(said[:length].tolist()).decode()
            for said, length in zip(self.all_gather(padded), lengths, strict=True)
        ]


@contextmanager
def _exchanging() -> Iterator[None]:
    """What breaks in here is an exchange."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"an exchange between ranks broke: {error}") from error


def _gloo_device(gloo: Any, host: str) -> Any:
    """The network that ranks talk over, chosen as torch.distributed does: GLOO_SOCKET_IFNAME, or this host's name."""
    if host in _LOOPBACK:
        return gloo.create_device(hostname="127.0.0.1")
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return gloo.create_device(interface=name) if name else gloo.create_default_device()


def make_group(store: Any, name: str, rank: int, size: int, device: torch.device, host: str, timeout: float) -> Group:
    """Meet the other ranks of the group `name` and connect to them.

    Args:
        store: A c10d store that all of them reach.
        name: The group's, unique in the store.
        rank: This rank's number in the group. size: Ranks in it.
        device: Where the tensors will be: gloo for the CPU, NCCL for CUDA.
        host: Of the store; on the loopback the group stays there too, whatever this machine's name resolves to.
        timeout: Seconds until an exchange whose other side is silent is given up.

    Raises:
        ConfigError: This torch has no such backend.
        RuntimeError: A rank did not come, or died.
    """
    own = dist.PrefixStore(f"{name}/", store)
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ConfigError("several CUDA devices talk through NCCL, which this torch was built without")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return Group(dist.ProcessGroupNCCL(own, rank, size, nccl), rank, size, "nccl")
    if not dist.is_gloo_available():
        raise ConfigError("ranks on the CPU talk through gloo, which this torch was built without")
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [_gloo_device(gloo, host)]
    return Group(gloo(own, rank, size, options), rank, size, "gloo")

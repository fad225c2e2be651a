"""What the driver and its workers say to each other, and how it is put on the wire.

driver                                         worker of rank r
                                         <-    Arrival    of one that a launcher started: who it is
Setup      folder, dtype, place, store   ->
                                         <-    Hello      up, and ready to meet the others
           (all load their parts, meeting in their groups)
                                         <-    Ready      or Lost
Trial      the worst step                ->     only if the engine asks what it takes
                                         <-    Tried
Start      the engine's limits           ->
Step       batch, tokens chosen before   ->
                                         <-    Result     only from the rank that chooses tokens
Leave      the engine is closed          ->
                                         <-    Left       and waiting for another Setup
Stop                                     ->
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from mmserve.engine.batch import ScheduledBatch, StepOutput
from mmserve.engine.scheduler import SchedulerLimits
from mmserve.engine.trial import Trial, Tried
from mmserve.errors import RequestError
from mmserve.model.interface import CacheSpec
from mmserve.parallel.layout import Layout

__all__ = [
    "Arrival",
    "Hello",
    "Leave",
    "Left",
    "Lost",
    "Ready",
    "Result",
    "Setup",
    "Start",
    "Step",
    "Stop",
    "Trial",
    "Tried",
    "decode",
    "encode",
    "receive",
    "send",
]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to load its part.

    Attributes:
        layout: Of all ranks. rank: The worker's own.
        host, port: Of the store where ranks meet. name: Of this engine in it.
        folder, dtype, device, attention_backend, block_size: As for `load_model`; a rank that a launcher started has a
            folder of its own.
        replace, trust_remote_code, allow_pickled_weights, ignore_weights: As for `load_model`.
        plan: The caller's tensor-parallel plan.
        timeout: Seconds of silence after which a rank counts as lost.
        threads: Of torch on the CPU; None: as many as the process has.
        files: What a folder of the worker's own must hold: see `mmserve.model.fingerprint`.
    """

    layout: Layout
    rank: int
    host: str
    port: int
    name: str
    folder: str
    dtype: str
    device: str
    attention_backend: str
    block_size: int
    replace: bool
    trust_remote_code: bool
    allow_pickled_weights: bool
    ignore_weights: tuple[str, ...]
    plan: Mapping[str, str] | None
    timeout: float
    threads: int | None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank that a launcher started.

    Attributes:
        local_rank: Among those of its host, if the launcher says.
        options: What its script said of the parts that ranks load: name -> value in words.
    """

    rank: int
    local_rank: int | None
    process_id: int
    host: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker is up. process_id: Of it; host: Where."""

    process_id: int
    host: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's part is loaded. cache: What it must be given. about: What it says of its part."""

    cache: CacheSpec
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """The engine's limits, one for all ranks. unsampled: Ids that are never sampled."""

    limits: SchedulerLimits
    unsampled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        batch: What to do.
        learned: Tokens of steps before, oldest first, for ranks that did not choose them: request id -> token.
        failed: Requests that failed on the first stage in this step; for later stages.
    """

    batch: ScheduledBatch
    learned: tuple[Mapping[str, int], ...] = ()
    failed: Mapping[str, RequestError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What the rank that chooses tokens made of its oldest step."""

    output: StepOutput


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker can not go on: `error` in its own words, `trace` for whoever looks into it."""

    error: Exception
    trace: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The engine is closed, and another may come."""


@dataclass(frozen=True, slots=True)
class Left:
    """The worker is done with the engine: nothing that it sends after this is about it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """No engine will come any more."""


class _Pickler(pickle.Pickler):
    """Tensors go as their bytes: torch's own way writes an archive for each, and the one for pipes shares memory."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided:
            dense = obj.detach().contiguous()
            raw = dense.reshape(-1).view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)
            return _tensor, (raw.numpy().tobytes(), dense.dtype, tuple(dense.shape))
        return NotImplemented


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def encode(message: object) -> bytes:
    """A message as bytes. Raises what pickling raises."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def decode(raw: bytes) -> Any:
    """The message of `encode`. Both ends are this program's own processes."""
    return pickle.loads(raw)


def send(connection: Connection, message: object) -> None:
    """Put a message on the wire. Raises OSError if the other end is gone."""
    connection.send_bytes(encode(message))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError if the other end is gone."""
    return decode(connection.recv_bytes())

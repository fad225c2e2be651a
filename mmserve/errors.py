"""One tree for everything mmserve raises on purpose.

    MMServeError
    ├── ConfigError                 an option of the pipeline or engine is unknown, out of range or contradicts another
    │   └── BackendError            an attention backend is unknown, or declined what it was forced to do
    ├── ModelLoadError              the model can not be loaded; nothing was started
    │   ├── ModelNotFoundError      no such folder, or the hub can not be reached
    │   ├── WeightsError            weights missing, unexpected, truncated or of the wrong shape
    │   └── UnsupportedModelError   this architecture, or something it needs, is not supported; says what
    ├── RequestError                this request is at fault or has failed; the pipeline goes on
    │   ├── InvalidRequestError     a field is unknown or out of range (also a ValueError)
    │   ├── InputError              an image or prompt can not be processed (`__cause__`: the `processors` error)
    │   ├── CapacityError           it can never fit; says the numbers
    │   ├── Overloaded              the queue is full; try again later
    │   ├── DeadlineExceeded        it did not finish in its time
    │   ├── RequestAborted          it was aborted
    │   └── ModelOutputError        the model produced wrong row counts or values that are not finite
    ├── EngineError                 fatal: the engine as a whole
    │   ├── EngineDeadError         a step failed; every waiter and every later call hears why
    │   ├── WorkerError             a process of a parallel engine has died, failed or fallen silent
    │   └── PipelineClosedError     used after close()
    ├── FixtureError                a golden fixture can not be read or written
    └── ConformanceError            packed answers differ from those of generate(); says where and how

Messages name the thing, the numbers and the way out.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CapacityError",
    "ConfigError",
    "ConformanceError",
    "DeadlineExceeded",
    "EngineDeadError",
    "EngineError",
    "FixtureError",
    "InputError",
    "InvalidRequestError",
    "MMServeError",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelOutputError",
    "Overloaded",
    "PipelineClosedError",
    "RequestAborted",
    "RequestError",
    "UnsupportedModelError",
    "WeightsError",
    "WorkerError",
]


class MMServeError(Exception):
    """Base of everything mmserve raises on purpose."""


class ConfigError(MMServeError, ValueError):
    """An option is unknown, out of range or contradicts another."""


class BackendError(ConfigError):
    """An attention backend is unknown, or declined what it was forced to do."""


class ModelLoadError(MMServeError):
    """The model can not be loaded; nothing was started."""


class ModelNotFoundError(ModelLoadError):
    """There is no such model folder, or the hub can not be reached."""


class WeightsError(ModelLoadError):
    """Weights are missing, unexpected, truncated or of the wrong shape."""


class UnsupportedModelError(ModelLoadError):
    """This architecture, or something it needs, is not supported."""


class RequestError(MMServeError):
    """One request is at fault or has failed; the pipeline goes on."""


class InvalidRequestError(RequestError, ValueError):
    """A field of a request is unknown or out of range."""


class InputError(RequestError):
    """An image or a prompt can not be processed; `__cause__` is the error of `processors`."""


class CapacityError(RequestError):
    """The request can never fit this pipeline."""


class Overloaded(RequestError):
    """The queue is full; try again later."""


class DeadlineExceeded(RequestError):
    """The request did not finish in its time."""


class RequestAborted(RequestError):
    """The request was aborted."""


class ModelOutputError(RequestError):
    """The model produced a wrong number of rows, or values that are not finite."""


class EngineError(MMServeError):
    """The engine as a whole can not go on."""


class EngineDeadError(EngineError):
    """A step failed in a way that no single request can be blamed for."""


class WorkerError(EngineError):
    """A process of a parallel engine has died, failed or fallen silent; says which, and what it said last."""


class PipelineClosedError(EngineError):
    """The pipeline was used after `close()`."""


class FixtureError(MMServeError):
    """A golden fixture can not be read or written."""


class ConformanceError(MMServeError):
    """Packed answers differ from those of transformers' own `generate()`; says where and how."""

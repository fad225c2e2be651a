"""mmserve: image+text inference in your own process, with any transformers vision-language model.

from mmserve import MMPipeline
pipe = MMPipeline("path-or-hub-id")
print(pipe.generate("photo.jpg", "What is on the table?").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmserve.config import EngineConfig
    from mmserve.pipeline import MMPipeline
    from mmserve.types import (
        GenerationOutput,
        GenerationRequest,
        ImageInput,
        Logprob,
        Message,
        Metrics,
        SamplingParams,
        StreamDelta,
        TokenLogprobs,
        Usage,
    )

__version__ = "0.1.0"

# Exported name -> module that defines it; imported on first use, so that `import mmserve` stays light.
_EXPORTS = {
    "EngineConfig": "mmserve.config",
    "GenerationOutput": "mmserve.types",
    "GenerationRequest": "mmserve.types",
    "ImageInput": "mmserve.types",
    "Logprob": "mmserve.types",
    "MMPipeline": "mmserve.pipeline",
    "Message": "mmserve.types",
    "Metrics": "mmserve.types",
    "SamplingParams": "mmserve.types",
    "StreamDelta": "mmserve.types",
    "TokenLogprobs": "mmserve.types",
    "Usage": "mmserve.types",
}

__all__ = [
    "EngineConfig",
    "GenerationOutput",
    "GenerationRequest",
    "ImageInput",
    "Logprob",
    "MMPipeline",
    "Message",
    "Metrics",
    "SamplingParams",
    "StreamDelta",
    "TokenLogprobs",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mmserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Puts the parts of a pipeline together: folder, processor, model, engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmserve.config import EngineConfig
from mmserve.errors import UnsupportedModelError
from processors.errors import UnsupportedProcessorError

if TYPE_CHECKING:
    import torch

    from mmserve.engine.core import Engine
    from mmserve.model.interface import Model
    from processors import PromptProcessor

__all__ = ["Parts", "assemble"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a pipeline holds; the engine's thread is running."""

    folder: Path
    processor: PromptProcessor
    model: Model
    engine: Engine


def assemble(
    folder: Path,
    config: EngineConfig,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool,
) -> Parts:
    """Load what `folder` holds and start an engine on it.

    Raises:
        ConfigError: An option does not fit this model.
        ModelLoadError: The model can not be loaded; nothing was started.
    """
    from mmserve.engine.core import Engine
    from mmserve.model import load_model
    from mmserve.model.generation import load_generation_config

    processor = _load_processor(folder, config, trust_remote_code)
    model = load_model(
        folder,
        dtype=dtype,
        device=device,
        attention_backend=config.attention_backend,
        block_size=config.block_size,
        trust_remote_code=trust_remote_code,
    )
    engine = Engine(
        model,
        processor.tokenizer,
        config,
        identity=str(folder),
        generation_config=load_generation_config(folder, trust_remote_code=trust_remote_code),
        device=model.describe()["device"],
    )
    return Parts(folder, processor, model, engine)


def _load_processor(folder: Path, config: EngineConfig, trust_remote_code: bool) -> PromptProcessor:
    from processors import MediaOptions, PromptProcessor

    media = MediaOptions(
        max_pixels=config.max_image_pixels,
        max_bytes=config.max_image_bytes,
        background=config.alpha_background,
        allow_private_addresses=config.allow_private_urls,
        file_root=None if config.allowed_media_root is None else str(config.allowed_media_root),
    )
    try:
        return PromptProcessor.from_pretrained(folder, media=media, trust_remote_code=trust_remote_code)
    except UnsupportedProcessorError as error:
        raise UnsupportedModelError(str(error)) from error

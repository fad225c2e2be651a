"""The engine's options: resolved once, never changed afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from mmserve.errors import ConfigError
from mmserve.schema import Bool, Float, Int, Schema

__all__ = ["EngineConfig"]

GiB = 1024**3


class EngineConfig(Schema):
    """Options of the engine. Every one has a default that suits one user on one machine."""

    error_type: ClassVar[type[ConfigError]] = ConfigError

    block_size: Int = Field(default=64, ge=1, le=1024, description="Tokens in a cache block.")
    num_blocks: Int | None = Field(
        default=None, ge=2, description="Cache blocks, each of all layers. None: as many as the memory for them holds."
    )
    kv_cache_memory: Int | None = Field(
        default=None,
        ge=1024,
        description="Bytes for keys and values, unless num_blocks or memory_budget says. None: 1 GiB, at most a "
        "quarter of the memory.",
    )
    memory_budget: Int | None = Field(
        default=None,
        ge=1024,
        description="Bytes for everything: this process with its model, working memory, image caches, keys and values. "
        "The worst step is tried at load, and keys and values get what it leaves. On a GPU: of its memory. "
        "Over several ranks: of each of them.",
    )
    max_num_seqs: Int = Field(default=32, ge=1, le=4096, description="Most sequences in one step.")
    max_num_batched_tokens: Int = Field(
        default=2048, ge=1, description="Most tokens in one step; longer prompts run in chunks."
    )
    max_model_len: Int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of prompt and answer together. None: the model's own limit, or the cache's.",
    )
    max_images_per_step: Int = Field(default=8, ge=1, description="Most images encoded in one step.")
    enable_prefix_caching: Bool = Field(
        default=True, description="Reuse keys and values of a prompt's known beginning."
    )
    encoder_cache_memory: Int = Field(
        default=GiB // 4,
        ge=0,
        description="Bytes of image rows, those that running requests hold and those kept for a later request.",
    )
    max_queue: Int = Field(
        default=1024, ge=1, description="Most requests waiting; one more is refused with Overloaded."
    )
    preprocess_threads: Int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads that prepare prompts; and as many again, shared by them, for the images of prompts that "
        "have several.",
    )
    processor_cache_memory: Int = Field(
        default=GiB // 4, ge=0, description="Bytes of processed images kept, so that one seen before is not processed."
    )
    prepared_memory: Int | None = Field(
        default=None,
        ge=0,
        description="Bytes of newly processed images whose request no step has begun with: prompts with images wait "
        "for that room, and one may always be prepared. None: 64 MiB, or 1 GiB where the model is on a GPU.",
    )
    tensor_parallel: Int = Field(
        default=1, ge=1, le=64, description="Processes that share each layer of the model; this one is the first."
    )
    pipeline_parallel: Int = Field(
        default=1,
        ge=1,
        le=64,
        description="Stages that the model's layers are dealt to, tensor_parallel processes each.",
    )
    tensor_parallel_plan: dict[str, str] | None = Field(
        default=None,
        description="Patterns of module names (numbers as *) and the style of each; None: the model's own plan.",
    )
    rank_timeout: Float = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a process of a parallel engine that is silent counts as lost.",
    )
    attention_backend: str = Field(default="auto", description="'auto', or the name of one backend to force.")
    replace_layers: Bool = Field(
        default=True, description="Let faster layers take the place of the model's own where they give the same."
    )
    allow_pickled_weights: Bool = Field(
        default=False, description="Read torch pickles, as tensors only, where a model has no safetensors."
    )
    ignore_weights: tuple[str, ...] = Field(
        default=(),
        description="Tensors of the weight files that the model may have no place for: 'begins*', '*ends', '*holds*', "
        "or a whole name.",
    )
    max_image_pixels: Int = Field(default=64 * 1024 * 1024, ge=1, description="Largest picture read, in pixels.")
    max_image_bytes: Int = Field(
        default=64 * 1024 * 1024, ge=1, description="Largest image file or download, in bytes."
    )
    alpha_background: tuple[Int, Int, Int] = Field(
        default=(255, 255, 255), description="RGB colour that transparent pictures are laid on."
    )
    allow_private_urls: Bool = Field(
        default=False, description="Let image URLs lead to private and loopback addresses."
    )
    allowed_media_root: Path | None = Field(
        default=None, description="If set, image files are read only from inside this folder."
    )
    url_timeout: Float = Field(
        default=30.0, gt=0, allow_inf_nan=False, description="Seconds for the whole download of an image."
    )
    progress: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Progress bar of generate_batch; auto: on a terminal, for work over two seconds.",
    )

    @model_validator(mode="after")
    def _colour(self) -> EngineConfig:
        if any(not 0 <= channel <= 255 for channel in self.alpha_background):
            raise ValueError(f"alpha_background is an RGB colour of 0..255, not {self.alpha_background}")
        return self

    @model_validator(mode="after")
    def _one_size(self) -> EngineConfig:
        given = [n for n in ("num_blocks", "kv_cache_memory", "memory_budget") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"the cache's size is given by one of these, not by {' and '.join(given)}")
        return self

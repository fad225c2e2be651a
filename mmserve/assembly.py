"""The parts of a pipeline and how they are put together: folder, processor, model, engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmserve.config import EngineConfig
from mmserve.errors import ConfigError, InputError, InvalidRequestError, UnsupportedModelError
from mmserve.requests import image_inputs, plain_messages
from mmserve.types import MIN_TEMPERATURE, SamplingParams
from processors.errors import ProcessorError, UnsupportedProcessorError
from processors.types import ProcessedPrompt

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from mmserve.engine.core import Engine
    from mmserve.model.interface import Model
    from mmserve.parallel.rank import RankShape
    from mmserve.parallel.workers.driver import Team
    from mmserve.parallel.workers.launch import Launch
    from mmserve.types import GenerationRequest
    from processors import PromptProcessor

__all__ = ["Parts", "assemble", "load_processor", "process_request", "resolve_folder", "worst_prompt"]


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
        SystemExit: This process is a rank that a launcher started, not the first, and rank 0 is done.
    """
    from mmserve.model import load_model

    launch = _find_launch(config)
    if launch is not None and launch.rank > 0:
        raise SystemExit(_work(launch, folder, config, _rank_options(config, dtype, trust_remote_code)))
    processor = load_processor(folder, config, trust_remote_code=trust_remote_code)

    def load(rank: RankShape | None) -> Model:
        return load_model(
            folder,
            dtype=dtype,
            device=device,
            attention_backend=config.attention_backend,
            block_size=config.block_size,
            replace=config.replace_layers,
            trust_remote_code=trust_remote_code,
            allow_pickled_weights=config.allow_pickled_weights,
            ignore_weights=config.ignore_weights,
            rank=rank,
        )

    if config.tensor_parallel * config.pipeline_parallel == 1:
        model = load(None)
        return Parts(folder, processor, model, _make_engine(folder, processor, model, config, None, trust_remote_code))
    team = _start_team(folder, config, launch, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    try:
        model = load(team.rank)
        engine = _make_engine(folder, processor, model, config, team, trust_remote_code)
    except RuntimeError as error:  # what a broken exchange raises: a worker can say why
        reason = team.explain(error)
        team.kill()
        raise reason from error
    except BaseException:
        team.kill()
        raise
    return Parts(folder, processor, model, engine)


def _find_launch(config: EngineConfig) -> Launch | None:
    """What torchrun says of this process, if it started it and the engine has several ranks."""
    if config.tensor_parallel * config.pipeline_parallel == 1:
        return None
    from mmserve.parallel.layout import Layout
    from mmserve.parallel.workers.launch import find_launch

    return find_launch(os.environ, Layout(config.tensor_parallel, config.pipeline_parallel))


def _work(launch: Launch, folder: Path, config: EngineConfig, options: Mapping[str, str]) -> int:
    from mmserve.parallel.workers.launch import work

    return work(launch, folder, config.rank_timeout, options)


def _rank_options(config: EngineConfig, dtype: str | torch.dtype, trust_remote_code: bool) -> dict[str, str]:
    """What a script says of the parts that ranks load, in words; under a launcher every rank must have been told it."""
    names = (
        "tensor_parallel", "pipeline_parallel", "tensor_parallel_plan", "attention_backend", "block_size",
        "replace_layers", "allow_pickled_weights", "ignore_weights",
    )  # fmt: skip
    return {
        **{name: repr(getattr(config, name)) for name in names},
        "dtype": str(dtype).removeprefix("torch."),
        "trust_remote_code": repr(trust_remote_code),
    }


def _start_team(
    folder: Path,
    config: EngineConfig,
    launch: Launch | None,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool,
) -> Team:
    from mmserve.model.precision import resolve_device
    from mmserve.parallel.layout import Layout
    from mmserve.parallel.workers.driver import start_team

    return start_team(
        str(folder),
        Layout(config.tensor_parallel, config.pipeline_parallel),
        dtype=str(dtype),
        device=resolve_device(device),
        attention_backend=config.attention_backend,
        block_size=config.block_size,
        replace=config.replace_layers,
        trust_remote_code=trust_remote_code,
        allow_pickled_weights=config.allow_pickled_weights,
        ignore_weights=config.ignore_weights,
        plan=config.tensor_parallel_plan,
        timeout=config.rank_timeout,
        launch=launch,
        options=_rank_options(config, dtype, trust_remote_code),
    )


def _make_engine(
    folder: Path,
    processor: PromptProcessor,
    model: Model,
    config: EngineConfig,
    team: Team | None,
    trust_remote_code: bool,
) -> Engine:
    from mmserve.engine.core import Engine
    from mmserve.model.generation import load_generation_config

    about = model.describe()
    return Engine(
        model,
        processor.tokenizer,
        config,
        identity=f"{folder.resolve()} as {about['dtype']}",
        generation_config=_checked_defaults(load_generation_config(folder, trust_remote_code=trust_remote_code)),
        device=about["device"],
        worst_prompt=lambda num_tokens: worst_prompt(processor, num_tokens, config.max_images_per_step),
        team=team,
    )


def worst_prompt(processor: PromptProcessor, num_tokens: int, max_images: int) -> ProcessedPrompt:
    """The prompt whose step takes most memory: as many of the largest images as fit and may be, then text."""
    from PIL import Image

    one = processor.process("<image>", [Image.new("RGB", processor.largest_image().size)], raw=True)
    (image,), ids = one.images, one.token_ids
    count = max(1, min(max_images, num_tokens // len(ids)))
    text = max(0, num_tokens - count * len(ids))
    images = tuple(
        replace(image, key=f"trial-{n}", range=replace(image.range, offset=n * len(ids) + image.range.offset))
        for n in range(count)
    )
    # Any token that is no image's is text; the embedding of one costs what that of any other does.
    return ProcessedPrompt(
        ids * count + (0,) * text, images, one.mm_token_type_ids * count + (0,) * (text if one.mm_token_type_ids else 0)
    )


_DEFAULTS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Field of a generation config -> the option of a request that it is the default of."""


def _checked_defaults(config: GenerationConfig) -> GenerationConfig:
    """The model's own defaults, each of which a request could have asked for.

    Raises:
        UnsupportedModelError: A value is of the wrong type or out of range; says which.
    """
    for own, option in _DEFAULTS.items():
        value = getattr(config, own, None)
        if own == "temperature" and isinstance(value, float) and 0 < value < MIN_TEMPERATURE:
            continue  # some models write greedy as 1e-6; `resolve_sampling` takes it so
        try:
            SamplingParams.model_validate({option: value})
        except InvalidRequestError as error:
            raise UnsupportedModelError(f"{own} in generation_config.json can not be used: {error}") from error
    return config


def resolve_folder(model: str | Path | None, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The local folder of a model; None: the demo model's. `trust_remote_code`: fetch a hub model's Python files too.

    Raises:
        ConfigError: `revision` is given for something that is not a hub id.
        ModelNotFoundError: There is no such folder, or the hub does not give it.
    """
    if model is None:
        from mmserve.demo import demo_model_folder

        if revision is not None:
            raise ConfigError(f"revision {revision!r} is for a hub id, and no model is named: the demo model has none")
        return demo_model_folder()
    from mmserve.model.source import resolve_model_folder

    return resolve_model_folder(model, revision, trust_remote_code=trust_remote_code)


def load_processor(folder: Path, config: EngineConfig, *, trust_remote_code: bool = False) -> PromptProcessor:
    """The folder's processor, with the media limits of `config`.

    Raises:
        UnsupportedModelError: There is none, or it can not be used.
    """
    from processors import MediaOptions, PromptProcessor

    media = MediaOptions(
        max_image_pixels=config.max_image_pixels,
        max_image_bytes=config.max_image_bytes,
        alpha_background=config.alpha_background,
        allow_private_urls=config.allow_private_urls,
        allowed_media_root=None if config.allowed_media_root is None else str(config.allowed_media_root),
        url_timeout=config.url_timeout,
    )
    try:
        return PromptProcessor.from_pretrained(
            folder,
            media=media,
            trust_remote_code=trust_remote_code,
            cache_bytes=config.processor_cache_memory,
            workers=config.preprocess_threads,
        )
    except UnsupportedProcessorError as error:
        raise UnsupportedModelError(str(error)) from error


def process_request(processor: PromptProcessor, request: GenerationRequest) -> ProcessedPrompt:
    """What the model would see of `request`.

    Raises:
        InputError: An image can not be read, or prompt and images do not fit together.
    """
    images = image_inputs(request)
    names = [image.uuid for image in images]
    try:
        if request.messages is not None:
            messages = plain_messages(request.messages)
            return processor.process(messages, options=request.processor_options, image_ids=names)
        return processor.process(
            request.prompt or "",
            [image.source for image in images],
            raw=request.raw,
            options=request.processor_options,
            image_ids=names,
        )
    except ProcessorError as error:
        raise InputError(str(error)) from error

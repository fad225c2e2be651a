"""From a model folder to a model ready for packed batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mmserve.attention.interface import AttentionBackend
from mmserve.attention.registry import AUTO_ORDER, choose_backend, make_backend
from mmserve.errors import ConfigError, UnsupportedModelError
from mmserve.model import text_attention
from mmserve.model.build import build_model, read_config
from mmserve.model.checkpoint import Checkpoint, open_checkpoint
from mmserve.model.generate_path import GenerateModel
from mmserve.model.image_rows import ImageEncoder, find_image_features
from mmserve.model.paged import PagedLayer, PagedModel
from mmserve.model.precision import Precision, resolve_device, resolve_precision
from mmserve.model.probe import probe_attention
from mmserve.model.refused import REFUSED

__all__ = ["load_model"]

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "video_token_index")


def load_model(
    folder: Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    attention_backend: str = "auto",
    block_size: int,
    path: Literal["auto", "paged", "generate"] = "auto",
    trust_remote_code: bool = False,
) -> PagedModel | GenerateModel:
    """Load a model folder.

    Args:
        folder: What `save_pretrained()` wrote: config.json and safetensors weights.
        dtype: "auto" (the checkpoint's own), a name, or a torch dtype.
        device: "auto", "cpu", "cuda", "cuda:N".
        attention_backend: "auto", or the name of one that must serve every layer.
        block_size: Tokens in a block of the cache that will be bound.
        path: "paged": packed batches over the paged cache; "generate": transformers' own generate(), one
            request at a time; "auto": paged where the architecture allows it, and `describe()` says why not.
        trust_remote_code: Whether to run Python files that come with the folder.

    Raises:
        ModelNotFoundError: No such folder, or no config.json in it.
        UnsupportedModelError: The architecture is unknown or can not run here; says why.
        WeightsError: Weights are missing, unexpected, truncated or of the wrong shape.
        ConfigError: A dtype, device or path that can not be.
        BackendError: The attention backend is unknown, or declined.
    """
    if path not in ("auto", "paged", "generate"):
        raise ConfigError(f"unknown path {path!r}; known: auto, paged, generate")
    names = AUTO_ORDER if attention_backend == "auto" else (attention_backend,)
    backends = [make_backend(name) for name in names]
    checkpoint = open_checkpoint(folder)
    if checkpoint.model_type in REFUSED:
        raise UnsupportedModelError(
            f"{checkpoint.model_type!r} models are not served: {REFUSED[checkpoint.model_type]}"
        )
    config = read_config(checkpoint, trust_remote_code)
    where = resolve_device(device)
    precision = resolve_precision(dtype, checkpoint.tensors, config, where)
    model = build_model(checkpoint, config, precision, where, trust_remote_code)
    loaded = _Loaded(model, checkpoint, precision, where)
    if path == "generate":
        return _generate_model(loaded, "as asked")
    try:
        return _paged_model(loaded, backends, block_size)
    except UnsupportedModelError as error:
        if path == "paged" or not model.can_generate():
            raise
        return _generate_model(loaded, str(error))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A transformers model and what is known of it."""

    model: Any
    checkpoint: Checkpoint
    precision: Precision
    device: torch.device

    @property
    def vocab_size(self) -> int:
        head = self.model.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not None:
            return int(head.weight.shape[0])
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Placeholders of every modality that lie inside the logits: a model must not write them."""
        ids = {getattr(self.model.config, name, None) for name in _PLACEHOLDERS}
        return tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < self.vocab_size))

    @property
    def max_position(self) -> int | None:
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(most) if most is not None else None

    def about(self, **more: object) -> Mapping[str, object]:
        return {
            "class": type(self.model).__name__,
            "model_type": self.checkpoint.model_type,
            "folder": str(self.checkpoint.folder),
            "dtype": str(self.precision.dtype).removeprefix("torch."),
            "dtype_reason": self.precision.reason,
            "device": str(self.device),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            **more,
        }


def _generate_model(loaded: _Loaded, reason: str) -> GenerateModel:
    if not loaded.model.can_generate():
        raise UnsupportedModelError(f"{type(loaded.model).__name__} can not generate text")
    return GenerateModel(
        loaded.model,
        vocab_size=loaded.vocab_size,
        forbidden_token_ids=loaded.forbidden_token_ids,
        max_position=loaded.max_position,
        about=loaded.about(path="generate", path_reason=reason, attention=[], replacements=[]),
    )


def _paged_model(loaded: _Loaded, backends: Sequence[AttentionBackend], block_size: int) -> PagedModel:
    model, device = loaded.model, loaded.device
    profile = probe_attention(model)
    text_attention.register()
    text_attention.route(model, text_attention.NAME)
    text_attention.open_door(model)
    layers = [
        PagedLayer(module, spec, choose_backend(backends, spec, loaded.precision.dtype, device, block_size))
        for module, spec in profile.specs.items()
    ]
    features = find_image_features(model)
    embeddings = model.get_input_embeddings().weight
    return PagedModel(
        model,
        layers,
        ImageEncoder(features, embeddings.shape[1], embeddings.dtype, device) if features else None,
        profile.span_rule,
        vocab_size=loaded.vocab_size,
        forbidden_token_ids=loaded.forbidden_token_ids,
        max_position=loaded.max_position,
        about=loaded.about(
            path="paged",
            path_reason="every text layer goes through the attention interface by a rule that backends know",
            both_ways=profile.span_rule.__name__.replace("_", " "),
            attention=[_about_layer(index, layer) for index, layer in enumerate(layers)],
            replacements=[],
        ),
    )


def _about_layer(index: int, layer: PagedLayer) -> Mapping[str, object]:
    return {
        "layer": index,
        "backend": layer.choice.backend.name,
        "cache": layer.spec.layer,
        "window": layer.spec.window,
        "chunk": layer.spec.chunk,
        "declined": list(layer.choice.declined),
    }

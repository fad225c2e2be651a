"""From a model folder to a model ready for packed batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mmserve.attention.interface import AttentionBackend
from mmserve.attention.registry import AUTO_ORDER, choose_backend, make_backend
from mmserve.errors import BackendError, ConfigError, UnsupportedModelError
from mmserve.model import text_attention
from mmserve.model.build import build_model, read_config
from mmserve.model.checkpoint import Checkpoint, open_checkpoint
from mmserve.model.generate_path import GenerateModel
from mmserve.model.image_rows import ImageEncoder, find_image_features
from mmserve.model.paged import PagedLayer, PagedModel
from mmserve.model.precision import Precision, resolve_device, resolve_precision
from mmserve.model.probe import AttentionProfile, probe_attention
from mmserve.model.proven import PROVEN
from mmserve.model.refused import REFUSED
from mmserve.model.selfcheck import check_agreement, plain_logits
from mmserve.model.spans import SpanRule
from mmserve.model.stage import StageLink
from mmserve.parallel.rank import RankShape

if TYPE_CHECKING:
    from mmserve.model.replace import Replacement

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
    replace: bool = True,
    trust_remote_code: bool = False,
    rank: RankShape | None = None,
) -> PagedModel | GenerateModel:
    """Load a model folder.

    Args:
        folder: What `save_pretrained()` wrote: config.json and safetensors weights.
        dtype: "auto" (the checkpoint's own), a name, or a torch dtype.
        device: "auto", "cpu", "cuda", "cuda:N".
        attention_backend: "auto", or the name of one that must serve every layer.
        block_size: Tokens in a block of the cache that will be bound.
        path: "paged": packed batches over the paged cache; "generate": transformers' own generate(), one
            request at a time; "auto": paged where that is proven, and `describe()` says why not.
        replace: Whether layers may be replaced by faster ones that give the same; `describe()` lists them.
        trust_remote_code: Whether to run Python files that come with the folder.
        rank: Load this rank's part alone; all ranks load at the same time.

    Raises:
        ModelNotFoundError: No such folder, or no config.json in it.
        UnsupportedModelError: The architecture is unknown or can not run here, or not over several ranks; says why.
        WeightsError: Weights are missing, unexpected, truncated or of the wrong shape.
        ConfigError: A dtype, device or path that can not be.
        BackendError: The attention backend is unknown, or declined, or is forced on a model that goes to generate().
        ModelLoadError: The device does not take the model.
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

    def build() -> _Loaded:
        model = build_model(checkpoint, config, precision, where, trust_remote_code, rank)
        return _Loaded(model, checkpoint, precision, where, rank)

    def generate(loaded: _Loaded, reason: str) -> GenerateModel:
        if attention_backend != "auto":
            raise BackendError(
                f"attention_backend {attention_backend!r} can not be forced: the model runs through transformers' own "
                f"generate(), which has no attention backend of ours ({reason}); take attention_backend='auto'"
            )
        if rank is not None and rank.leftovers is not None:
            raise UnsupportedModelError(
                f"pipeline_parallel needs the packed path, and {checkpoint.model_type!r} runs through transformers' "
                f"own generate() ({reason}): take tensor_parallel instead"
            )
        return _generate_model(loaded, reason)

    loaded = build()
    if path == "generate":
        return generate(loaded, "as asked")
    if path == "auto" and find_image_features(loaded.model) and checkpoint.model_type not in PROVEN:
        return generate(loaded, f"the packed path of {checkpoint.model_type!r} models is not proven")
    try:
        profile = probe_attention(loaded.model, rank.leftovers if rank is not None else None)
    except UnsupportedModelError as error:
        if path == "paged":
            raise
        return generate(loaded, str(error))
    try:
        return _paged_model(loaded, profile, backends, block_size, replace)
    except UnsupportedModelError as error:
        if path == "paged":
            raise
        # Its layers were routed and replaced: generate() needs one as it was.
        return generate(build(), str(error))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A transformers model and what is known of it."""

    model: Any
    checkpoint: Checkpoint
    precision: Precision
    device: torch.device
    rank: RankShape | None

    @property
    def vocab_size(self) -> int:
        head = self.model.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not None:
            # Of a head that is dealt to ranks, the weight is a part.
            return int(getattr(head, "out_features", head.weight.shape[0]))
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
            "parallel": None if self.rank is None else self.rank.describe(),
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


def _paged_model(
    loaded: _Loaded,
    profile: AttentionProfile,
    backends: Sequence[AttentionBackend],
    block_size: int,
    replace: bool,
) -> PagedModel:
    """Route, replace, check against the plain model."""
    model, dtype = loaded.model, loaded.precision.dtype
    stage = StageLink.of(loaded.rank, model.get_input_embeddings().weight, loaded.device)
    expected = plain_logits(model, loaded.vocab_size, stage)
    layers = [
        PagedLayer(module, spec, choose_backend(backends, spec, dtype, loaded.device, block_size))
        for module, spec in profile.specs.items()
    ]
    text_attention.register()
    text_attention.route(model, text_attention.NAME)
    text_attention.open_door(model)
    replaced = _replace(model, layers) if replace else ()
    paged = _assemble(loaded, layers, profile.span_rule, replaced, stage)
    check_agreement(paged, expected, block_size, dtype)
    return paged


def _replace(model: Any, layers: Sequence[PagedLayer]) -> tuple[Replacement, ...]:
    """Faster layers go with the native attention: where that was not chosen, nothing else is native either."""
    native = frozenset(layer.module for layer in layers if layer.choice.backend.name == "native")
    if not native:
        return ()
    from mmserve.model.replace import replace_layers

    return replace_layers(model, {layer.module: layer.spec for layer in layers}, native)


def _assemble(
    loaded: _Loaded,
    layers: Sequence[PagedLayer],
    rule: SpanRule,
    replaced: Sequence[Replacement],
    stage: StageLink | None,
) -> PagedModel:
    features = find_image_features(loaded.model)
    embeddings = loaded.model.get_input_embeddings().weight
    return PagedModel(
        loaded.model,
        layers,
        ImageEncoder(features, embeddings.shape[1], embeddings.dtype, loaded.device) if features else None,
        rule,
        vocab_size=loaded.vocab_size,
        forbidden_token_ids=loaded.forbidden_token_ids,
        max_position=loaded.max_position,
        stage=stage,
        about=loaded.about(
            path="paged",
            path_reason="every text layer goes through the attention interface by a rule that backends know",
            both_ways=rule.__name__.replace("_", " "),
            attention=[_about_layer(index, layer) for index, layer in enumerate(layers)],
            replacements=[each.describe() for each in replaced],
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

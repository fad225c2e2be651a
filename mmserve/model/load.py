"""From a model folder to a model ready for packed batches."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mmserve.attention.interface import AttentionBackend
from mmserve.attention.registry import AUTO_ORDER, choose_backend, make_backend
from mmserve.errors import BackendError, ConfigError, ModelLoadError, UnsupportedModelError
from mmserve.kernels.library import status
from mmserve.model import text_attention
from mmserve.model.build import build_model
from mmserve.model.checkpoint import Checkpoint, open_checkpoint
from mmserve.model.generate_path import GenerateModel
from mmserve.model.image_rows import TILED, ImageEncoder, deepstack_layers, find_image_features
from mmserve.model.leftovers import Leftovers
from mmserve.model.loaded import LoadedModel
from mmserve.model.model_config import read_config, takes_images
from mmserve.model.paged import PagedLayer, PagedModel
from mmserve.model.precision import Precision, resolve_device, resolve_precision
from mmserve.model.probe import AttentionProfile, probe_attention
from mmserve.model.proven import PROVEN
from mmserve.model.refused import REFUSED
from mmserve.model.selfcheck import check_agreement, check_generates, plain_logits
from mmserve.model.spans import SpanRule
from mmserve.model.spread_encoding import SpreadEncoder
from mmserve.model.stage import StageLink
from mmserve.model.versions import LOADING, PACKED, require
from mmserve.parallel.rank import RankShape

if TYPE_CHECKING:
    from mmserve.model.replace import Replacement

__all__ = ["load_model"]

_PATHS = ("auto", "paged", "generate")
_log = logging.getLogger("mmserve.model")


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
    allow_pickled_weights: bool = False,
    ignore_weights: Sequence[str] = (),
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
        allow_pickled_weights: Whether torch pickles are read, as tensors only, where there are no safetensors.
        ignore_weights: Names of tensors in the weight files that no model need have a place for: `begins*`,
            `*ends`, `*holds*`, or a whole name. `describe()` lists those that were left over.
        rank: Load this rank's part alone; all ranks load at the same time.

    Raises:
        ModelNotFoundError: No such folder, or no config.json in it.
        UnsupportedModelError: The architecture is unknown or can not run here, or not over several ranks; says why.
        WeightsError: Weights are missing, unexpected, truncated or of the wrong shape.
        ConfigError: A dtype, device, path or pattern that can not be.
        BackendError: The attention backend is unknown, or declined, or is forced on a model that goes to generate().
        ModelLoadError: The device does not take the model.
    """
    if path not in _PATHS:
        raise ConfigError(f"unknown path {path!r}; known: {', '.join(_PATHS)}")
    names = AUTO_ORDER if attention_backend == "auto" else (attention_backend,)
    backends = tuple(make_backend(name) for name in names)
    leftovers = Leftovers.parse(ignore_weights)
    source = _open(folder, dtype, device, trust_remote_code, allow_pickled_weights, leftovers)
    return _serve(replace_fields(source, rank=rank), _Wish(path, backends, attention_backend, block_size, replace))


@dataclass(frozen=True, slots=True)
class _Wish:
    """How a caller wants a model to run."""

    path: str
    backends: tuple[AttentionBackend, ...]
    backend_name: str
    block_size: int
    replace: bool


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint that was looked at, from which a model can be built any number of times."""

    checkpoint: Checkpoint
    config: Any
    precision: Precision
    device: torch.device
    trust_remote_code: bool
    leftovers: Leftovers
    rank: RankShape | None = None

    def build(self) -> LoadedModel:
        """A new model, every weight loaded, with a config of its own: routing a model's attention changes it."""
        built = build_model(
            self.checkpoint,
            copy.deepcopy(self.config),
            self.precision,
            self.device,
            trust_remote_code=self.trust_remote_code,
            leftovers=self.leftovers,
            rank=self.rank,
        )
        return LoadedModel(built.model, self.checkpoint, self.precision, self.device, built.left_over, self.rank)


def _open(
    folder: Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool,
    allow_pickled: bool,
    leftovers: Leftovers,
) -> _Source:
    """All that can be known, and refused, before a weight is read."""
    require(LOADING)
    checkpoint = open_checkpoint(folder, allow_pickled=allow_pickled)
    if checkpoint.model_type in REFUSED:
        raise UnsupportedModelError(
            f"{checkpoint.model_type!r} models are not served: {REFUSED[checkpoint.model_type]}"
        )
    config = read_config(checkpoint, trust_remote_code)
    where = resolve_device(device)
    precision = resolve_precision(dtype, checkpoint.tensors, config, where)
    return _Source(checkpoint, config, precision, where, trust_remote_code, leftovers)


def _serve(source: _Source, wish: _Wish) -> PagedModel | GenerateModel:
    """On the paged path if that is wished or proven, and possible; else through generate(), with the reason."""
    loaded = source.build()
    reason = _not_to_be_paged(loaded, wish)
    if reason is not None:
        return _generate_model(loaded, wish, reason)
    require(PACKED)
    try:
        profile = probe_attention(loaded.model, None if loaded.rank is None else loaded.rank.leftovers)
    except UnsupportedModelError as error:
        if wish.path == "paged":
            raise
        return _generate_model(loaded, wish, str(error))
    try:
        return _paged_model(loaded, profile, wish)
    except UnsupportedModelError as error:
        if wish.path == "paged":
            raise
        reason = str(error)
    # Its layers were routed and replaced, and generate() needs one as it was. Two would not fit.
    del loaded, profile
    gc.collect()
    return _generate_model(source.build(), wish, reason)


def _not_to_be_paged(loaded: LoadedModel, wish: _Wish) -> str | None:
    """Why this model goes to generate() without a look at its layers, or None."""
    if wish.path == "generate":
        return "as asked"
    name = loaded.checkpoint.model_type
    if wish.path == "auto" and name not in PROVEN and _reads_images(loaded):
        return f"the packed path of {name!r} models is not proven"
    return None


def _reads_images(loaded: LoadedModel) -> bool:
    """Whether it is an image+text model, or code that came along and encodes images."""
    return takes_images(loaded.model.config) or find_image_features(loaded.model) is not None


def _generate_model(loaded: LoadedModel, wish: _Wish, reason: str) -> GenerateModel:
    if wish.backend_name != "auto":
        raise BackendError(
            f"attention_backend {wish.backend_name!r} can not be forced: the model runs through transformers' own "
            f"generate(), which has no attention backend of ours ({reason}); take attention_backend='auto'"
        )
    if loaded.rank is not None and loaded.rank.leftovers is not None:
        raise UnsupportedModelError(
            f"pipeline_parallel needs the packed path, and {loaded.checkpoint.model_type!r} runs through transformers' "
            f"own generate() ({reason}): take tensor_parallel instead"
        )
    if not loaded.model.can_generate():
        raise UnsupportedModelError(f"{type(loaded.model).__name__} can not generate text")
    if not _reads_images(loaded):
        check_generates(loaded.model, loaded.vocab_size)
    return GenerateModel(
        loaded.model,
        vocab_size=loaded.vocab_size,
        forbidden_token_ids=loaded.forbidden_token_ids,
        max_position=loaded.max_position,
        about=loaded.about(path="generate", path_reason=reason, attention=[], replacements=[]),
    )


def _paged_model(loaded: LoadedModel, profile: AttentionProfile, wish: _Wish) -> PagedModel:
    """Route, replace, check against the plain model."""
    model, dtype = loaded.model, loaded.precision.dtype
    stage = StageLink.of(loaded.rank, model.get_input_embeddings().weight, loaded.device)
    expected = _plain_logits(loaded, stage)
    layers = [
        PagedLayer(module, spec, choose_backend(wish.backends, spec, dtype, loaded.device, wish.block_size))
        for module, spec in profile.specs.items()
    ]
    text_attention.register()
    text_attention.route(model, text_attention.NAME)
    text_attention.open_door(model)
    replaced = _replace(model, layers, wish)
    paged = _assemble(loaded, layers, profile.span_rule, replaced, stage)
    paged.share_cache_groups()
    trial = check_agreement(paged, expected, wish.block_size, dtype)
    if wish.replace and stage is None:
        # On ranks that share layers all see the same bits, and decide alike.
        paged.skip_outer_modules(trial.batches, trial.logits)
    return paged


def _plain_logits(loaded: LoadedModel, stage: StageLink | None) -> torch.Tensor:
    """The trial text's logits from the model as it is.

    Raises:
        ModelLoadError: It does not run, and a sound model of its family does.
        UnsupportedModelError: It does not run, which models of its family may not.
    """
    try:
        return plain_logits(loaded.model, loaded.vocab_size, stage)
    except UnsupportedModelError as error:
        if loaded.checkpoint.model_type in PROVEN:
            raise ModelLoadError(
                f"{error}; models of this kind do, so its config or its weights are damaged"
            ) from error
        raise


def _replace(model: Any, layers: Sequence[PagedLayer], wish: _Wish) -> tuple[Replacement, ...]:
    """Replace what can be, and log each kind: what was replaced, and what was left alone and why."""
    done = _replaced(model, layers, wish)
    for each in done:
        _log.info("replaced %d: %s%s", each.count, each.what, f" ({each.declined})" if each.declined else "")
    return done


def _replaced(model: Any, layers: Sequence[PagedLayer], wish: _Wish) -> tuple[Replacement, ...]:
    """Faster layers go with the native attention: where that was not chosen, nothing else is native either."""
    from mmserve.model.replace import Replacement, replace_layers

    if not wish.replace:
        return (Replacement("layers", 0, "switched off"),)
    native = frozenset(layer.module for layer in layers if layer.choice.backend.name == "native")
    if not native:
        return (Replacement("layers", 0, "the native attention backend serves none of the layers"),)
    return replace_layers(model, {layer.module: layer.spec for layer in layers}, native)


def _assemble(
    loaded: LoadedModel,
    layers: Sequence[PagedLayer],
    rule: SpanRule,
    replaced: Sequence[Replacement],
    stage: StageLink | None,
) -> PagedModel:
    return PagedModel(
        loaded.model,
        layers,
        _image_encoder(loaded),
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
            kernels=_about_kernels(layers),
            replacements=[each.describe() for each in replaced],
        ),
    )


def _about_kernels(layers: Sequence[PagedLayer]) -> Mapping[str, object] | None:
    """Which of the library's instruction sets runs, where it is from and what it misses; None where it is not used."""
    return status().describe() if any(layer.choice.backend.name == "native" for layer in layers) else None


def _image_encoder(loaded: LoadedModel) -> ImageEncoder | SpreadEncoder | None:
    """Over the ranks of the first stage that share its layers; None for a model that takes no images."""
    features = find_image_features(loaded.model)
    if features is None:
        return None
    table = loaded.model.get_input_embeddings().weight
    layered = deepstack_layers(loaded.model.config)
    # A GPU is quicker with all tiles of a picture at once; a CPU is not, and keeps less beside them one by one.
    tiled = loaded.device.type == "cpu" and loaded.model.config.model_type in TILED
    encoder = ImageEncoder(features, table.shape[1], table.dtype, loaded.device, layered, tiled)
    rank = loaded.rank
    return encoder if rank is None or rank.tensor.size == 1 else SpreadEncoder(encoder, rank.tensor)


def _about_layer(index: int, layer: PagedLayer) -> Mapping[str, object]:
    return {
        "layer": index,
        "backend": layer.choice.backend.name,
        "cache": layer.spec.layer,
        "window": layer.spec.window,
        "chunk": layer.spec.chunk,
        "declined": list(layer.choice.declined),
    }

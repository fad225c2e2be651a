"""The reference path: any model that `generate()` runs, one request at a time, behind the same seam.

For architectures that can not be packed (encoder-decoders, cross attention, recurrent state). Each
request runs transformers' own `generate()` in a thread of its own, which stops at every token: it hands
out its logits and waits to be told which token was chosen.

    forward(batch)          thread of request a: generate(...)
        resume(a, token) ->     takes the token, runs the model once
        logits           <-     logits processor: hand out, wait

So its cache, its masks, its encoder and its positions are generate()'s own, token for token. Only one
thread runs at a time. What such models keep on themselves between steps (`rope_deltas`) is put aside
with the request whenever another one runs.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mmserve.attention.interface import LayerCache
from mmserve.errors import EngineError, InputError, ModelOutputError
from mmserve.model.generate_inputs import generate_inputs
from mmserve.model.interface import (
    CacheSpec,
    ImageRows,
    LayerCacheSpec,
    PackedBatch,
    PromptPlan,
    SequenceInput,
)
from mmserve.model.known_ids import check_known_ids
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["GenerateModel", "take_over_generation"]

_KEPT_ON_MODEL = "rope_deltas"
_ENDLESS = 1_000_000
_TAKEN_OVER = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_eos_token_id",
    "guidance_scale",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "prompt_lookup_num_tokens",
    "repetition_penalty",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "watermarking_config",
)
"""Fields of a generation config that are set to None: sampling is the engine's."""


class GenerateModel:
    """The `Model` of `mmserve.model.interface` over `generate()`."""

    needs_sequences = True

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        forbidden_token_ids: tuple[int, ...],
        max_position: int | None,
        about: Mapping[str, object],
    ) -> None:
        self.vocab_size = vocab_size
        self.forbidden_token_ids = forbidden_token_ids
        self.max_position = max_position
        take_over_generation(model)
        self._model = model
        self._about = about
        self._running: dict[str, _Generation] = {}

    def cache_spec(self) -> CacheSpec:
        """The least there can be: blocks are counted by the engine, in the size of what is kept here."""
        return CacheSpec(
            layers=(LayerCacheSpec(1, 1, 1),),
            dtype=torch.float32,
            kept_elsewhere=_bytes_a_token(self._model.config, self._model.get_input_embeddings().weight.dtype),
        )

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Not used: each request has a cache of its own."""

    def unbind_cache(self, caches: Sequence[LayerCache]) -> None:
        """Nothing was bound."""

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        """The whole prompt as one span: it is computed in one piece and never met by a prefix hit.

        Raises:
            InputError: The prompt is empty, holds an id that is not in the embedding table, or an image is given as
                features.
        """
        if not prompt.token_ids:
            raise InputError("the prompt is empty")
        if any(image.features is not None for image in prompt.images):
            raise InputError(
                "this model runs through generate(), which encodes pictures itself: give the picture, not its features"
            )
        table = self._model.get_input_embeddings()
        check_known_ids(prompt, getattr(table, "num_embeddings", table.weight.shape[0]))
        length = len(prompt.token_ids)
        return PromptPlan(positions=torch.arange(length)[None], spans=((0, length),))

    def encode(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        """Rows of no width: the model encodes a prompt's images itself, with the prompt."""
        return [ImageRows(rows=torch.empty(image.range.num_embeds, 0)) for image in images]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits float32 [M, V], one sequence after the other."""
        lengths = batch.attention.query_lens
        if len(batch.sequences) != len(lengths):
            raise EngineError("this model needs PackedBatch.sequences, one entry a sequence")
        wanted = set(batch.logit_indices.tolist())
        rows, offset = [], 0
        for sequence, length in zip(batch.sequences, lengths, strict=True):
            logits = self._advance(sequence, batch.token_ids[offset : offset + length].tolist())
            offset += length
            if offset - 1 in wanted:
                rows.append(logits)
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def release(self, request_ids: Sequence[str]) -> None:
        """Stop the threads of these requests and let go of their caches."""
        for request_id in request_ids:
            generation = self._running.pop(request_id, None)
            if generation is not None:
                generation.stop()

    def describe(self) -> Mapping[str, object]:
        """What was loaded, and which paths were chosen and why; JSON-friendly."""
        return self._about

    def _advance(self, sequence: SequenceInput, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V] after the last of `tokens`; a prompt's own tokens go in at once, later ones one by one."""
        if sequence.start == 0:
            self.release([sequence.request_id])
            self._running[sequence.request_id] = _Generation(self._model, sequence.prompt)
            tokens = tokens[len(sequence.prompt.token_ids) :]
            logits = self._running[sequence.request_id].first()
        elif sequence.request_id not in self._running:
            raise EngineError(f"request {sequence.request_id!r} goes on, but its state is not here")
        generation = self._running[sequence.request_id]
        for token in tokens:
            logits = generation.resume(token)
        return logits


def _bytes_a_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token by the text config's numbers; state of another kind counts as if it were these."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or (getattr(text, "hidden_size", None) or heads) // heads
    layers = getattr(text, "num_hidden_layers", None) or 1
    numbers = [n if isinstance(n, int) else max(n, default=1) for n in (layers, kv_heads, size)]
    return 2 * numbers[0] * numbers[1] * numbers[2] * dtype.itemsize


class _Stopped(BaseException):
    """Ends a generation from inside its logits processor; not an error."""


class _Generation:
    """One `generate()` call, held between two tokens."""

    def __init__(self, model: Any, prompt: ProcessedPrompt) -> None:
        self._model = model
        self._prompt = prompt
        self._owners = [module for module in model.modules() if hasattr(module, _KEPT_ON_MODEL)]
        self._kept: list[Any] = [None] * len(self._owners)
        self._to_thread: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._from_thread: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self._relay = _Relay(self._hand_out)
        self._thread = threading.Thread(target=self._run, name="mmserve-generate", daemon=True)

    def first(self) -> torch.Tensor:
        """Start, and return the logits [V] of the first new token."""
        return self._switch(self._thread.start)

    def resume(self, token: int) -> torch.Tensor:
        """Go on with `token`, and return the logits [V] of the one after it."""
        return self._switch(lambda: self._to_thread.put(token))

    def stop(self) -> None:
        """End the thread; it lets go of its cache."""
        if self._thread.is_alive():
            self._to_thread.put(None)
            self._thread.join()

    def _switch(self, wake: Any) -> torch.Tensor:
        for owner, kept in zip(self._owners, self._kept, strict=True):
            setattr(owner, _KEPT_ON_MODEL, kept)
        wake()
        result = self._from_thread.get()
        self._kept = [getattr(owner, _KEPT_ON_MODEL) for owner in self._owners]
        if isinstance(result, BaseException):
            raise ModelOutputError(f"generate() failed: {type(result).__name__}: {result}") from result
        return result

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._model.generate(
                **generate_inputs(self._model, self._prompt),
                generation_config=GenerationConfig(max_new_tokens=_ENDLESS),
                logits_processor=LogitsProcessorList([self._relay]),
                stopping_criteria=StoppingCriteriaList([_Heard(self._relay)]),
            )
        except _Stopped:
            return
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits for logits
            self._from_thread.put(error)
        else:
            self._from_thread.put(RuntimeError(f"it ended by itself after {_ENDLESS:,} tokens"))

    def _hand_out(self, logits: torch.Tensor) -> int:
        self._from_thread.put(logits)
        token = self._to_thread.get()
        if token is None:
            raise _Stopped
        return token


class _Relay(LogitsProcessor):
    """Shows each step's logits and makes the answer the only choice there is."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask
        self.called = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.called = True
        token = self._ask(scores[0].clone())
        chosen = torch.full_like(scores, float("-inf"))
        chosen[0, token] = 0.0
        return chosen


class _Heard(StoppingCriteria):
    """Ends a `generate()` that drops the relay, as Janus's own does for text: it would go on unheard."""

    def __init__(self, relay: _Relay) -> None:
        self._relay = relay

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self._relay.called:
            raise RuntimeError("this model's generate() takes no logits processor: it can only run on the paged path")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def take_over_generation(model: Any) -> None:
    """Give the model, and each model in it, a generation config that leaves everything to the caller's sampler.

    Passing one to `generate()` is not enough: what is None there is filled from the model's own, so that a
    checkpoint's repetition penalty would change the logits, and its end token would end a generation.
    """
    for module in model.modules():
        own = getattr(module, "generation_config", None)
        if isinstance(own, GenerationConfig):
            module.generation_config = _plain_config(own)


def _plain_config(own: GenerationConfig) -> GenerationConfig:
    """`own` with everything off that a sampler of ours decides, or that ends an answer."""
    config = copy.deepcopy(own)
    config.update(do_sample=False, num_beams=1, num_return_sequences=1, **dict.fromkeys(_TAKEN_OVER))
    return config

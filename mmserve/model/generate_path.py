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
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

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
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["GenerateModel"]

_KEPT_ON_MODEL = "rope_deltas"
_ENDLESS = 1_000_000


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

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        """The whole prompt as one span: it is computed in one piece and never met by a prefix hit."""
        if not prompt.token_ids:
            raise InputError("the prompt is empty")
        if any(image.features is not None for image in prompt.images):
            raise InputError(
                "this model runs through generate(), which encodes pictures itself: give the picture, not its features"
            )
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
                generation_config=_plain_config(self._model.generation_config),
                logits_processor=LogitsProcessorList([_Relay(self._hand_out)]),
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

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._ask(scores[0].clone())
        chosen = torch.full_like(scores, float("-inf"))
        chosen[0, token] = 0.0
        return chosen


def _plain_config(own: GenerationConfig) -> GenerationConfig:
    """The model's generation config with everything off that a sampler of ours decides, or that ends it."""
    config = copy.deepcopy(own)
    config.update(
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_k=None,
        top_p=None,
        repetition_penalty=None,
        no_repeat_ngram_size=None,
        bad_words_ids=None,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        forced_eos_token_id=None,
        eos_token_id=None,
        min_length=None,
        min_new_tokens=None,
        max_length=None,
        max_new_tokens=_ENDLESS,
        return_dict_in_generate=False,
    )
    return config

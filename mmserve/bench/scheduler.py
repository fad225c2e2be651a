"""Host time of a step apart from the model: what the engine itself costs while sequences decode.

A model that computes nothing notes when its forward begins and ends. From one end to the next beginning lies
all that the engine does: sample, update, detokenise, deliver, schedule, pack. Measured with all sequences
decoding, for short and long prompts and with an empty and a full queue behind them, since neither may matter. Time is
processor time of the engine's thread, so a busy machine does not change it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from mmserve.attention.interface import LayerCache
from mmserve.cache.block_pool import BlockPool
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.model.interface import CacheSpec, ImageRows, LayerCacheSpec, PackedBatch, PromptPlan
from mmserve.testing import ByteTokenizer, mock_prompt
from mmserve.types import SamplingParams
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["ClockModel", "run"]

_LONG_ANSWER = 20_000
"""Tokens of every answer: more than there are steps, so that nobody finishes while others are measured."""


def run(
    num_seqs: int = 256,
    num_steps: int = 50,
    prompt_lengths: Sequence[int] = (16, 2048),
    queue_lengths: Sequence[int] = (0, 2000),
    num_blocks: int = 100_000,
) -> dict[str, object]:
    """Measure.

    Args:
        num_seqs: Sequences decoding at once.
        num_steps: Steps measured a case.
        prompt_lengths: Tokens of every prompt, a case each.
        queue_lengths: Requests waiting behind the running ones, a case each.
        num_blocks: Blocks allocated and freed, then ten times as many.

    Returns:
        `cases`: median microseconds of a step a running sequence, by prompt and queue length;
        `blocks`: nanoseconds of allocating and freeing one block, in a pool of `num_blocks` and of ten times that.
    """
    cases = []
    for prompt, queue in itertools.product(prompt_lengths, queue_lengths):
        seconds = _host_seconds(num_seqs, num_steps, prompt, queue)
        cases.append({"prompt_tokens": prompt, "queue": queue, "us_per_sequence": round(seconds / num_seqs * 1e6, 2)})
    pools = [{"blocks": n, "ns_per_block": round(_pool_seconds(n) / n * 1e9)} for n in (num_blocks, 10 * num_blocks)]
    return {"num_seqs": num_seqs, "steps": num_steps, "cases": cases, "blocks": pools}


def _host_seconds(num_seqs: int, num_steps: int, prompt_length: int, queue_length: int) -> float:
    """Median seconds between two forwards in which all of `num_seqs` sequences decode."""
    block_size = 64
    per_seq = -(-(prompt_length + _LONG_ANSWER) // block_size)
    model = ClockModel()
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_seqs * per_seq,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_queue=num_seqs + queue_length,
        enable_prefix_caching=False,
    )
    engine = Engine(model, ByteTokenizer(), config, identity="bench")
    try:
        sampling = SamplingParams(max_tokens=_LONG_ANSWER)
        prompt = mock_prompt([65] * prompt_length)
        for _ in range(num_seqs + queue_length):
            engine.submit(prompt, sampling)
        model.forget()
        model.wait_for(num_seqs, num_steps)
    finally:
        engine.close()
    return statistics.median(model.gaps(num_seqs)[:num_steps])


def _pool_seconds(num_blocks: int) -> float:
    """Seconds to allocate every block and free it again, one at a time."""
    pool = BlockPool(num_blocks)
    began = time.perf_counter()
    blocks = [pool.allocate(1)[0] for _ in range(num_blocks)]
    for block in blocks:
        pool.release((block,))
    return time.perf_counter() - began


class ClockModel:
    """Computes nothing; knows when it was called."""

    vocab_size: int = 259
    forbidden_token_ids: tuple[int, ...] = (258,)
    max_position: int | None = None
    needs_sequences: bool = False

    def __init__(self) -> None:
        self._calls: list[tuple[float, float, int]] = []

    def cache_spec(self) -> CacheSpec:
        return CacheSpec((LayerCacheSpec(1, 1, 1),), torch.float32)

    def bind_cache(self, caches: Sequence[LayerCache]) -> None:
        pass

    def unbind_cache(self, caches: Sequence[LayerCache]) -> None:
        pass

    def plan(self, prompt: ProcessedPrompt) -> PromptPlan:
        return PromptPlan(torch.arange(len(prompt.token_ids))[None])

    def encode(self, images: Sequence[ImageItem]) -> list[ImageRows | Exception]:
        return [RuntimeError("no images here") for _ in images]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        began = time.thread_time()
        logits = torch.zeros(len(batch.logit_indices), self.vocab_size)
        logits[:, 65] = 1.0
        decoding = len(batch.token_ids) if len(batch.token_ids) == len(batch.logit_indices) else 0
        self._calls.append((began, time.thread_time(), decoding))
        return logits

    def release(self, request_ids: Sequence[str]) -> None:
        pass

    def describe(self) -> Mapping[str, object]:
        return {}

    def forget(self) -> None:
        """Measure from here on."""
        self._calls = []

    def gaps(self, num_seqs: int) -> list[float]:
        """Seconds from the end of one forward to the beginning of the next, both with all sequences decoding."""
        pairs = zip(self._calls, self._calls[1:], strict=False)
        return [after[0] - before[1] for before, after in pairs if before[2] == after[2] == num_seqs]

    def wait_for(self, num_seqs: int, num_steps: int) -> None:
        """Until that many steps were measured."""
        while len(self.gaps(num_seqs)) < num_steps:
            time.sleep(0.1)

"""What the ranks of an engine send for each token that is computed, counted where it is sent, and on paper.

Counted: an engine over several ranks computes prompts of n and of 2 n tokens, and the groups' own counts on rank 0 are
read before and after. The difference of the two is n tokens; what is left of the first is what an answer costs.

On paper, for a plan of the Llama kind (W features a token, L layers on the stage, V ids, n ranks that share them)::

    tensor      token     2 L + 1 sums of a row of W, each 2 (n - 1) / n of it
                answer    this rank's part of V logits to each of n - 1 others
    pipeline    token     a row of W to the next stage
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.assembly import load_processor
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.model import load_model
from mmserve.model.checkpoint import open_checkpoint
from mmserve.model.model_config import read_config
from mmserve.model.precision import resolve_device
from mmserve.parallel.layout import Layout
from mmserve.parallel.rank import RankShape
from mmserve.parallel.workers.driver import start_team
from mmserve.types import SamplingParams
from processors.types import ProcessedPrompt

__all__ = ["count_traffic"]

_BLOCK_SIZE = 16
_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class _Sent:
    """Bytes and exchanges of one rank so far."""

    tensor: int
    pipeline: int
    calls: int


def count_traffic(folder: Path, layout: Layout, *, dtype: str, num_tokens: int) -> dict[str, Any]:
    """Run prompts over `layout` on the CPU, and count.

    Args:
        folder: The model.
        layout: Of the ranks.
        dtype: As in `MMPipeline`.
        num_tokens: n above.

    Returns:
        {"tensor_parallel", "pipeline_parallel", "exchanges_per_step", "bytes_per_token", "bytes_per_token_on_paper",
        "bytes_per_answer", "bytes_per_answer_on_paper"}; of rank 0.
    """
    config = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=2 * num_tokens // _BLOCK_SIZE + 4,
        max_num_batched_tokens=2 * num_tokens,
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        enable_prefix_caching=False,
    )
    device = resolve_device("cpu")
    team = start_team(
        str(folder),
        layout,
        dtype=dtype,
        device=device,
        attention_backend="auto",
        block_size=_BLOCK_SIZE,
        trust_remote_code=False,
        plan=None,
        timeout=_TIMEOUT,
    )
    try:
        model = load_model(folder, dtype=dtype, device=device, block_size=_BLOCK_SIZE, rank=team.rank)
        tokenizer = load_processor(folder, config).tokenizer
        engine = Engine(model, tokenizer, config, identity="bench", team=team)
    except BaseException:
        team.kill()
        raise
    with closing(engine):
        once, twice = (_sent_for(engine, team.rank, count) for count in (num_tokens, 2 * num_tokens))
    per_token = (twice.tensor + twice.pipeline - once.tensor - once.pipeline) / num_tokens
    return {
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "exchanges_per_step": once.calls,
        "bytes_per_token": per_token,
        "bytes_per_answer": once.tensor + once.pipeline - per_token * num_tokens,
        **_on_paper(folder, str(model.describe()["dtype"]), team.rank),
    }


def _sent_for(engine: Engine, rank: RankShape, num_tokens: int) -> _Sent:
    before = _so_far(rank)
    prompt = ProcessedPrompt((1,) * num_tokens)
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)).result(_TIMEOUT)
    after = _so_far(rank)
    return _Sent(after.tensor - before.tensor, after.pipeline - before.pipeline, after.calls - before.calls)


def _so_far(rank: RankShape) -> _Sent:
    tensor, pipeline = rank.tensor.traffic, rank.pipeline.traffic
    return _Sent(tensor.sent_bytes, pipeline.sent_bytes, tensor.calls + pipeline.calls)


def _on_paper(folder: Path, dtype: str, rank: RankShape) -> Mapping[str, float]:
    import torch

    text = read_config(open_checkpoint(folder), False).get_text_config(decoder=True)
    size, ranks = getattr(torch, dtype).itemsize, rank.tensor.size
    row = text.hidden_size * size
    own = rank.leftovers.layers if rank.leftovers is not None else range(text.num_hidden_layers)
    sums = 2 * (own.stop - own.start) + 1
    token = sums * row * 2 * (ranks - 1) / ranks + row * (rank.pipeline.size > 1)
    answer = -(-text.vocab_size // ranks) * size * (ranks - 1) if rank.pipeline.size == 1 else 0
    return {"bytes_per_token_on_paper": token, "bytes_per_answer_on_paper": answer}

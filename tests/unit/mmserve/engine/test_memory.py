"""Where the cache's size comes from, and that no size is a MemoryError."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mmserve.assembly import load_processor, worst_prompt
from mmserve.config import EngineConfig
from mmserve.demo import demo_model_folder
from mmserve.engine.core import Engine
from mmserve.engine.memory import device_memory, plan_memory
from mmserve.engine.sizing import resolve_limits
from mmserve.engine.trial import RankTrial, Trial, Tried
from mmserve.errors import ConfigError
from mmserve.model import load_model
from mmserve.model.interface import CacheSpec, LayerCacheSpec, PackedBatch
from mmserve.testing import ByteTokenizer, MockModel

CPU = torch.device("cpu")


def make(**options: Any) -> Engine:
    return Engine(MockModel(max_position=512), ByteTokenizer(), EngineConfig(**options), identity="m")


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 2**60},
        {"num_blocks": 10**30},
        {"kv_cache_memory": 2**62},
        {"num_blocks": 10**12, "block_size": 1024},
    ],
)
def test_a_cache_larger_than_the_machine_is_our_own_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"is more than the [0-9,]+ bytes of memory on cpu: give a smaller"):
        make(**options)


def test_describe_says_where_the_size_comes_from() -> None:
    for options, rule in (({"num_blocks": 8}, "num_blocks"), ({"kv_cache_memory": 4096}, "kv_cache_memory")):
        engine = make(**options)
        engine.close()
        assert engine.describe()["memory"]["rule"] == rule
    plan = plan_memory(EngineConfig(), MockModel(), CPU, None)
    assert plan.rule.startswith("default: 1 GiB")
    assert plan.kv_cache == min(2**30, device_memory(CPU) // 4)


def test_ranks_that_share_a_memory_share_the_default_and_the_bound() -> None:
    total = device_memory(CPU)
    plan = plan_memory(EngineConfig(), MockModel(), CPU, None, 64)
    assert plan.kv_cache == min(2**30, total // 256)
    assert plan.rule == "default: 1 GiB, at most a quarter of the memory for the 64 ranks that share it"
    config = EngineConfig(kv_cache_memory=total // 2)
    assert plan_memory(config, MockModel(), CPU, None, 2).kv_cache == total // 2
    with pytest.raises(ConfigError, match=r"\(kv_cache_memory\) in each of 3 ranks is more than"):
        plan_memory(config, MockModel(), CPU, None, 3)


def test_the_size_is_given_once() -> None:
    with pytest.raises(ConfigError, match="one of these, not by num_blocks and memory_budget"):
        EngineConfig(num_blocks=5, memory_budget=10**9)


def test_a_budget_that_leaves_nothing_says_the_numbers() -> None:
    pattern = (
        r"memory_budget 1,024 leaves 0 bytes.*two blocks take 4,096: what is loaded takes ([0-9,]+), the worst step "
        r"\(510 tokens, 0 images\) ([0-9,]+), image caches ([0-9,]+); give at least ([0-9,]+), or a smaller max_num_b"
    )
    with pytest.raises(ConfigError, match=pattern) as caught:
        make(memory_budget=1024, max_num_seqs=2)
    found = re.search(pattern, str(caught.value))
    assert found is not None
    loaded, step, images, least = (int(number.replace(",", "")) for number in found.groups())
    assert loaded + step + images + 4096 == least
    make(memory_budget=least + 2**28, max_num_seqs=2).close()  # the process grows a little between the two


def test_a_budget_is_what_is_loaded_the_worst_step_the_image_caches_and_the_cache() -> None:
    config = EngineConfig(
        memory_budget=12 * 2**30,
        max_num_batched_tokens=300,
        max_images_per_step=2,
        max_num_seqs=4,
        encoder_cache_memory=2**20,
        processor_cache_memory=2**20,
    )
    folder = demo_model_folder()
    processor = load_processor(folder, config)
    model = load_model(folder, dtype="float32", device="cpu", block_size=64)
    prompts = []

    def worst(num_tokens: int) -> Any:
        prompts.append(worst_prompt(processor, num_tokens, config.max_images_per_step))
        return prompts[-1]

    plan = plan_memory(config, model, CPU, worst)
    processor.close()
    (prompt,) = prompts
    assert len(prompt.token_ids) == max(300, len(prompt.images) * processor.max_image_tokens())
    assert 1 <= len(prompt.images) <= 2
    assert all(image.range.num_embeds == processor.largest_image().num_embeds for image in prompt.images)
    assert plan.loaded is not None
    assert plan.step is not None
    assert plan.step > 0
    assert plan.kv_cache + plan.loaded + plan.step + 2 * 2**20 == plan.budget == 12 * 2**30
    # Weights in float32 were in use, if nothing else.
    assert plan.loaded > 4 * sum(p.numel() for p in model._model.parameters())


class Ranks:
    """Two further ranks, of which one keeps twice the cache and the other sees no images."""

    samples_here = False
    wide = CacheSpec((LayerCacheSpec(4, 64, 64),) * 2, torch.float32)
    narrow = CacheSpec((LayerCacheSpec(1, 64, 64),) * 2, torch.float32)

    def __init__(self, *tried: Tried) -> None:
        self.tried = tried

    def try_step(self, trial: Trial, own: Any) -> list[RankTrial]:
        first, second = self.tried
        return [own(), RankTrial(1, self.wide, True, first), RankTrial(2, self.narrow, False, second)]


@pytest.mark.parametrize("tight", [1, 2])
def test_over_ranks_the_one_with_the_least_room_decides(tight: int) -> None:
    budget, mib = 16 * 2**30, 2**20
    config = EngineConfig(
        memory_budget=budget, max_num_seqs=2, encoder_cache_memory=mib, processor_cache_memory=mib, block_size=16
    )
    tried = [Tried(100 * mib, mib), Tried(100 * mib, mib)]
    tried[tight - 1] = Tried(budget - 12 * mib, mib)
    ranks: Any = Ranks(*tried)
    plan = plan_memory(config, MockModel(max_position=512), CPU, None, 1, ranks)
    # Rank 1 keeps rows of images; processed ones are kept by rank 0 alone.
    rest = 11 * mib - (mib if tight == 1 else 0)
    assert (plan.loaded, plan.step, plan.images) == (budget - 12 * mib, mib, mib if tight == 1 else 0)
    assert f"on rank {tight} it leaves the fewest blocks" in plan.rule
    own = ranks.wide if tight == 1 else ranks.narrow
    limits = resolve_limits(config, ranks.wide, 512, plan.kv_cache)
    assert limits.num_blocks == rest // (16 * own.slot_bytes())


def test_budgets_of_ranks_that_share_a_memory_have_to_fit_it_together() -> None:
    total = device_memory(CPU)
    config = EngineConfig(memory_budget=total // 2)
    with pytest.raises(ConfigError, match=r"for each of 3 ranks is more than .* that they share: give at most"):
        plan_memory(config, MockModel(), CPU, None, 3)


def test_a_rank_with_no_room_is_named() -> None:
    ranks: Any = Ranks(Tried(2**34, 5), Tried(2**20, 5))
    config = EngineConfig(memory_budget=2**34, max_num_seqs=2, encoder_cache_memory=0)
    with pytest.raises(ConfigError, match=r"leaves 0 bytes for keys and values on rank 1, and two blocks take"):
        plan_memory(config, MockModel(max_position=512), CPU, None, 1, ranks)


def test_a_cache_never_written_is_not_taken_for_memory_that_the_step_had() -> None:
    """The trial's cache is 256 MB, of which the step writes next to nothing."""

    class Greedy(MockModel):
        def cache_spec(self) -> CacheSpec:
            return CacheSpec((LayerCacheSpec(1, 2**15, 2**15),) * 2, torch.float64)

        def forward(self, batch: PackedBatch) -> torch.Tensor:
            taken.append(torch.ones(2**26, dtype=torch.uint8))
            taken.clear()
            return torch.zeros(len(batch.logit_indices), self.vocab_size)

    taken: list[torch.Tensor] = []
    config = EngineConfig(memory_budget=2**33, max_num_batched_tokens=100, max_num_seqs=2, block_size=16)
    plan = plan_memory(config, Greedy(max_position=512), CPU, None)
    assert plan.step is not None
    assert 0.9 * 2**26 < plan.step < 2**27  # the kernel counts in batches

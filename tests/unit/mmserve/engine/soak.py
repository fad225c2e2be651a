"""Thousands of mixed requests, each as if it were alone: `make soak COUNT=2000 SEED=1`.

A round makes an engine of random tiny sizes on the mock model and asks it 50 things at once: pictures of all sizes,
shared, repeated, broken; prompts with common beginnings, some with NaN in them; several answers, seeds, every sampling
option; aborts before, during and after; deadlines. What an engine without caches says to one at a time is the right
answer. `--demo 40` asks the demo model in float32 in the same manner.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmserve.cache.prefix_index import PrefixIndex
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine, RequestHandle
from mmserve.errors import DeadlineExceeded, ModelOutputError, RequestAborted, RequestError
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import SamplingParams
from processors.types import ProcessedPrompt

WAIT = 600
PER_ROUND = 50
GIVEN_UP = (RequestAborted, DeadlineExceeded)
BROKEN = {"image-3-8-0"}
NAN_ID = 90
WINDOWS: Sequence[tuple[int | None, int | None]] = ((None, None), (None, None), (None, 7), (5, None), (11, 3))


def random_request(rnd: random.Random) -> tuple[ProcessedPrompt, SamplingParams]:
    """A prompt of few ids, so that many share a beginning, with pictures of all sizes; any options."""
    length = rnd.randint(1, 40)
    ids = [65] * length if rnd.random() < 0.5 else [rnd.choice([65, 66]) for _ in range(length)]
    if rnd.random() < 0.05:
        ids[rnd.randrange(length)] = NAN_ID
    images, at = [], rnd.randint(0, 3)
    while rnd.random() < 0.7:
        size = rnd.choice([1, 3, 8, 13])
        if at + size > length:
            break
        images.append(mock_image(at, size, rnd.randint(0, 3), gaps=rnd.choice([0, 0, 3]) if size > 3 else 0))
        at += size + rnd.choice([0, 0, 2])
    options: dict[str, Any] = {"seed": rnd.randint(0, 3), "temperature": rnd.choice([0.0, 0.0, 1.0])}
    for chance, more in (
        (0.2, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2}),
        (0.2, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}),
        (0.1, {"logprobs": 2}),
        (0.1, {"prompt_logprobs": 1}),
        (0.1, {"stop": ("A", "no such text"), "min_tokens": 1}),
        (0.1, {"allowed_token_ids": tuple(range(60, 100)), "bad_words": ("B",)}),
        (0.1, {"logit_bias": {70: 5.0}, "stop_token_ids": (71,)}),
    ):
        options |= more if rnd.random() < chance else {}
    options["n"] = rnd.choice([1, 1, 1, 2, 3])
    return mock_prompt(ids, images), SamplingParams(max_tokens=rnd.randint(1, 15), **options)


def outcome(handle: RequestHandle) -> object:
    """What came of a request, so that two can be compared."""
    try:
        output = handle.result(WAIT)
    except RequestError as error:
        return type(error)
    return [(a.token_ids, a.text, a.finish_reason, a.logprobs) for a in (output, *output.others)]


def ask_alone(model: MockModel, requests: Sequence[tuple[ProcessedPrompt, SamplingParams]]) -> list[object]:
    """Each by itself, nothing kept."""
    config = EngineConfig(
        block_size=64,
        num_blocks=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        encoder_cache_memory=0,
    )
    engine = Engine(model, ByteTokenizer(), config, identity="alone")
    try:
        return [outcome(engine.submit(*request)) for request in requests]
    finally:
        engine.close()


def tight_engine(model: MockModel, rnd: random.Random) -> Engine:
    """An engine of tiny sizes; now and then with a digest of four values."""
    block_size = rnd.choice([1, 2, 4, 8])
    config = EngineConfig(
        block_size=block_size,
        num_blocks=-(-90 // block_size),
        max_num_batched_tokens=rnd.choice([1, 5, 16]),
        max_num_seqs=rnd.choice([3, 5, 8]),
        max_images_per_step=rnd.choice([1, 3]),
        encoder_cache_memory=rnd.choice([0, 30, 150, 10_000]),
    )
    engine = Engine(model, ByteTokenizer(), config, identity="mock")
    if rnd.random() < 0.3:
        groups = engine.limits.groups
        engine._scheduler.blocks._index = PrefixIndex(
            "mock",
            lambda payload: bytes([sum(payload) % 4]),
            num_groups=len(groups),
            rooted=groups[0].window is None,
        )
    return engine


def ask_together(
    engine: Engine, requests: Sequence[tuple[ProcessedPrompt, SamplingParams]], rnd: random.Random
) -> list[object]:
    """All at once; some are given up before they begin, at their first words, in the middle, or when they are over."""
    handles: list[RequestHandle] = []
    for request in requests:
        timeout = rnd.choice([0.0005, 0.01, 0.1]) if rnd.random() < 0.05 else None
        handles.append(engine.submit(*request, priority=rnd.choice([0, 0, 1]), timeout=timeout))
        chance = rnd.random()
        if chance < 0.1:
            rnd.choice(handles).abort()
        elif chance < 0.15:
            handles[-1].abort()
        elif chance < 0.2:
            read_a_little(rnd.choice(handles), rnd.randint(1, 4))
    return [outcome(handle) for handle in handles]


def read_a_little(handle: RequestHandle, count: int) -> None:
    """Some deltas, and then no more: leaving the stream aborts the request."""
    try:
        for _, _ in zip(handle, range(count), strict=False):
            pass
    except RequestError:
        pass


def check_empty(engine: Engine) -> None:
    """Nothing is held, and nobody is remembered."""
    deadline = time.monotonic() + WAIT
    while any(engine.stats()[name] for name in ("running", "waiting")) or engine._runner.num_requests:
        assert time.monotonic() < deadline, "the engine does not come to rest"
        time.sleep(0.001)
    kept = engine._runner.image_keys
    engine.close()
    engine.check_integrity()
    ledger = engine._scheduler.images.ledger
    assert engine.stats()["blocks_held"] == 0
    assert ledger.held_bytes == 0
    assert ledger.total_bytes <= ledger.capacity
    assert kept == set(ledger._entries)
    assert not engine._runner.image_keys
    assert not engine._loop._tickets
    assert not engine._loop._open


def one_round(seed: int, count: int = PER_ROUND) -> Counter[str]:
    """`count` requests to a new engine; how many ended how.

    Raises:
        AssertionError: One was not as if it were alone, or something is left.
    """
    rnd = random.Random(seed)
    requests = [random_request(rnd) for _ in range(count)]
    options: dict[str, Any] = {
        "both_ways": rnd.random() < 0.5,
        "broken_images": BROKEN,
        "nan_after": {NAN_ID},
        "windows": rnd.choice(WINDOWS),
    }
    alone = ask_alone(MockModel(**options), requests)
    engine = tight_engine(MockModel(**options), rnd)
    try:
        together = ask_together(engine, requests, rnd)
        check_empty(engine)
    finally:
        engine.close()
    tally: Counter[str] = Counter(preemptions=engine.stats()["preemptions"])
    for index, (mine, theirs) in enumerate(zip(together, alone, strict=True)):
        given_up = mine in GIVEN_UP
        # A request's own NaN is out of sight behind its windows, or still in a block that is read and weighted with 0:
        # that depends on the size of blocks, and only its own request can tell.
        own_nan = NAN_ID in requests[index][0].token_ids and None not in options["windows"]
        either = own_nan and ModelOutputError in (mine, theirs)
        assert given_up or either or mine == theirs, f"seed {seed}, request {index}: {mine} together, {theirs} alone"
        tally["given up" if given_up else "failed" if isinstance(mine, type) else "answered"] += 1
    return tally


def ask_demo(count: int, seed: int) -> Counter[str]:
    """The demo model in float32: pictures of all sizes in one full pipeline, against one at a time without caches."""
    import numpy as np
    from PIL import Image

    from mmserve import MMPipeline

    rnd, noise = random.Random(seed), np.random.default_rng(seed)
    sizes = [(1, 1), (9, 300), (300, 9), (64, 64), (640, 480), (97, 511)]
    pictures = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    requests = [
        {
            "prompt": rnd.choice(["What is this?", "What is this? Say it in one word.", "Which colors?"]),
            "images": rnd.sample(pictures, rnd.choice([0, 1, 1, 2])),
            "sampling": {"max_tokens": rnd.randint(1, 12), "n": rnd.choice([1, 2]), "seed": 1, "temperature": 0.5},
        }
        for _ in range(count)
    ]
    small: dict[str, Any] = {"dtype": "float32", "device": "cpu", "progress": "off"}
    with MMPipeline(**small, enable_prefix_caching=False, encoder_cache_memory=0) as pipe:
        alone = [pipe.generate_batch([request])[0] for request in requests]
    with MMPipeline(**small, num_blocks=60, max_num_seqs=5, max_num_batched_tokens=150) as pipe:
        together = pipe.generate_batch(requests)
    for index, (mine, theirs) in enumerate(zip(together, alone, strict=True)):
        ids = [[a.token_ids for a in (one, *one.others)] for one in (mine, theirs)]  # type: ignore[union-attr]
        assert ids[0] == ids[1], f"demo, seed {seed}, request {index}: {ids}"
    return Counter({"demo answered": count})


def resident() -> int:
    """Bytes of this process in memory; 0 where that can not be read."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="requests to the mock model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demo", type=int, default=0, help="requests to the demo model")
    arguments = parser.parse_args()
    rounds = -(-arguments.count // PER_ROUND)
    tally: Counter[str] = Counter()
    sizes = []
    for number in range(rounds):
        tally += one_round(arguments.seed * 1_000_003 + number)
        sizes.append(resident())
    if arguments.demo:
        tally += ask_demo(arguments.demo, arguments.seed)
    # What grows once is memory of the allocator and caches of modules; what grows with the rounds is a leak.
    growth = sizes[-1] - sizes[len(sizes) // 2] if len(sizes) > 1 else 0
    result = {"count": rounds * PER_ROUND, "seed": arguments.seed, **tally, "growth_of_second_half_bytes": growth}
    print(json.dumps(result))
    assert growth < 32 * 2**20, f"memory grew by {growth:,} bytes in the second half"


if __name__ == "__main__":
    main()

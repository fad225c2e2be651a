"""A request's tokens do not depend on who shares its batch, nor on the chunk size: they are `generate()`'s."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.tiny_models.families import FAMILIES
from fixtures.tiny_models.family import TinyFamily, build, make_prompt
from fixtures.tiny_models.oracle import Reference
from fixtures.tiny_models.packed import run_packed
from mmserve.model import load_model
from mmserve.model.interface import Model
from processors.types import ProcessedPrompt

NEW_TOKENS = 12


class Loaded:
    def __init__(self, family: TinyFamily, folder: Path) -> None:
        self.family = family
        self.folder = build(family, folder)
        self.model: Model = load_model(self.folder, block_size=16, device="cpu")
        self.reference = Reference(family, self.folder)

    def prompts(self) -> list[ProcessedPrompt]:
        """One image; two of different sizes; the same image at another place; text alone where allowed."""
        parts: list[list[int | tuple[int, int]]] = [[3, (1, 0), 5], [4, (2, 0), 2, (3, 1), 3], [7, (1, 0), 9]]
        if not self.family.needs_image:
            parts.append([9])
        return [make_prompt(self.family, part, seed) for seed, part in enumerate(parts)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("chunk", "stagger"), [(10**9, 0), (5, 0), (3, 2)], ids=["whole", "chunks-inside-images", "prefill-meets-decode"]
)
def test_packed_equals_generate(loaded: Loaded, chunk: int, stagger: int) -> None:
    prompts = loaded.prompts()
    answers = run_packed(loaded.model, prompts, new_tokens=NEW_TOKENS, chunk=chunk, stagger=stagger)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = loaded.reference.generate(prompt, NEW_TOKENS)
        assert answer.token_ids == expected.token_ids
        torch.testing.assert_close(torch.stack(answer.logprobs), torch.stack(expected.logprobs), atol=1e-4, rtol=0)


def test_the_image_counts(loaded: Loaded) -> None:
    """Another image in the same place changes the logits; the same image again does not."""
    first, second, again = (
        run_packed(loaded.model, [make_prompt(loaded.family, [3, (seed, 0), 5])], new_tokens=1)[0].logprobs[0]
        for seed in (1, 2, 1)
    )
    assert (first - second).abs().max() > 1e-2
    assert torch.equal(first, again)

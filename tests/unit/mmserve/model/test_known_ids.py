"""An id that the model can not look up is the request's error, not the engine's death."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from mmserve.errors import InputError
from mmserve.model.generate_path import GenerateModel
from mmserve.model.known_ids import check_known_ids
from processors.types import ImageItem, PlaceholderRange, ProcessedPrompt


def test_only_where_an_image_row_goes_may_an_id_be_unknown() -> None:
    image = ImageItem("a", PlaceholderRange(1, 3, (True, False, True)), {}, (1, 1))
    check_known_ids(ProcessedPrompt((5, 100, 6, 100), (image,)), 50)
    for ids, index in (((5, 100, 100, 100), 2), ((50, 1, 1, 1), 0), ((5, 1, 1, 1, -1), 4)):
        with pytest.raises(InputError, match=f"token {ids[index]} at index {index} is not in .* 50 embeddings"):
            check_known_ids(ProcessedPrompt(ids, (image,)), 50)


@pytest.mark.parametrize("token", [-1, 50, 10**9])
def test_a_model_that_runs_through_generate_refuses_it_too(token: int) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = GenerateModel(LlamaForCausalLM(config), vocab_size=50, forbidden_token_ids=(), max_position=None, about={})
    assert model.plan(ProcessedPrompt((1, 49))).positions.shape == (1, 2)
    with pytest.raises(InputError, match=f"token {token} at index 1"):
        model.plan(ProcessedPrompt((1, token)))

"""The mock model and the byte tokenizer that users test with."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mmserve.testing
from mmserve.config import EngineConfig
from mmserve.engine.core import Engine
from mmserve.model.interface import Model
from mmserve.testing import ByteTokenizer, MockModel, mock_image, mock_prompt
from mmserve.types import SamplingParams

TOKENIZER = ByteTokenizer(extra=["<pad>"])


def answer(prompt_text: str, model: MockModel, **options: object) -> str:
    engine = Engine(model, TOKENIZER, EngineConfig(num_blocks=16), identity="mock")
    try:
        sampling = SamplingParams(**{"max_tokens": 6, **options})
        return engine.submit(mock_prompt(TOKENIZER.encode(prompt_text)), sampling).result(300).text
    finally:
        engine.close()


def test_bytes_round_trip_and_special_tokens_can_be_skipped() -> None:
    ids = [TOKENIZER.bos_token_id, *TOKENIZER.encode("Grüße 👋"), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ids) == "<bos>Grüße 👋<eos>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "Grüße 👋"
    assert TOKENIZER.encode("a", add_special_tokens=True) == [256, 97]
    assert TOKENIZER.encode("<eos>") == list(b"<eos>")
    assert TOKENIZER.convert_ids_to_tokens([65, 259]) == ["byte 65", "<pad>"]
    assert len(TOKENIZER) == 260


def test_a_script_is_said_whatever_the_question() -> None:
    model = MockModel(script=TOKENIZER.encode("yes"))
    assert answer("is it?", model, max_tokens=3) == "yes"
    assert answer("and this?", MockModel(script=TOKENIZER.encode("yes")), max_tokens=3) == "yes"


def test_answers_depend_on_the_whole_prompt_and_on_nothing_else() -> None:
    assert answer("abc", MockModel()) == answer("abc", MockModel())
    assert len({answer(text, MockModel()) for text in ("abc", "acb", "abd", "abcd")}) == 4


def test_a_prompt_marks_its_images() -> None:
    prompt = mock_prompt([65] * 6, [mock_image(1, 3, gaps=2)])
    assert prompt.token_ids == (65, 258, 258, 258, 65, 65)
    assert prompt.num_image_tokens == 3
    assert prompt.images[0].range.embed_positions() == (1, 3)


def test_the_package_is_light_until_it_is_used() -> None:
    code = "import sys, mmserve.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert mmserve.testing.MockModel is MockModel
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = mmserve.testing.Nothing


def test_the_mock_fills_the_seam() -> None:
    model: Model = MockModel()
    assert model.describe()["model"] == "MockModel"
    with pytest.raises(KeyError):
        _ = model.describe()["no such thing"]

"""Text piece by piece: whole characters, no leaked stop strings, deltas that add up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mmserve.engine.detokenizer import Detokenizer, TextDecoder
from mmserve.testing import ByteTokenizer

BYTES = TextDecoder(ByteTokenizer())


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama's and Gemma's: a mark for spaces, the first one dropped, bytes for what is not in the vocabulary."""
    words = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁", "é", "<extra>"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    return tokenizer


FALLBACK_TOKENIZER = sentencepiece_like()
FALLBACK = TextDecoder(FALLBACK_TOKENIZER)


def run(decoder: TextDecoder, ids: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0) -> list[str]:
    detokenizer = Detokenizer(decoder, stop, min_tokens)
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return deltas


def test_a_character_of_several_tokens_comes_whole() -> None:
    text = "a👩‍👩‍👧é漢字b"
    deltas = run(BYTES, list(text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == list(text)


class Strict(ByteTokenizer):
    """As slow tokenizers do, it raises for an id that no token has."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if any(token_id >= len(self) for token_id in ids):
            raise TypeError("expected str instance, NoneType found")
        return super().decode(ids, skip_special_tokens)


def test_an_id_that_can_not_be_decoded_has_no_text() -> None:
    detokenizer = Detokenizer(TextDecoder(Strict()))
    ids = [72, 300, 105, *"é".encode(), 301, 33]
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == "Hié!"
    assert TextDecoder(Strict()).decode_one(300) == ""


def test_an_answer_cut_inside_a_character_still_adds_up() -> None:
    ids = list("ok 👧".encode())[:-1]
    assert "".join(run(BYTES, ids)) == ByteTokenizer().decode(ids)


@given(
    st.lists(
        st.one_of(st.integers(0, 255), st.sampled_from([0xFF, 0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 65, 256, 257])), max_size=60
    )
)
@settings(max_examples=150, deadline=None)
def test_deltas_add_up_for_any_bytes(ids: list[int]) -> None:
    assert "".join(run(BYTES, ids)) == ByteTokenizer().decode(ids, skip_special_tokens=True)


def test_endless_bad_bytes_are_let_go_and_a_character_after_them_comes_whole() -> None:
    ids = [0xFF] * 100 + list("漢字".encode()) + [0xE6] * 50
    deltas = run(BYTES, ids)
    assert "".join(deltas) == ByteTokenizer().decode(ids)
    assert "".join(deltas[:100]).count("\ufffd") >= 80


@given(
    st.lists(
        st.one_of(
            st.integers(0, len(FALLBACK_TOKENIZER) - 1),
            st.sampled_from([258, 259, 260, 261, 2 + 0xE6, 2 + 0xBC, 2 + 0xA2, 1, 263]),
        ),
        max_size=20,
    )
)
@settings(max_examples=150, deadline=None)
def test_deltas_add_up_for_a_decoder_that_treats_runs_of_bytes_as_a_whole(ids: list[int]) -> None:
    assert "".join(run(FALLBACK, ids)) == FALLBACK_TOKENIZER.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_left_out_and_do_not_eat_the_next_space() -> None:
    ids = FALLBACK_TOKENIZER.convert_tokens_to_ids(["▁the", "<extra>", "▁cat", "s", "<eos>"])
    assert [delta for delta in run(FALLBACK, ids) if delta] == ["the", " cat", "s"]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["A", "E", "ND", "B"], ["END"], "A"),
        (["A", "xENDy"], ["END"], "Ax"),
        (["EN", "EN", "D"], ["END"], "EN"),
        (["aab", "aac"], ["aabaac"], ""),
        (["aab", "aab", "aac"], ["aabaac"], "aab"),
        (["on", "e tw", "o"], ["two", "e t"], "on"),
        (["A", "E", "N"], ["END"], "AEN"),
    ],
)
def test_a_stop_string_over_tokens_never_leaks(pieces: list[str], stop: list[str], expected: str) -> None:
    tokenizer = _Pieces(pieces)
    deltas = run(TextDecoder(tokenizer), range(len(pieces)), stop)
    assert "".join(deltas) == expected


@given(
    st.text("abAB", max_size=12), st.lists(st.text("abAB", min_size=1, max_size=4), min_size=1, max_size=3), st.data()
)
@settings(max_examples=150, deadline=None)
def test_the_text_ends_where_the_first_stop_string_to_be_complete_begins(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    result = "".join(run(TextDecoder(_Pieces(pieces)), range(len(pieces)), stop))
    reached = ""
    for piece in pieces:
        reached += piece
        starts = [reached.find(s) for s in stop if s in reached]
        if starts:
            assert result == reached[: min(starts)]
            return
    assert result == text


def test_stop_strings_wait_for_min_tokens() -> None:
    pieces = ["END", "a", "END"]
    assert "".join(run(TextDecoder(_Pieces(pieces)), range(3), ["END"], min_tokens=2)) == "ENDa"


class _Pieces:
    """Token i is piece i."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self._pieces[i] for i in token_ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self._pieces[ids]

"""Segments become the ids that the tokenizer makes of the whole text, with exact spans."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from processors import PromptError, UnsupportedProcessorError
from processors.chat import Segment
from processors.encode import PromptEncoder


def _metaspace(suffix: bool = False, image_in_words: bool = False) -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer: a mark in front of a text, BOS added, maybe EOS."""
    words = ["<unk>", "<s>", "</s>", "<image>", "\u2581", "\u2581hello", "\u2581world"]
    letters = sorted(set("helowrdimagewt<>/s\n.!"))
    scores = [(w, -1.0) for w in words] + [(c, -5.0) for c in letters if c not in words]
    if not image_in_words:
        scores[3] = ("<image>", -1000.0)
    backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>", "<image>")])
    end = " </s>" if suffix else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{end}", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _text(text: str) -> Segment:
    return Segment("text", text)


IMAGE = Segment("image", "<image><image>")


@pytest.mark.parametrize("suffix", [True, False])
@pytest.mark.parametrize(
    "text", ["hello", "hello<image><image>hello world", "<image><image>hello", "hello<image><image>"]
)
def test_ids_equal_the_tokenizers(text: str, suffix: bool) -> None:
    tokenizer = _metaspace(suffix)
    before, mark, after = text.partition(IMAGE.text)
    segments = [_text(before), *([IMAGE, _text(after)] if mark else [])]
    encoded = PromptEncoder(tokenizer).encode([s for s in segments if s.text])
    assert list(encoded.token_ids) == _metaspace(suffix)(text)["input_ids"]
    for start, end in encoded.image_spans:
        assert encoded.token_ids[start:end] == (3, 3)


def test_one_beginning_token_whoever_writes_it() -> None:
    encoder = PromptEncoder(_metaspace())
    assert (
        encoder.encode([_text("<s>hello")]).token_ids
        == encoder.encode([_text("hello")]).token_ids[:1] + (encoder.encode([_text("<s>hello")]).token_ids[1:])
    )
    assert encoder.encode([_text("<s>hello")]).token_ids.count(1) == 1
    assert PromptEncoder(_metaspace(), add_special_tokens=False).encode([_text("hello")]).token_ids.count(1) == 0


@pytest.mark.parametrize("image_in_words", [True, False])
def test_a_literal_is_never_the_token(image_in_words: bool) -> None:
    tokenizer = _metaspace(image_in_words=image_in_words)
    encoder = PromptEncoder(tokenizer)
    encoded = encoder.encode([_text("hello"), Segment("literal", "<image>"), _text(" world"), IMAGE])
    assert encoded.token_ids.count(3) == 2
    assert encoded.image_spans == ((len(encoded.token_ids) - 2, len(encoded.token_ids)),)
    assert tokenizer.decode(encoded.token_ids[1:-2]) == "hello<image> world"


def test_a_prompt_that_begins_with_a_literal_keeps_its_special_tokens() -> None:
    encoded = PromptEncoder(_metaspace(suffix=True)).encode([Segment("literal", "<image>"), _text(" hello")])
    assert encoded.token_ids[0] == 1
    assert encoded.token_ids[-1] == 2
    assert encoded.token_ids.count(1) == encoded.token_ids.count(2) == 1


def test_a_typed_beginning_token_is_none() -> None:
    encoded = PromptEncoder(_metaspace()).encode([Segment("literal", "<s>"), _text(" hello")])
    assert encoded.token_ids[0] == 1
    assert encoded.token_ids.count(1) == 1


def test_touching_images_with_shared_characters_stay_apart() -> None:
    """A token that covers the end of one image's text and the beginning of the next belongs to the first."""
    backend = Tokenizer(models.BPE(vocab={"<unk>": 0, "x": 1, "n": 2, "nn": 3}, merges=[("n", "n")], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    encoded = PromptEncoder(tokenizer).encode([Segment("image", "xn"), Segment("image", "nx")])
    assert encoded.token_ids == (1, 3, 1)
    assert encoded.image_spans == ((0, 2), (2, 3))


def test_an_image_without_tokens_is_an_error() -> None:
    with pytest.raises(PromptError, match="no tokens"):
        PromptEncoder(_metaspace()).encode([_text("hello"), Segment("image", "")])


def test_a_tokenizer_without_a_fast_backend_is_refused() -> None:
    class Slow:
        backend_tokenizer = None

    with pytest.raises(UnsupportedProcessorError, match="Slow"):
        PromptEncoder(Slow())


def test_the_callers_settings_do_not_reach_the_encoder() -> None:
    tokenizer = _metaspace()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert len(PromptEncoder(tokenizer).encode([_text("hello world hello")]).token_ids) == 4


def test_a_text_on_which_the_tokenizer_panics_is_an_error_of_its_own() -> None:
    """The Rust library's panic is no `Exception`, and its class can not be imported: it would end a whole thread."""

    class PanicException(BaseException):
        pass

    class Backend:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise PanicException("index out of bounds: the len is 6 but the index is 6")

    encoder = PromptEncoder(_metaspace())
    encoder._backend = Backend()
    with pytest.raises(PromptError, match=r"the tokenizer fails on this text: .*out of bounds"):
        encoder.encode([_text("hello")])


def test_a_bare_prompt_gets_nothing_in_front() -> None:
    encoder = PromptEncoder(_metaspace())
    encoded = encoder.encode([Segment("bare", ""), IMAGE, _text("<s>"), _text(" hello")])
    assert encoded.token_ids[:3] == (3, 3, 1)
    assert encoded.image_spans == ((0, 2),)
    assert encoded.token_ids[3:] == encoder.encode([_text("hello")]).token_ids[1:]

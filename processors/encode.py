"""Text segments -> token ids, and which ids each image's text became.

Text and images are encoded together, as the model's processor encodes the expanded prompt, so ids are the same as its
own; only a control token that a user typed breaks the run, because it must be encoded as plain characters.

The tokenizer's backend is never reconfigured here, so any number of threads may encode at once: what must be encoded
without control tokens goes to a second backend that has none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from processors.chat import Segment
from processors.errors import PromptError, UnsupportedProcessorError, shorten

__all__ = ["EncodedPrompt", "PromptEncoder"]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Ids of a whole prompt, and the half-open id range of each image's text, in prompt order."""

    token_ids: tuple[int, ...]
    image_spans: tuple[tuple[int, int], ...]


class PromptEncoder:
    """Encodes prompts with one fast tokenizer, which nobody else may reconfigure."""

    def __init__(self, tokenizer: Any, add_special_tokens: bool = True) -> None:
        """`add_special_tokens`: whether the tokenizer's own special tokens are put around a prompt."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedProcessorError(
                f"the tokenizer {type(tokenizer).__name__} has no fast (tokenizers) backend, which gives the offsets "
                "that image ranges are read from"
            )
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False
        self._backend = backend
        self.bos: str | None = tokenizer.bos_token
        """The beginning-of-sequence token's characters, if the tokenizer has one."""
        self._prefix, self._suffix = _added_around(backend) if add_special_tokens else ([], [])
        self._lock = threading.Lock()
        self._plain: Any = None

    def encode(self, segments: Sequence[Segment]) -> EncodedPrompt:
        """Encode the segments; each image segment's text is what stands for the image, expanded.

        The tokenizer's own special tokens (a beginning-of-sequence token) are added, unless the text begins with one
        or the first segment is "bare".

        Raises:
            PromptError: An image's text makes no ids of its own, or the text is no valid Unicode.
        """
        first = segments[0] if segments else Segment("text", "")
        continued = first.kind == "bare"
        bare = continued or (bool(self.bos) and first.kind == "text" and first.text.startswith(str(self.bos)))
        ids: list[int] = [] if bare else list(self._prefix)
        spans: list[tuple[int, int]] = []
        for index, run in enumerate(_runs(segments[1:] if continued else segments)):
            if run[0].kind == "literal":
                ids.extend(self._encode_literal(run[0].text))
                continue
            text = "".join(segment.text for segment in run)
            run_ids, offsets = (_continued if index or continued else _begun)(self._backend, text)
            spans.extend(_image_spans(run, offsets, len(ids)))
            ids.extend(run_ids)
        if not bare:
            ids.extend(self._suffix)
        return EncodedPrompt(tuple(ids), tuple(_apart(spans)))

    def encode_continued(self, text: str) -> tuple[int, ...]:
        """Ids of `text` alone, as they are behind other text."""
        return tuple(_continued(self._backend, text)[0])

    def _encode_literal(self, text: str) -> list[int]:
        ids, _ = _continued(self._plain_backend(), text)
        token_id = self._backend.token_to_id(text)
        if token_id is not None and token_id in ids:
            # The vocabulary itself holds the control token's characters as one piece: encode it in two halves.
            middle = max(1, len(text) // 2)
            ids = [i for half in (text[:middle], text[middle:]) for i in _continued(self._plain_backend(), half)[0]]
        return ids

    def _plain_backend(self) -> Any:
        """A backend without any added token; made when first needed, from then on only read."""
        with self._lock:
            if self._plain is None:
                from tokenizers import Tokenizer

                layout = json.loads(self._backend.to_str())
                layout["added_tokens"] = []
                layout["post_processor"] = None
                self._plain = Tokenizer.from_str(json.dumps(layout))
            return self._plain


def _apart(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans with shared ids given to the earlier one.

    The texts of touching images may end and begin with characters that one token covers, such as line breaks.
    """
    apart: list[tuple[int, int]] = []
    for start, end in spans:
        start = max(start, apart[-1][1] if apart else 0)
        if start >= end:
            raise PromptError("an image's text makes no tokens of its own: put text between the images")
        apart.append((start, end))
    return apart


def _added_around(backend: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and behind a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start]), list(full[start + len(plain) :])
    raise UnsupportedProcessorError("the tokenizer changes a text when it adds special tokens")


def _begun(backend: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode `text` as the beginning of a prompt."""
    encoding = _encoding(backend, text)
    return list(encoding.ids), list(encoding.offsets)


def _encoding(backend: Any, text: str) -> Any:
    try:
        return backend.encode(text, add_special_tokens=False)
    except (TypeError, UnicodeError) as error:  # a lone surrogate can not leave Python
        raise PromptError(f"the text can not be encoded: {shorten(str(error))}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the Rust library, and no Exception
            raise
        raise PromptError(f"the tokenizer fails on this text: {shorten(str(error))}") from error


def _continued(backend: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode `text` as the continuation of another text.

    SentencePiece-like tokenizers put a space in front of a text's beginning; behind a newline they do not, so the
    text is encoded behind one, and the newline's ids are dropped again.
    """
    newline = _encoding(backend, "\n").ids
    encoding = _encoding(backend, "\n" + text)
    count = len(newline)
    if encoding.ids[:count] == newline:
        return list(encoding.ids[count:]), [(a - 1, b - 1) for a, b in encoding.offsets[count:]]
    return _begun(backend, text)


def _runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Neighbouring segments that are encoded as one text; a literal is a run of its own."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if segment.kind == "literal" or not runs or runs[-1][0].kind == "literal":
            runs.append([segment])
        else:
            runs[-1].append(segment)
    return runs


def _image_spans(run: Sequence[Segment], offsets: Sequence[tuple[int, int]], base: int) -> list[tuple[int, int]]:
    """For each image of the run: the ids whose characters overlap its text, as a half-open range from `base`."""
    spans = []
    position = 0
    token = 0
    for segment in run:
        start, position = position, position + len(segment.text)
        if segment.kind != "image":
            continue
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        first = token
        while token < len(offsets) and offsets[token][0] < position:
            token += 1
        if token == first:
            raise PromptError(f"the text of an image ({shorten(segment.text, 40)}) makes no tokens")
        spans.append((base + first, base + token))
        token = max(first, token - 1)  # a token that reaches into the next image shows there too
    return spans

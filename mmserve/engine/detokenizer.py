"""Text from tokens, piece by piece, never half a character and never part of a stop string.

Three places, left to right, and each token moves the borders to the right::

    text:   A red square on the le|ft sid|\ufffd
            ^ released             ^ held  ^ undecided
                                     |       the tokens so far end inside a character
                                     could be the beginning of a stop string

What is decided never changes: tokens are decoded with the few before them as context, because a decoder may
treat the first token of what it is given differently (a leading space is dropped, for one).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Detokenizer", "TextDecoder", "TokenDecoder"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "\ufffd"
_MOST_UNDECIDED = 16
"""Tokens after which what ends in replacement characters is looked at again."""


class TokenDecoder(Protocol):
    """What is needed of a tokenizer; every transformers tokenizer has it."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> Any:
        """Text of the ids."""
        ...

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = ...) -> Any:
        """The vocabulary's own spelling of the ids."""
        ...


class TextDecoder:
    """One tokenizer, prepared for incremental decoding; shared by all requests of an engine, in one thread."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._is_byte: dict[int, bool] = {}
        self._silent: set[int] = set()
        self._texts: dict[int, str] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether `decode(skip_special_tokens=True)` leaves the token out."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for a single byte (`<0x0A>`).

        A decoder turns a run of them into text as a whole, and all of it into replacement characters if any of it
        is not UTF-8; so the text of a run is not decided before its end.
        """
        known = self._is_byte.get(token_id)
        if known is None:
            try:
                token = self._tokenizer.convert_ids_to_tokens(token_id)
            except Exception:  # noqa: BLE001 - an id that it does not know; see `_decode`
                token = None
            known = self._is_byte[token_id] = isinstance(token, str) and bool(_BYTE_TOKEN.fullmatch(token))
        return known

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special ones left out."""
        return self._decode(list(token_ids), skip_special_tokens=True)

    def decode_context(self, token_ids: Sequence[int]) -> str:
        """As `decode`, remembering single tokens: most contexts are one."""
        if len(token_ids) != 1:
            return self.decode(token_ids)
        token_id = token_ids[0]
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode(token_ids)
        return text

    def decode_one(self, token_id: int) -> str:
        """Text of one token by itself, a special one too."""
        return self._decode([token_id], skip_special_tokens=False)

    def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The tokenizer's own text; an id that it can not decode even alone has none.

        A head may have more rows than there are tokens. For those ids fast tokenizers give no text and slow ones raise.
        """
        if self._silent:
            token_ids = [token_id for token_id in token_ids if token_id not in self._silent]
        try:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except Exception:
            silent = {token_id for token_id in token_ids if not self._can_decode(token_id)}
            if not silent:
                raise
            self._silent |= silent
            return self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _can_decode(self, token_id: int) -> bool:
        try:
            self._tokenizer.decode([token_id], skip_special_tokens=False)
        except Exception:  # noqa: BLE001 - tokenizers raise whatever their tables do
            return False
        return True


def _special_ids(tokenizer: TokenDecoder) -> frozenset[int]:
    """Ids that `decode(skip_special_tokens=True)` leaves out: the named ones and all added ones marked special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {int(token_id) for token_id, token in added.items() if token.special}
    return frozenset(marked | set(getattr(tokenizer, "all_special_ids", ())))


class Detokenizer:
    """The text of one answer.

    Args:
        decoder: The engine's.
        stop: Strings that end the text and are not part of it.
        min_tokens: Stop strings are not looked for before this many tokens.
    """

    def __init__(self, decoder: TextDecoder, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ids: list[int] = []
        self._context = 0
        self._decided = 0
        self._held = ""
        self._released: list[str] = []
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; tokens after it are ignored."""
        return self._stopped

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that can be released because of it."""
        self._num_tokens += 1
        if self._stopped or self._decoder.is_special(token_id):
            return ""
        self._ids.append(token_id)
        return self._release(self._decide(), final=False)

    def finish(self) -> str:
        """No more tokens: the text that was still held or undecided."""
        if self._stopped:
            return ""
        return self._release(self._decide_rest(), final=True)

    def _decide(self) -> str:
        """Text that the tokens so far settle."""
        if self._decoder.is_byte(self._ids[-1]):
            return ""
        before = self._decoder.decode_context(self._ids[self._context : self._decided])
        window = self._decoder.decode(self._ids[self._context :])
        if len(window) <= len(before):
            return ""
        decided = self._settled(window) if window.endswith(_UNFINISHED) else len(self._ids)
        if decided is None:
            return ""
        if decided < len(self._ids):
            window = self._decoder.decode(self._ids[self._context : decided])
        self._context, self._decided = self._decided, decided
        return window[len(before) :]

    def _settled(self, window: str) -> int | None:
        """How many tokens are settled, of many that end in replacement characters; None if they may still change.

        A character takes four bytes at most, so all but the last few of a long row of bad bytes stay what they are;
        without this a model that says nothing else would cost the square of what it says.
        """
        if len(self._ids) - self._decided < _MOST_UNDECIDED:
            return None
        for decided in range(len(self._ids) - 4, len(self._ids) - 8, -1):
            if self._decoder.is_byte(self._ids[decided - 1]):
                continue
            # A cut inside a character would show as a replacement character that the whole does not have.
            if window.startswith(self._decoder.decode(self._ids[self._context : decided])):
                return decided
        return None

    def _decide_rest(self) -> str:
        before = self._decoder.decode_context(self._ids[self._context : self._decided])
        return self._decoder.decode(self._ids[self._context :])[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        """Move text on, up to a stop string or to what could become one."""
        if not self._stop:
            return self._out(new)
        text = self._held + new
        if self._num_tokens >= self._min_tokens:
            found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
            if found:
                self._stopped = True
                self._held = ""
                return self._out(text[: min(found)])
        keep = 0 if final else _possible_stop(text, self._stop)
        self._held = text[len(text) - keep :]
        return self._out(text[: len(text) - keep])

    def _out(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text


def _possible_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop)) - 1)
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(s.startswith(end) for s in stop):
            return length
    return 0

"""A tokenizer of 256 bytes and a few special tokens, with the methods that the engine uses of a real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ByteTokenizer"]


@dataclass(frozen=True, slots=True)
class _AddedToken:
    content: str
    special: bool


class ByteTokenizer:
    """Ids 0..255 are bytes of UTF-8; then `<bos>` 256, `<eos>` 257, `<image>` 258 and any others named.

    Args:
        extra: Further special tokens, from id 259 on.
    """

    def __init__(self, extra: Iterable[str] = ()) -> None:
        names = ("<bos>", "<eos>", "<image>", *extra)
        self.added_tokens_decoder = {256 + i: _AddedToken(name, True) for i, name in enumerate(names)}
        self.bos_token_id, self.eos_token_id, self.image_token_id = 256, 257, 258

    def __len__(self) -> int:
        return 256 + len(self.added_tokens_decoder)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids that are not bytes."""
        return list(self.added_tokens_decoder)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Bytes of `text`, after `<bos>` if asked for. Names of special tokens in the text stay text."""
        return ([self.bos_token_id] if add_special_tokens else []) + list(text.encode())

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become replacement characters."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        parts = bytearray()
        for token_id in ids:
            if token_id < 256:
                parts.append(token_id)
            elif not skip_special_tokens:
                parts += self.added_tokens_decoder[token_id].content.encode()
        return parts.decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str]:
        """Name of a special token, `byte 65` for a byte."""
        if not isinstance(ids, int):
            return [self._name(token_id) for token_id in ids]
        return self._name(ids)

    def _name(self, token_id: int) -> str:
        return f"byte {token_id}" if token_id < 256 else self.added_tokens_decoder[token_id].content

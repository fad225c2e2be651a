"""Messages and prompt strings -> segments of text whose image positions are known.

Images are bound by position. A chat template writes its own image tokens into the text that it renders, and a user
may have typed the same characters; so before rendering, every control token in the caller's strings is wrapped in two
marker characters that occur nowhere in the prompt. After rendering, a wrapped token is user text (`literal`), and an
image token without a wrap was written by the template (`image`)::

    message    [image] "what is <image> ?"
    rendered   User:<image>what is ⟨<image>⟩ ?
    segments   text "User:" · image · text "what is " · literal "<image>" · text " ?"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from processors.errors import PromptError, UnsupportedProcessorError, shorten

__all__ = ["ChatTemplate", "Renderer", "Segment", "collect_parts", "cut_images", "segment_raw"]

NEUTRAL_MARK = "<image>"
"""Stands for an image in a raw prompt of any model."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a prompt.

    Attributes:
        kind: "text" (control tokens in it are control tokens), "literal" (characters of a control token that a
            user typed: encoded as plain text), "image" (the place of the next image), or, only first in a prompt that
            a family has laid out, "bare" (the tokenizer adds nothing: no special tokens, no space in front).
        text: The characters; for an image, the token that stands for it before expansion; none for "bare".
    """

    kind: Literal["text", "literal", "image", "bare"]
    text: str


Renderer = Callable[[list[dict[str, object]], bool], str]
"""(messages, add_generation_prompt) -> the rendered chat."""


def collect_parts(
    messages: Sequence[Mapping[str, object]], images: Sequence[object]
) -> tuple[list[dict[str, object]], list[object]]:
    """Check OpenAI-style messages; return them with bare image parts, and all image sources in their order.

    A part `{"type": "image"}` without a source takes the next of `images`, and all of these must be taken.

    Raises:
        PromptError: A message or part of an unknown form, or image parts and images of different number.
    """
    if not messages:
        raise PromptError("the list of messages is empty")
    given = iter(images)
    sources: list[object] = []
    bare = 0
    plain: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"message {index} must be a mapping with a 'role' and a 'content'")
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            if not isinstance(content, str) and content is not None:
                raise PromptError(f"the content of message {index} is a {type(content).__name__}, not text or parts")
            plain.append(dict(message))
            continue
        parts: list[dict[str, object]] = []
        for part in content:
            kind, value = _read_part(part, index)
            if kind == "text":
                parts.append({"type": "text", "text": value})
                continue
            if value is None:
                bare += 1
                value = next(given, None)
            parts.append({"type": "image"})
            sources.append(value)
        plain.append({**message, "content": parts})
    if bare != len(images):
        raise PromptError(
            f"the messages have {bare} image parts without a source, but {len(images)} images were given beside them"
        )
    return plain, sources


def _read_part(part: object, index: int) -> tuple[str, object]:
    """("text", the text) or ("image", its source or None)."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        raise PromptError(f"message {index} has a content part that is a {type(part).__name__}, not a mapping")
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise PromptError(f"message {index} has a text part without a 'text' string")
        return "text", part["text"]
    if kind == "image":
        return "image", part.get("image")
    if kind == "image_url":
        url = part.get("image_url")
        if isinstance(url, Mapping):
            if url.get("detail", "auto") not in (None, "auto"):
                raise PromptError("image_url 'detail' is not supported: set the processor's options instead")
            url = url.get("url")
        if not isinstance(url, str):
            raise PromptError(f"message {index} has an image_url part without a URL")
        if not url[:8].lower().startswith(("data:", "http://", "https://")):
            raise PromptError(f"image_url must be a data: or http(s) URL, not {shorten(url)}")
        return "image", url
    raise PromptError(
        f"message {index} has a content part of type {shorten(kind)}; known: 'text', 'image', 'image_url'"
    )


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's chat template, and what was found out about it by rendering two probes.

    Attributes:
        render: The template itself.
        image_token: What it writes in the place of an image.
        control_tokens: Matches what is a control token unless it is a user's text.
        takes_parts: It walks lists of content parts and places the images itself; otherwise content must be a
            string, and the image tokens are written in front of the text that follows them.
        takes_strings: It renders a plain string as content.
        image_mark: How it writes an image between two texts, e.g. with the tokens that enclose one.
    """

    render: Renderer
    image_token: str
    control_tokens: re.Pattern[str]
    takes_parts: bool
    takes_strings: bool
    image_mark: str

    @classmethod
    def probe(cls, render: Renderer, image_token: str, control_tokens: Sequence[str]) -> ChatTemplate:
        """Find out which forms of content the template takes.

        Raises:
            UnsupportedProcessorError: It renders no plain question in either form.
        """
        before, after = "probe-before", "probe-after"
        parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
        refusals: list[str] = []
        in_parts = _try_render(render, parts, refusals)
        in_a_string = _try_render(render, before, refusals)
        if before not in in_parts and before not in in_a_string:
            reason = f": {refusals[0]}" if refusals else ", whose text it leaves out"
            raise UnsupportedProcessorError(f"the chat template can not render a plain question{reason}")
        takes_parts = before in in_parts and after in in_parts and in_parts.count(image_token) == 1
        mark = image_token
        if takes_parts and in_parts.index(before) < in_parts.index(after):
            between = in_parts[in_parts.index(before) + len(before) : in_parts.index(after)]
            mark = between if image_token in between else image_token
        return cls(
            render=render,
            image_token=image_token,
            control_tokens=_any_of(control_tokens),
            takes_parts=takes_parts,
            takes_strings=before in in_a_string,
            image_mark=mark,
        )

    def segments(
        self, messages: list[dict[str, object]], num_images: int, add_generation_prompt: bool
    ) -> list[Segment]:
        """Render messages (from `collect_parts`) and cut the text into segments.

        Raises:
            PromptError: The template refuses the messages, or does not write every image.
        """
        opening, closing = _unused_characters(messages)
        wrapped = [self._shape(self._wrap(message, opening, closing)) for message in messages]
        rendered = self.render(wrapped, add_generation_prompt)
        segments = list(self._cut(rendered, opening, closing))
        placed = sum(segment.kind == "image" for segment in segments)
        if placed != num_images:
            roles = sorted({str(m["role"]) for m in messages if _has_image(m)})
            raise PromptError(
                f"the chat template wrote {placed} image tokens for {num_images} images "
                f"(images in turns of: {', '.join(roles) or 'none'})"
            )
        return segments

    def _wrap(self, message: dict[str, object], opening: str, closing: str) -> dict[str, object]:
        """Every string of the message with its control tokens wrapped; part types stay as they are."""

        def walk(value: object) -> object:
            if isinstance(value, str):
                return self.control_tokens.sub(lambda m: f"{opening}{m.group()}{closing}", value)
            if isinstance(value, Mapping):
                return {k: v if k == "type" else walk(v) for k, v in value.items()}
            if isinstance(value, (list, tuple)):
                return [walk(item) for item in value]
            return value

        return {key: walk(value) for key, value in message.items()}

    def _shape(self, message: dict[str, object]) -> dict[str, object]:
        """The content in the form that the template takes."""
        content = message.get("content")
        if isinstance(content, str) and not self.takes_strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self.takes_parts:
            texts = [str(p["text"]) if p["type"] == "text" else self.image_token for p in content]
            return {**message, "content": "".join(texts)}
        return message

    def _cut(self, rendered: str, opening: str, closing: str) -> Iterator[Segment]:
        # A template may split a string between the markers; a lone marker is no longer a wrap, only a boundary.
        wrapped = re.compile(f"{opening}([^{opening}{closing}]*){closing}|[{opening}{closing}]")
        position = 0
        for match in wrapped.finditer(rendered):
            yield from cut_images(rendered[position : match.start()], self.image_token)
            if match.group(1):
                yield Segment("literal", match.group(1))
            position = match.end()
        yield from cut_images(rendered[position:], self.image_token)


def cut_images(text: str, image_token: str) -> Iterator[Segment]:
    """Cut `text` at every image token."""
    for index, piece in enumerate(text.split(image_token)):
        if index:
            yield Segment("image", image_token)
        if piece:
            yield Segment("text", piece)


def segment_raw(text: str, num_images: int, image_token: str, image_mark: str, bos: str | None) -> list[Segment]:
    """Cut a raw prompt at its image positions.

    These are the model's own image tokens; or, if there are none, the neutral marks `<image>`; or, if there are none
    of these either, all images stand in front of the text, behind a beginning-of-sequence token `bos` if it has one.
    `image_mark` is what a neutral mark stands for.

    Raises:
        PromptError: Positions and images differ in number.
    """
    found = text.count(image_token)
    if found == 0 and num_images > 0:
        if NEUTRAL_MARK in text:
            found = text.count(NEUTRAL_MARK)
            text = text.replace(NEUTRAL_MARK, image_mark)
        else:
            found = num_images
            start = bos if bos and text.startswith(bos) else ""
            text = start + image_mark * num_images + text[len(start) :]
    if found != num_images:
        raise PromptError(
            f"the prompt has {found} image positions ({image_token!r}), but {num_images} images were given"
        )
    return list(cut_images(text, image_token))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches the longest of `tokens`. A look at the first character spares trying thousands of them everywhere."""
    longest_first = sorted(set(tokens), key=len, reverse=True)
    if not longest_first:
        return re.compile("(?!)")
    first = "".join(sorted({re.escape(token[0]) for token in longest_first}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, longest_first))})")


def _has_image(message: Mapping[str, object]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def _try_render(render: Renderer, content: object, refusals: list[str]) -> str:
    """What the template makes of one user turn; empty, with the reason put to `refusals`, if it refuses this form."""
    try:
        return render([{"role": "user", "content": content}], True)
    except PromptError as error:
        refusals.append(str(error))
        return ""


def _unused_characters(value: object) -> tuple[str, str]:
    """Two private-use characters that occur nowhere in the strings of `value`."""
    used: set[str] = set()

    def walk(item: object) -> None:
        if isinstance(item, str):
            used.update(c for c in item if c >= "\U000f0000")
        elif isinstance(item, Mapping):
            for entry in item.values():
                walk(entry)
        elif isinstance(item, (list, tuple)):
            for entry in item:
                walk(entry)

    walk(value)
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return next(free), next(free)

"""Messages and raw prompts become segments whose image positions are known."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from processors import PromptError
from processors.chat import ChatTemplate, Segment, collect_parts, segment_raw

Message = dict[str, object]


def _walk(messages: list[Message], add_generation_prompt: bool) -> str:
    """A template that takes strings and parts, and writes images where they are."""
    text = ""
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        body = "".join("<i>" if p["type"] == "image" else str(p["text"]) for p in parts)  # type: ignore[union-attr]
        text += f"{message['role']}: {body}\n"
    return text + ("bot:" if add_generation_prompt else "")


def _strings_only(messages: list[Message], add_generation_prompt: bool) -> str:
    for message in messages:
        if not isinstance(message["content"], str):
            raise PromptError("can only concatenate str")
    return _walk(messages, add_generation_prompt)


def _images_in_front(messages: list[Message], add_generation_prompt: bool) -> str:
    text = ""
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            raise PromptError("parts only")
        text += "<i>" * sum(p["type"] == "image" for p in content)  # type: ignore[union-attr]
        text += "".join(str(p["text"]) for p in content if p["type"] == "text")  # type: ignore[union-attr]
    return text


def _no_system_images(messages: list[Message], add_generation_prompt: bool) -> str:
    return _walk([m for m in messages if m["role"] == "user"], add_generation_prompt)


def _template(render: Callable[[list[Message], bool], str]) -> ChatTemplate:
    return ChatTemplate.probe(render, "<i>", ["<i>", "</s>"])


def _user(*parts: Message | str) -> list[Message]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


IMAGE: Message = {"type": "image"}


def test_images_stand_where_the_template_writes_them() -> None:
    segments = _template(_walk).segments(_user("a", IMAGE, "b", IMAGE), 2, True)
    assert segments == [
        Segment("text", "user: a"),
        Segment("image", "<i>"),
        Segment("text", "b"),
        Segment("image", "<i>"),
        Segment("text", "\nbot:"),
    ]


@pytest.mark.parametrize("parts", [("x<i>y", IMAGE), (IMAGE, "x<i>y")])
def test_a_typed_image_token_is_literal(parts: tuple[Message | str, ...]) -> None:
    segments = _template(_walk).segments(_user(*parts), 1, False)
    assert [s.text for s in segments if s.kind == "literal"] == ["<i>"]
    assert sum(s.kind == "image" for s in segments) == 1


def test_other_control_tokens_are_literal_too() -> None:
    segments = _template(_walk).segments([{"role": "user", "content": "a</s>b"}], 0, False)
    assert Segment("literal", "</s>") in segments
    assert "".join(s.text for s in segments) == "user: a</s>b\n"


def test_control_tokens_of_any_first_character() -> None:
    tokens = ["<i>", "]x[", "^a", "-b", "\\c", "[INST]", "[IN"]
    template = ChatTemplate.probe(_walk, "<i>", tokens)
    text = " ".join(tokens)
    segments = template.segments([{"role": "user", "content": text}], 0, False)
    assert [s.text for s in segments if s.kind == "literal"] == tokens


def test_thousands_of_control_tokens_do_not_slow_a_long_text() -> None:
    template = ChatTemplate.probe(_walk, "<i>", ["<i>", *(f"<unused{i}>" for i in range(6000))])
    start = time.process_time()
    template.segments([{"role": "user", "content": "an ordinary sentence. " * 5000}], 0, False)
    assert time.process_time() - start < 1.0


def test_a_role_can_not_smuggle_a_token() -> None:
    segments = _template(_walk).segments([{"role": "user<i>", "content": "a"}], 0, False)
    assert not any(s.kind == "image" for s in segments)


def test_marker_characters_of_a_user_survive() -> None:
    text = "\U000f0000<i>\U000f0001"
    segments = _template(_walk).segments(_user(text), 0, False)
    assert "".join(s.text for s in segments) == f"user: {text}\n"


def test_a_template_that_cuts_a_wrapped_token_leaves_text() -> None:
    def cutting(messages: list[Message], add_generation_prompt: bool) -> str:
        return _walk(messages, add_generation_prompt).replace("</s>", "")

    segments = _template(cutting).segments(_user("a</s>b"), 0, False)
    assert "".join(s.text for s in segments) == "user: ab\n"


def test_a_template_of_strings_gets_image_tokens_in_the_string() -> None:
    template = _template(_strings_only)
    assert not template.takes_parts
    assert template.takes_strings
    segments = template.segments(_user("a", IMAGE, "b<i>"), 1, False)
    assert "".join(s.text for s in segments) == "user: a<i>b<i>\n"
    assert [s.kind for s in segments] == ["text", "image", "text", "literal", "text"]


def test_a_template_of_parts_gets_parts() -> None:
    template = _template(_images_in_front)
    assert template.takes_parts
    assert not template.takes_strings
    assert template.segments([{"role": "user", "content": "plain"}], 0, False) == [Segment("text", "plain")]
    assert template.image_mark == "<i>"


def test_what_encloses_an_image_is_found() -> None:
    def enclosing(messages: list[Message], add_generation_prompt: bool) -> str:
        return _walk(messages, add_generation_prompt).replace("<i>", "<b><i><e>")

    assert _template(enclosing).image_mark == "<b><i><e>"


def test_an_image_that_the_template_drops_is_an_error() -> None:
    messages: list[Message] = [{"role": "system", "content": [IMAGE]}, *_user("a", IMAGE)]
    with pytest.raises(PromptError, match=r"wrote 1 image tokens for 2 images .*system, user"):
        _template(_no_system_images).segments(messages, 2, False)


def test_sources_are_collected_in_order() -> None:
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "t"}, IMAGE]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}, "plain"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "data:,x"}]},
    ]
    plain, sources = collect_parts(messages, ["given"])
    assert sources == ["a.png", "given", "https://x/y", "data:,x"]
    assert plain[0]["content"] == [IMAGE, {"type": "text", "text": "t"}, IMAGE]
    assert plain[2]["content"] == [IMAGE, {"type": "text", "text": "plain"}]
    assert messages[0]["content"][0] == {"type": "image", "image": "a.png"}  # the caller's list stays as it was


@pytest.mark.parametrize(
    ("messages", "images", "message"),
    [
        ([], [], "empty"),
        (["text"], [], "mapping"),
        ([{"content": "x"}], [], "role"),
        ([{"role": "user", "content": 5}], [], "int"),
        (_user({"type": "video"}), [], "'video'"),
        (_user({"type": "text"}), [], "without a 'text'"),
        ([{"role": "user", "content": [5]}], [], "int"),
        (_user({"type": "image_url"}), [], "without a URL"),
        (_user({"type": "image_url", "image_url": "/etc/hostname"}), [], "must be a data: or http"),
        (_user({"type": "image_url", "image_url": "file:///etc/hostname"}), [], "must be a data: or http"),
        (_user({"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}}), [], "detail"),
        (_user(IMAGE), [], "1 image parts .* 0 images"),
        (_user("x"), ["a", "b"], "0 image parts .* 2 images"),
    ],
)
def test_bad_messages(messages: list[Message], images: list[object], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        collect_parts(messages, images)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("a<i>b", 1, "a|<i>|b"),
        ("a<image>b<image>", 2, "a[|<i>|]b[|<i>|]"),
        ("ab", 2, "[|<i>|][|<i>|]ab"),
        ("<s>ab", 1, "<s>[|<i>|]ab"),
        ("<i> and <image>", 1, "<i>| and <image>"),
        ("a <image> in words", 0, "a <image> in words"),
    ],
)
def test_raw_prompts(text: str, count: int, expected: str) -> None:
    assert "|".join(s.text for s in segment_raw(text, count, "<i>", "[<i>]", "<s>")) == expected

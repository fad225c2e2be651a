"""One picture of what was asked and answered: pictures on the left, questions, answers and times on the right."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

__all__ = ["Answered", "SheetRow", "draw_sheet"]

_MARGIN, _THUMB, _TEXT_WIDTH, _LINE = 24, 200, 560, 22
_INK, _FAINT, _ACCENT, _PAPER, _RULE = "#1c1c1c", "#777777", "#0b5cad", "#ffffff", "#e3e3e3"


@dataclass(frozen=True, slots=True)
class Answered:
    """A question, its answer and how long it took in seconds."""

    question: str
    answer: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SheetRow:
    """The pictures of a scene and all that was asked about them."""

    pictures: tuple[Image.Image, ...]
    answers: tuple[Answered, ...]


def draw_sheet(rows: tuple[SheetRow, ...], title: str) -> Image.Image:
    """The sheet, as an RGB picture; as tall as its rows need."""
    blocks = [_draw_row(row) for row in rows]
    header = 2 * _MARGIN + _LINE
    width = max(block.width for block in blocks) + 2 * _MARGIN
    height = header + sum(block.height + _MARGIN for block in blocks)
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN), title, font=ImageFont.load_default(18), fill=_INK)
    y = header
    for block in blocks:
        pen.line((_MARGIN, y - _MARGIN // 2, width - _MARGIN, y - _MARGIN // 2), fill=_RULE)
        sheet.paste(block, (_MARGIN, y))
        y += block.height + _MARGIN
    return sheet


def _draw_row(row: SheetRow) -> Image.Image:
    thumbs = [_thumbnail(picture) for picture in row.pictures]
    texts = [_draw_answer(answer) for answer in row.answers]
    left = sum(thumb.width + _MARGIN for thumb in thumbs)
    height = max(max(thumb.height for thumb in thumbs), sum(text.height for text in texts))
    block = Image.new("RGB", (max(left, 2 * (_THUMB + _MARGIN)) + _TEXT_WIDTH, height), _PAPER)
    x = 0
    for thumb in thumbs:
        block.paste(thumb, (x, 0))
        x += thumb.width + _MARGIN
    y = 0
    for text in texts:
        block.paste(text, (block.width - _TEXT_WIDTH, y))
        y += text.height
    return block


def _thumbnail(picture: Image.Image) -> Image.Image:
    """A copy that fits the thumbnail's square, with a thin frame so that white pictures show."""
    scale = _THUMB / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    thumb = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    ImageDraw.Draw(thumb).rectangle((0, 0, thumb.width - 1, thumb.height - 1), outline=_RULE)
    return thumb


def _draw_answer(answered: Answered) -> Image.Image:
    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    question = _wrap(answered.question, font, _TEXT_WIDTH)
    answer = _wrap(answered.answer, font, _TEXT_WIDTH)
    height = (len(question) + len(answer) + 1) * _LINE + _LINE // 2
    block = Image.new("RGB", (_TEXT_WIDTH, height), _PAPER)
    pen = ImageDraw.Draw(block)
    y = 0
    for lines, colour in ((question, _INK), (answer, _ACCENT)):
        for line in lines:
            pen.text((0, y), line, font=font, fill=colour)
            y += _LINE
    pen.text((0, y), f"{answered.seconds * 1000:.0f} ms", font=small, fill=_FAINT)
    return block


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Lines of whole words no wider than `width` pixels; a longer word stands alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines

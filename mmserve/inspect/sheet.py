"""One picture of a prompt: its images cut into tiles, and below them all its tokens in colour."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from mmserve.inspect.view import ImageView, PromptView, TokenKind, TokenView

__all__ = ["COLOURS", "draw_view"]

COLOURS: dict[TokenKind, str] = {"text": "#dbe9ff", "special": "#e6e6e6", "image": "#bfe8c4", "structure": "#ffdca8"}
_WIDTH, _MARGIN, _TILE, _LINE = 1180, 20, 170, 22
_INK, _FAINT = "#1c1c1c", "#666666"


@dataclass(slots=True)
class _Pen:
    """A canvas that grows downwards."""

    canvas: Image.Image
    y: int = _MARGIN

    def room(self, height: int) -> ImageDraw.ImageDraw:
        """Make sure that `height` pixels are free below the current line."""
        if self.y + height + _MARGIN > self.canvas.height:
            taller = Image.new("RGB", (_WIDTH, self.y + height + _MARGIN), "white")
            taller.paste(self.canvas, (0, 0))
            self.canvas = taller
        return ImageDraw.Draw(self.canvas)

    def text(self, words: str, colour: str = _INK, size: int = 15) -> None:
        """One line of text."""
        self.room(_LINE).text((_MARGIN, self.y), words, font=ImageFont.load_default(size), fill=colour)
        self.y += _LINE


def draw_view(view: PromptView) -> Image.Image:
    """The sheet, as an RGB picture; as tall as it needs."""
    pen = _Pen(Image.new("RGB", (_WIDTH, 2 * _MARGIN), "white"))
    for image in view.images:
        _draw_image(pen, image)
    _draw_legend(pen, view)
    _draw_tokens(pen, view.tokens)
    return pen.canvas


def _draw_image(pen: _Pen, image: ImageView) -> None:
    width, height = image.size
    pen.text(
        f"image {image.number}: {width} x {height}, tokens {image.offset} to {image.offset + image.length - 1}, "
        f"{image.num_embeds} feature rows"
    )
    if not image.tiles:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in image.tensors.items())
        pen.text(f"not drawn, laid out as {shapes}", _FAINT, 13)
    x = _MARGIN
    pen.room(_TILE + _LINE)
    for tile in image.tiles:
        if x + _TILE > _WIDTH - _MARGIN:
            x, pen.y = _MARGIN, pen.y + _TILE + _LINE
            pen.room(_TILE + _LINE)
        _draw_tile(pen, x, tile.picture, _caption(tile.first_token, tile.last_token))
        x += _TILE + 8
    pen.y += (_TILE + _LINE if image.tiles else 0) + 8


def _caption(first: int | None, last: int | None) -> str:
    return "" if first is None else f"{first} to {last}"


def _draw_tile(pen: _Pen, x: int, picture: Image.Image, caption: str) -> None:
    scale = _TILE / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    pen.canvas.paste(
        picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR), (x, pen.y)
    )
    draw = ImageDraw.Draw(pen.canvas)
    draw.rectangle((x, pen.y, x + size[0] - 1, pen.y + size[1] - 1), outline="#cccccc")
    draw.text((x, pen.y + _TILE + 2), caption, font=ImageFont.load_default(12), fill=_FAINT)


def _draw_legend(pen: _Pen, view: PromptView) -> None:
    counts = view.count_kinds()
    draw, x = pen.room(_LINE), _MARGIN
    font = ImageFont.load_default(13)
    for kind, colour in COLOURS.items():
        draw.rectangle((x, pen.y + 2, x + 14, pen.y + 16), fill=colour)
        words = f"{kind}: {counts[kind]}"
        draw.text((x + 20, pen.y), words, font=font, fill=_INK)
        x += 50 + round(font.getlength(words))
    pen.y += _LINE + 8


def _draw_tokens(pen: _Pen, tokens: tuple[TokenView, ...]) -> None:
    """Every token as a box: text boxes carry their text, image boxes are narrow."""
    font = ImageFont.load_default(12)
    draw, x = pen.room(_LINE), _MARGIN
    for token in tokens:
        label = "" if token.kind == "image" else _printable(token.text)
        width = max(7, round(font.getlength(label)) + 6)
        if x + width > _WIDTH - _MARGIN:
            x, pen.y = _MARGIN, pen.y + _LINE
            draw = pen.room(_LINE)
        draw.rectangle((x, pen.y, x + width - 2, pen.y + _LINE - 4), fill=COLOURS[token.kind])
        draw.text((x + 2, pen.y + 2), label, font=font, fill=_INK)
        x += width
    pen.y += _LINE


def _printable(text: str) -> str:
    """The text with line breaks and characters that the font has not made visible, cut to a readable length."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t")
    shown = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in shown)
    return shown if len(shown) <= 24 else shown[:23] + "~"

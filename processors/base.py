"""PromptProcessor: messages or prompt, images and options -> a `ProcessedPrompt`.

images ──load──> upright RGB ──expand──> tensors + the text that stands for each
prompt ──chat──> segments ──put the images' texts in──> encode ──> ids + ranges
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from processors.chat import ChatTemplate, Segment, collect_parts, segment_raw
from processors.counts import ImageCounts
from processors.encode import EncodedPrompt, PromptEncoder
from processors.errors import PromptError
from processors.expand import Expansion
from processors.features import ImageFeatures, check_count
from processors.given_ids import ImageIds, check_ids, place_in_ids
from processors.images import ImagePreparer, PreparedImage
from processors.loading import LoadedProcessor, load_processor, take_apart
from processors.media import ImageSource, MediaOptions
from processors.options import OptionTable
from processors.ranges import range_from_ids
from processors.selfcheck import count_alone, counts_of, image_texts, put_in
from processors.sizing import LargestImage, find_largest
from processors.types import ImageItem, ProcessedPrompt

__all__ = ["PromptProcessor"]

Prompt = str | Sequence[Mapping[str, object]] | Sequence[int]


class PromptProcessor:
    """One model's processor, made exact: ids, one range and one set of tensors an image. Safe to share by threads."""

    def __init__(
        self,
        loaded: LoadedProcessor,
        media: MediaOptions = MediaOptions(),  # noqa: B008
        cache_bytes: int = 256 * 1024 * 1024,
        workers: int | None = None,
    ) -> None:
        """Use `from_pretrained`."""
        self._loaded = loaded
        limits = loaded.options.limits
        self._images = ImagePreparer(
            loaded.expander, loaded.fingerprint, media, limits, cache_bytes, workers, loaded.feature_width
        )
        self._max_pixels = media.max_image_pixels
        self._lock = threading.Lock()
        self._largest: LargestImage | None = None
        self._encoder: PromptEncoder = loaded.encoder
        self._template: ChatTemplate | None = loaded.template
        self._options: OptionTable = loaded.options
        self.tokenizer = loaded.user_tokenizer
        """A tokenizer of the caller's own: reconfiguring it does not reach this processor."""
        self.image_token_id: int | None = loaded.feature_token_id
        """The id at the positions that take a feature row; None where images are read by cross attention."""
        self.placeholder_token_ids: tuple[int, ...] = loaded.placeholder_token_ids
        """Every id that stands for images: never to be generated."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        media: MediaOptions = MediaOptions(),  # noqa: B008
        trust_remote_code: bool = False,
        cache_bytes: int = 256 * 1024 * 1024,
        workers: int | None = None,
    ) -> PromptProcessor:
        """Load the processor of a local model folder and check it against its own whole-prompt call.

        Args:
            folder: A folder with the processor's files.
            media: Limits and choices for reading images.
            trust_remote_code: Whether code that lies in the folder may run.
            cache_bytes: Processed images kept, in bytes of their tensors; 0 keeps none.
            workers: Threads for the images of one prompt; None: one a core, at most 8.

        Raises:
            UnsupportedProcessorError: No processor there, or one that can not be used; the message says why.
        """
        return cls(load_processor(Path(folder), trust_remote_code), media, cache_bytes, workers)

    @classmethod
    def from_processor(
        cls,
        processor: Any,
        *,
        media: MediaOptions = MediaOptions(),  # noqa: B008
        model_config: Mapping[str, object] | None = None,
        cache_bytes: int = 256 * 1024 * 1024,
        workers: int | None = None,
    ) -> PromptProcessor:
        """Take over a Hugging Face processor that is already in memory; nobody else may use it afterwards.

        `model_config` is the content of the model's config.json: where it names the image token, it is believed.

        Raises:
            UnsupportedProcessorError: It can not be used; the message says why.
        """
        return cls(take_apart(processor, model_config or {}), media, cache_bytes, workers)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def pixel_normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation a channel that pixels in 0..1 are normalised with; None if they are not."""
        images = getattr(self._loaded.processor, "image_processor", None)
        if images is None or not getattr(images, "do_normalize", False):
            return None
        return tuple(images.image_mean), tuple(images.image_std)

    @property
    def patch_geometry(self) -> tuple[int, int, int] | None:
        """Side of a patch, its frames, and patches a side that are merged; None where it does not say all three."""
        images = getattr(self._loaded.processor, "image_processor", None)
        found = [getattr(images, name, None) for name in ("patch_size", "temporal_patch_size", "merge_size")]
        side, frames, merge = (number if isinstance(number, int) and number > 0 else None for number in found)
        return None if side is None or frames is None or merge is None else (side, frames, merge)

    @property
    def rows_per_tile(self) -> int | None:
        """Feature rows of every tile, where the processor declares one number for all."""
        declared = (getattr(self._loaded.processor, name, None) for name in ("image_seq_length", "image_seq_len"))
        return next((number for number in declared if isinstance(number, int) and number > 0), None)

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raises OptionError if an option is unknown (the message lists the known) or leads to too large an image."""
        self._options.check(options, self._max_pixels)

    def describe(self) -> dict[str, object]:
        """What was loaded and how prompts are made of it; JSON-friendly."""
        return {**self._loaded.description, "image_cache": self._images.cache.stats()}

    def largest_image(self) -> LargestImage:
        """The picture that takes the most tokens: how many, and of which size; searched once, up to 10,000 a side.

        To profile memory, process a blank picture of that size: it is no larger than it must be.
        """
        with self._lock:
            if self._largest is None:
                self._largest = find_largest(self._loaded.counts, self._tokens_of)
            return self._largest

    def max_image_tokens(self) -> int:
        """The most tokens of a prompt that one image can take, structural tokens included."""
        return self.largest_image().length

    def _tokens_of(self, size: tuple[int, int]) -> ImageCounts:
        """What a blank picture of (width, height) takes; nothing of it is kept."""
        from PIL import Image

        blank = Image.new("RGB", size)
        loaded = self._loaded
        return count_alone(blank, loaded.expander, self._encoder, loaded.feature_token_id, loaded.types)

    def close(self) -> None:
        """End the worker threads and let go of cached images; both come back when needed."""
        self._images.close()
        self._images.cache.clear()

    def process(
        self,
        prompt: Prompt,
        images: Sequence[ImageSource | ImageFeatures] = (),
        *,
        raw: bool = False,
        options: Mapping[str, object] | None = None,
        image_ids: Sequence[str | None] | None = None,
        add_generation_prompt: bool = True,
    ) -> ProcessedPrompt:
        """Make one prompt ready for the model.

        Args:
            prompt: Text: one user turn through the chat template, images first (taken raw if `raw`, or if the model
                has no template). Messages: OpenAI-style. Ids: with one placeholder an image, or fully expanded.
            images: In the order of their positions in the prompt; for messages, those of the bare image parts. An
                image may be given as its rows (`ImageFeatures`).
            raw: Take text verbatim: with the model's own image tokens, or `<image>` marks, or without either, and
                then the images stand in front.
            options: Processor options of this request, e.g. `{"max_pixels": 200_000}`.
            image_ids: The caller's own name of each image's content; replaces hashing its pixels.
            add_generation_prompt: End a chat with the beginning of the model's answer.

        Raises:
            PromptError: Prompt and images do not fit together, with both numbers.
            MediaError: An image can not be read.
            OptionError: An option is unknown or out of range.
        """
        chosen = dict(options or {})
        self.check_options(chosen)
        if not isinstance(images, (list, tuple)):
            raise PromptError(f"images must be a list, also for one image; got a {type(images).__name__}")
        segments, sources, text, given_ids = self._read_prompt(prompt, list(images), raw, add_generation_prompt)
        if image_ids is not None and len(image_ids) != len(sources):
            raise PromptError(f"{len(image_ids)} image ids were given for {len(sources)} images")
        most = self._loaded.family.most_images
        if most is not None and len(sources) > most:
            raise PromptError(f"this model takes at most {most} image a prompt, but {len(sources)} were given")
        names = list(image_ids) if image_ids is not None else [None] * len(sources)
        prepared = self._images.prepare(sources, chosen, names)
        if not prepared and self._loaded.family.needs_image:
            raise PromptError("this model takes no prompt without an image")
        expansions = [image.expansion for image in prepared]
        if given_ids is not None:
            encoded = self._place(given_ids, expansions)
        else:
            encoded = self._encoder.encode(put_in(self._loaded.processor, self._loaded.family, segments, expansions))
        return self._assemble(encoded, prepared, chosen, text)

    def _read_prompt(
        self, prompt: Prompt, images: list[Any], raw: bool, add_generation_prompt: bool
    ) -> tuple[list[Segment], list[Any], str, list[int] | None]:
        """Segments, image sources in prompt order, the text, and the ids if ids were given."""
        if isinstance(prompt, str):
            if not prompt and not images:
                raise PromptError("the prompt is empty and there is no image")
            if raw or self._template is None:
                mark = self._template.image_mark if self._template else self._loaded.image_token
                segments = segment_raw(prompt, len(images), self._loaded.image_token, mark, self._encoder.bos)
                return segments, images, prompt, None
            parts: list[dict[str, object]] = [{"type": "image"} for _ in images]
            if prompt:
                parts.append({"type": "text", "text": prompt})
            prompt = [{"role": "user", "content": parts}]
        if not isinstance(prompt, (list, tuple)):
            raise PromptError(f"a prompt is text, messages or ids, not a {type(prompt).__name__}")
        if prompt and all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
            ids = [int(item) for item in prompt if isinstance(item, Integral)]
            check_ids(ids, self._loaded.num_ids)
            return [], images, "", ids
        messages, sources = collect_parts(prompt, images)
        if any(source is None for source in sources):
            raise PromptError(f"{len(sources)} image parts, but only {len(images)} images were given")
        if self._template is None:
            raise PromptError("this model has no chat template: give a raw prompt string instead of messages")
        segments = self._template.segments(messages, len(sources), add_generation_prompt)
        return segments, sources, "".join(s.text for s in segments), None

    def _place(self, ids: list[int], expansions: Sequence[Expansion]) -> EncodedPrompt:
        own = frozenset(self.placeholder_token_ids)
        texts = image_texts(self._loaded.processor, self._loaded.family, expansions)
        images = [ImageIds.of(self._encoder.encode_continued(text), own) for text in texts]
        return place_in_ids(ids, images, self._loaded.placeholder_id, own)

    def _assemble(
        self, encoded: EncodedPrompt, prepared: Sequence[PreparedImage], options: Mapping[str, object], text: str
    ) -> ProcessedPrompt:
        # A family that processes an image among others in another way declares counts for an image alone.
        declared = not options and not (self._loaded.family.company and len(prepared) > 1)
        items: list[ImageItem] = []
        for image, span in zip(prepared, encoded.image_spans, strict=True):
            placed = range_from_ids(encoded.token_ids, span, self._loaded.feature_token_id)
            made = counts_of(encoded, span, self._loaded.feature_token_id, self._loaded.types)
            if declared:
                self._loaded.counts.check(image.size, made)
            if image.features is not None:
                check_count(image.features, placed.num_embeds, len(items) + 1)
            items.append(ImageItem(image.key, placed, image.expansion.tensors, image.size, image.features))
        return ProcessedPrompt(
            token_ids=encoded.token_ids,
            images=tuple(items),
            prompt_tensors=self._prompt_tensors(encoded, prepared),
            mm_token_type_ids=self._loaded.types.types(encoded.token_ids, encoded.image_spans),
            text=text,
            new_bytes=sum(image.expansion.nbytes() for image in prepared if image.is_new),
        )

    def _prompt_tensors(self, encoded: EncodedPrompt, prepared: Sequence[PreparedImage]) -> dict[str, Any]:
        """The outputs that belong to the whole prompt."""
        tensors = [image.expansion.tensors for image in prepared]
        made = {
            name: make(self._loaded.processor, encoded.token_ids, tensors)
            for name, make in self._loaded.family.prompt_outputs.items()
        }
        return {name: value for name, value in made.items() if value is not None}

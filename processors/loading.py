"""A model folder -> its processor, taken apart into what a prompt needs, and checked."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processors.chat import ChatTemplate, Renderer
from processors.counts import DeclaredCounts
from processors.encode import PromptEncoder
from processors.errors import PromptError, UnsupportedProcessorError, shorten
from processors.expand import ImageExpander, call_errors
from processors.families import Family, family_of
from processors.hashing import fingerprint
from processors.model_config import TextModel
from processors.options import OptionTable
from processors.ranges import TypeRule
from processors.selfcheck import CheckedProcessor, check_processor

__all__ = ["LoadedProcessor", "load_processor", "take_apart"]


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """Everything that `PromptProcessor` works with."""

    processor: Any
    family: Family
    encoder: PromptEncoder
    expander: ImageExpander
    template: ChatTemplate | None
    options: OptionTable
    user_tokenizer: Any
    image_token: str
    placeholder_id: int
    feature_token_id: int | None
    placeholder_token_ids: tuple[int, ...]
    types: TypeRule
    counts: DeclaredCounts
    feature_width: int | None
    num_ids: int
    fingerprint: str
    description: Mapping[str, object]


def load_processor(folder: Path, trust_remote_code: bool) -> LoadedProcessor:
    """Load and check. Raises UnsupportedProcessorError with the reason."""
    return take_apart(_from_folder(folder, trust_remote_code), _model_config(folder))


def take_apart(processor: Any, model_config: Mapping[str, object]) -> LoadedProcessor:
    """Take a Hugging Face processor apart and check it. It belongs to the result from then on.

    Raises:
        UnsupportedProcessorError: It can not be used; the message says why.
    """
    name = type(processor).__name__
    family = family_of(name)
    if family.refused is not None:
        raise UnsupportedProcessorError(f"{name}: {family.refused}")
    if family.complete is not None:
        family.complete(processor, model_config)
    image_token = _image_token(processor, family)
    expander = ImageExpander(processor, family)
    placeholders = _placeholder_ids(processor, image_token)
    template, source = _chat_template(processor, image_token, placeholders)
    user_tokenizer = copy.deepcopy(processor.tokenizer)
    encoder = PromptEncoder(processor.tokenizer, family.special_tokens and _adds_special_tokens(processor))
    checked = check_processor(processor, family, image_token, encoder, expander, model_config)
    text_model = TextModel.of(model_config)
    return LoadedProcessor(
        processor=processor,
        family=family,
        encoder=encoder,
        expander=expander,
        template=template,
        options=OptionTable.of(processor),
        user_tokenizer=user_tokenizer,
        image_token=image_token,
        placeholder_id=int(processor.tokenizer.convert_tokens_to_ids(image_token)),
        feature_token_id=checked.feature_id,
        placeholder_token_ids=_with(placeholders, checked.feature_id),
        types=checked.types,
        counts=checked.counts,
        feature_width=text_model.width,
        num_ids=_num_ids(processor, text_model, placeholders),
        fingerprint=_fingerprint(processor),
        description={
            **_describe(processor, family, image_token, source, checked),
            "pictures_given_as": "packed pixels" if expander.takes_planes else "PIL images",
            "feature_width": text_model.width,
        },
    )


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    failures: tuple[type[Exception], ...] = (ImportError, *call_errors())
    if not folder.is_dir():
        raise UnsupportedProcessorError(f"{shorten(str(folder))} is no folder")
    try:
        processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except failures as error:
        raise UnsupportedProcessorError(
            f"the processor in {shorten(str(folder))} can not be loaded: {shorten(str(error), 300)}"
        ) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise UnsupportedProcessorError(
            f"{shorten(str(folder))} has a {type(processor).__name__}, not a processor for text and images: "
            "are preprocessor_config.json or processor_config.json, and the tokenizer's files, missing?"
        )
    return processor


def _placeholder_ids(processor: Any, image_token: str) -> tuple[int, ...]:
    """Ids that the processor itself counts as belonging to images."""
    ids = [*processor.image_token_ids, processor.tokenizer.convert_tokens_to_ids(image_token)]
    return tuple(sorted({int(i) for i in ids if i is not None}))


def _with(ids: Sequence[int], more: int | None) -> tuple[int, ...]:
    return tuple(ids) if more is None else tuple(sorted({*ids, more}))


def _num_ids(processor: Any, text_model: TextModel, placeholders: Sequence[int]) -> int:
    """Ids that a prompt may hold: what the tokenizer knows, or the model, whose table may have more rows.

    An image's placeholder may lie behind both: it is never looked up.
    """
    known = max(processor.tokenizer.get_vocab().values(), default=-1) + 1
    return max(known, text_model.vocabulary or 0, *(i + 1 for i in placeholders))


def _image_token(processor: Any, family: Family) -> str:
    token = getattr(processor, family.image_token, None)
    if token is None:
        raise UnsupportedProcessorError(
            f"{type(processor).__name__} has no image token, so images have no place in its prompts"
        )
    return str(token)


def _model_config(folder: Path) -> Mapping[str, object]:
    config = folder / "config.json"
    if not config.is_file():
        return {}
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedProcessorError(f"{shorten(str(config))} can not be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _adds_special_tokens(processor: Any) -> bool:
    """Whether the processor lets its tokenizer add special tokens to a prompt."""
    settings = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)["text_kwargs"]
    return bool(settings.get("add_special_tokens", True))


def _chat_template(processor: Any, image_token: str, placeholders: Sequence[int]) -> tuple[ChatTemplate | None, str]:
    """The chat template, the processor's first, and where it came from."""
    for source, owner in (("processor", processor), ("tokenizer", processor.tokenizer)):
        template = getattr(owner, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        if template:
            added = processor.tokenizer.added_tokens_decoder
            control = {t.content for t in added.values() if t.special or t.content in template}
            control |= {str(processor.tokenizer.convert_ids_to_tokens(i)) for i in placeholders} | {image_token}
            control = {token for token in control if token and not token.isspace()}
            return ChatTemplate.probe(_renderer(processor, template), image_token, sorted(control)), source
    return None, "none: prompts are taken raw"


def _renderer(processor: Any, template: str) -> Renderer:
    import jinja2

    refusals: tuple[type[Exception], ...] = (jinja2.TemplateError, *call_errors())

    def render(messages: list[dict[str, object]], add_generation_prompt: bool) -> str:
        try:
            text = processor.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except refusals as error:
            raise PromptError(f"the chat template refuses these messages: {shorten(str(error), 200)}") from error
        return str(text)

    return render


def _fingerprint(processor: Any) -> str:
    import transformers

    return fingerprint(transformers.__version__, type(processor.image_processor).__name__, processor.to_json_string())


def _describe(
    processor: Any, family: Family, image_token: str, template_source: str, checked: CheckedProcessor
) -> dict[str, object]:
    reported = family.replacement is None
    return {
        "processor": type(processor).__name__,
        "image_processor": type(processor.image_processor).__name__,
        "tokenizer": type(processor.tokenizer).__name__,
        "image_token": image_token,
        "chat_template": template_source,
        "token_counts": "the processor's own expansion of each image, encoded with the prompt",
        "image_text": "reported by the processor" if reported else "rebuilt from the processor's outputs",
        "tensor_split": "each image is processed alone"
        + ("; one among others with a copy of itself beside it" if family.company else ""),
        "tensors": list(checked.tensor_names),
        "prompt_tensors": sorted(family.prompt_outputs),
        "compared_with_own_call_over": [list(shape) for shape in checked.shapes],
        "token_types": checked.types.kind,
        "declared_counts": checked.counts.kind or "none",
        "options": sorted(OptionTable.of(processor).known),
    }

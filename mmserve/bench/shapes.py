"""Models in the shape of published ones, with random weights: what a benchmark needs and nobody has to download.

Times depend on shapes and dtypes, not on what the weights say. Tokenizer and processor are the family's own
classes over a made-up vocabulary of the right size, so that a prompt takes the same path and has the same length.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mmserve.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["SHAPES", "build_shape"]

_IDEFICS_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
_QWEN_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}END\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def build_shape(name: str, folder: Path, *, dtype: torch.dtype | None = None, seed: int = 0) -> Path:
    """Write a model folder of the shape called `name`, unless `folder` holds one already.

    Args:
        name: One of `SHAPES`.
        folder: Where; made if it is not there.
        dtype: Of the weights; None: bfloat16.
        seed: Of the random weights.

    Raises:
        ConfigError: There is no such shape; lists those there are.
    """
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    config, processor = SHAPES[name]()
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype or torch.bfloat16)
    text = config.get_text_config()
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)  # last: config.json says that the folder is whole
    return folder


def _smolvlm_256m() -> tuple[Any, Any]:
    """SmolVLM-256M-Instruct (its architecture is Idefics 3): SigLIP base on 512-pixel tiles, a Llama of 135M."""
    from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor

    tokenizer = _tokenizer(49280, _IDEFICS_SPECIALS)
    text = {
        "model_type": "llama", "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    images = Idefics3ImageProcessor(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    template = _TEMPLATE.replace("IMAGE", "<image>").replace("END", "<end_of_utterance>")
    return config, Idefics3Processor(images, tokenizer, image_seq_len=64, chat_template=template)


def _qwen_small() -> tuple[Any, Any]:
    """Qwen2.5-VL in small: window attention in the tower, M-RoPE, grouped heads with biases."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = _tokenizer(32768, _QWEN_SPECIALS)
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 8, "hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "out_hidden_size": 512,
        "fullatt_block_indexes": [3, 7],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    template = _TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace("END", "<|im_end|>")
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=template)
    return config, processor


def _tokenizer(size: int, specials: tuple[str, ...]) -> Any:
    """A byte-level tokenizer of `size` entries: special tokens, the bytes, and words that no text holds."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"Ġw{number}" for number in range(size - len(entries))]
    backend = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token=specials[2],
        pad_token=specials[2],
        clean_up_tokenization_spaces=False,
    )


SHAPES: Final[dict[str, Callable[[], tuple[Any, Any]]]] = {
    "smolvlm-256m": _smolvlm_256m,
    "qwen2.5-vl-small": _qwen_small,
}
"""Name -> what makes its config and processor."""

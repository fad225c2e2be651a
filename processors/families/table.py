"""Processor class -> what is different about it. A class that is not here has nothing of its own."""

from __future__ import annotations

from types import MappingProxyType

from processors.families import framing, fuyu, idefics2, llava, mllama, numbering, outputs
from processors.families.spec import Family

__all__ = ["FAMILIES", "family_of"]

_NUMBERED = Family(numbered=numbering.renumber)
_CHANNELS_LAST = MappingProxyType({"input_data_format": "channels_last"})
"""For image processors that would take a picture of one column for one of one channel."""
_AS_ARRAYS = MappingProxyType({"return_tensors": "np"})
"""For processors that read their own outputs back with numpy, which is deprecated for tensors."""
_ENCODER_DECODER = Family(refused="an encoder-decoder: images go to its encoder, not into a prompt of token ids")
_NO_PLACE = Family(refused="its images have no place among the prompt's tokens")

FAMILIES = MappingProxyType(
    {
        "Blip2Processor": Family(
            refused="it puts image tokens in front of the beginning-of-sequence token, outside of the prompt's text"
        ),
        "BlipProcessor": _NO_PLACE,
        "ChameleonProcessor": Family(layout=framing.end_with_separator),
        "Emu3Processor": Family(layout=framing.begin_with_bos, call_options=_CHANNELS_LAST),
        "Ernie4_5_VLMoeProcessor": Family(
            prompt_outputs={"moe_mm_token_type_ids": outputs.expert_types}, call_options=_AS_ARRAYS
        ),
        "EvollaProcessor": Family(refused="it takes proteins, not images"),
        "Florence2Processor": _ENCODER_DECODER,
        "Gemma3Processor": Family(declares_counts=False),  # knows nothing of pan-and-scan crops
        "FuyuProcessor": Family(
            replacement=fuyu.without_bos,
            layout=fuyu.image_first,
            call_options=MappingProxyType({"return_legacy_image_output": False}),
            declares_counts=False,  # by code that is deprecated, with a warning at every size
            most_images=1,
            writes_token=True,
        ),
        "GitProcessor": _NO_PLACE,
        "Glm46VProcessor": Family(call_options=_AS_ARRAYS),
        "Glm4vProcessor": Family(call_options=_AS_ARRAYS),
        "Glm5NextProcessor": Family(call_options=_AS_ARRAYS),
        "GotOcr2Processor": Family(nested_images=False, needs_image=True),
        "HunYuanVLProcessor": Family(enclosed=("image_start_token", "image_end_token")),
        "Idefics2Processor": Family(replacement=idefics2.replacement, layout=idefics2.share_boundaries),
        "IdeficsProcessor": Family(refused="it interleaves images by cross attention, without placeholder tokens"),
        "InstructBlipProcessor": Family(
            refused="it puts image tokens in front of the beginning-of-sequence token, outside of the prompt's text"
        ),
        "InstructBlipVideoProcessor": Family(refused="it takes videos, not images"),
        "JanusProcessor": Family(layout=framing.begin_with_system_prompt),
        "Kosmos2Processor": Family(refused="it marks images by a position mask, without placeholder tokens"),
        "Kosmos2_5Processor": Family(refused="it marks images by a position mask, without placeholder tokens"),
        "LlavaNextProcessor": Family(complete=llava.complete),
        "LlavaNextVideoProcessor": Family(complete=llava.complete),
        "LlavaOnevisionProcessor": Family(company=True, complete=llava.complete_onevision),
        "LlavaProcessor": Family(complete=llava.complete),
        "MiniCPMOcrProcessor": _NUMBERED,
        "MiniCPMV4_6Processor": _NUMBERED,
        "MiniCPMV4_7Processor": _NUMBERED,
        "MllamaProcessor": Family(
            replacement=mllama.own_token,
            layout=mllama.bos_behind_first_images,
            prompt_outputs={"cross_attention_mask": mllama.cross_attention_mask},
            special_tokens=False,
            takes_rows=False,
        ),
        "Molmo2Processor": Family(layout=framing.begin_with_bos),
        "PI0Processor": Family(refused="a robot policy: it makes actions, not text"),
        "PPChart2TableProcessor": _NO_PLACE,
        "PPFormulaNetProcessor": _ENCODER_DECODER,
        "NemotronH_Omni_Reasoning_V3Processor": Family(replacement=outputs.replacement_of_outputs),
        "PaliGemmaProcessor": Family(
            layout=framing.bos_behind_images,
            dropped_outputs=("labels",),
            needs_image=True,
            call_options=_AS_ARRAYS,
        ),
        "Pix2StructProcessor": _ENCODER_DECODER,
        "QianfanOCRProcessor": Family(image_token="image_placeholder_token"),
        "ShieldGemma2Processor": Family(refused="a safety classifier that writes its prompts itself"),
        "UdopProcessor": _ENCODER_DECODER,
        "VideoLlavaProcessor": Family(call_options=_CHANNELS_LAST),
    }
)
"""Only what differs, and why what is refused is refused."""


def family_of(processor_class: str) -> Family:
    """The entry of a processor class, or the defaults."""
    return FAMILIES.get(processor_class, Family())

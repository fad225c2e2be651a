"""Image+text architectures whose packed path was compared with `generate()`: they take it by default.

A model of another type may do something with an image that a look at its text layers does not show
(rows for several layers, other experts for image tokens), so it runs through `generate()` itself until
a tiny model of its kind has shown the same tokens on both paths: tests/parity/test_family_parity.py.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PROVEN"]

PROVEN: Final = frozenset(
    {
        "aria",
        "aya_vision",
        "cohere2_vision",
        "cosmos3_edge",
        "cosmos3_omni",
        "deepseek_vl",
        "exaone4_5",
        "gemma3",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "glmga",
        "got_ocr2",
        "hyperclovax_vision_v2",
        "idefics2",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lighton_ocr",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "mistral3",
        "muse_glimmer",
        "ovis2",
        "paddleocr_vl",
        "paligemma",
        "pp_chart2table",
        "qianfan_ocr",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_omni_moe_thinker",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
        "video_llama_3",
        "video_llava",
        "vipllava",
    }
)

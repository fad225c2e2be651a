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
        "apertus1p5",
        "aria",
        "aya_vision",
        "chameleon",
        "cohere_compass",
        "cohere2_vision",
        "cosmos3_edge",
        "cosmos3_omni",
        "deepseek_ocr2",
        "deepseek_vl",
        "deepseek_vl_hybrid",
        "emu3",
        "ernie4_5_vl_moe",
        "exaone4_5",
        "fast_vlm",
        "fuyu",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "glmga",
        "got_ocr2",
        "granite4_vision",
        "granite_docling",
        "hunyuan_vl",
        "hyperclovax_vision_v2",
        "idefics2",
        "idefics3",
        "internvl",
        "janus",
        "kimi_k25",
        "lighton_ocr",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "minimax_m3_vl",
        "mistral3",
        "mistral4",
        "muse_glimmer",
        "muse_spark",
        "ovis2",
        "paddleocr_vl",
        "paligemma",
        "perception_lm",
        "pp_chart2table",
        "qianfan_ocr",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_omni_moe_thinker",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
        "step3p7",
        "video_llama_3",
        "video_llava",
        "vipllava",
    }
)

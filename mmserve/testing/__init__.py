"""For users' tests.

`MockModel` and `ByteTokenizer` run the whole engine in milliseconds; `golden_test` checks a real model's answers
against recorded ones.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmserve.testing.byte_tokenizer import ByteTokenizer
    from mmserve.testing.golden import check_case, find_cases, golden_test, record_case, save_request
    from mmserve.testing.mock_model import MockModel, mock_image, mock_prompt

__all__ = [
    "ByteTokenizer",
    "MockModel",
    "check_case",
    "find_cases",
    "golden_test",
    "mock_image",
    "mock_prompt",
    "record_case",
    "save_request",
]

_HOMES = {
    "ByteTokenizer": "mmserve.testing.byte_tokenizer",
    "MockModel": "mmserve.testing.mock_model",
    "check_case": "mmserve.testing.golden",
    "find_cases": "mmserve.testing.golden",
    "golden_test": "mmserve.testing.golden",
    "mock_image": "mmserve.testing.mock_model",
    "mock_prompt": "mmserve.testing.mock_model",
    "record_case": "mmserve.testing.golden",
    "save_request": "mmserve.testing.golden",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: a golden test has no use for the mock's torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mmserve.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

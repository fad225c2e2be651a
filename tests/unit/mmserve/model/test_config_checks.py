"""The check of a config's numbers refuses nothing that a family has by default, and what can not be, by its name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

from mmserve.model.config_checks import contradiction

_AUTOS: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)
_NO_DEFAULTS = {"gemma4_assistant"}
"""Families whose config class refuses its own defaults."""


def test_every_family_s_own_defaults_are_accepted() -> None:
    names = {name for auto in _AUTOS for name in auto._model_mapping._model_mapping} - _NO_DEFAULTS
    refused = {name: contradiction(AutoConfig.for_model(name)) for name in names}
    assert len(names) > 200
    assert {name: reason for name, reason in refused.items() if reason is not None} == {}


@pytest.mark.parametrize("field", ["head_dim", "sliding_window", "max_window_layers"])
@pytest.mark.parametrize("value", [0, None, 7])
def test_nought_says_that_there_is_none(field: str, value: int | None) -> None:
    config = LlamaConfig()
    setattr(config, field, value)
    assert contradiction(config) is None


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_what_can_not_be_is_named(value: float) -> None:
    config = LlamaConfig()
    config.sliding_window = value
    assert contradiction(config) == f"sliding_window is {value}, and must be at least 0 and finite"

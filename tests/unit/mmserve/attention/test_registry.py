"""Choosing a backend: unknown names, declines with reasons, nothing imported before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracle import spec_of

from mmserve.attention.interface import AttentionSpec
from mmserve.attention.reference import ReferenceBackend
from mmserve.attention.registry import AUTO_ORDER, choose_backend, known_backends, make_backend
from mmserve.errors import BackendError


class Choosy(ReferenceBackend):
    name = "choosy"

    def declines(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
        return f"head size {spec.head_size} is not a multiple of 16" if spec.head_size % 16 else None


def choose(head_size: int, *backends: ReferenceBackend):
    return choose_backend(backends, spec_of(4, 2, head_size), torch.float32, torch.device("cpu"), 16)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(BackendError, match=r"unknown attention backend 'flash9'; known: auto, .*reference"):
        make_backend("flash9")


def test_every_known_name_can_be_made() -> None:
    assert set(AUTO_ORDER) <= set(known_backends())
    for name in known_backends():
        assert make_backend(name).name == name


def test_first_that_serves_wins_and_reasons_are_kept() -> None:
    assert choose(16, Choosy(), ReferenceBackend()).backend.name == "choosy"
    choice = choose(8, Choosy(), ReferenceBackend())
    assert choice.backend.name == "reference"
    assert choice.declined == ("choosy: head size 8 is not a multiple of 16",)


def test_a_forced_backend_that_declines_is_an_error_with_its_reason() -> None:
    with pytest.raises(BackendError, match=r"head_size=8.*choosy: head size 8 is not a multiple of 16"):
        choose(8, Choosy())


def test_registry_imports_no_backend() -> None:
    code = "import sys, mmserve.attention.registry as r; r.known_backends(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

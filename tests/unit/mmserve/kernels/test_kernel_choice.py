"""Which instruction sets the library offers: what processor, system and compiler have, and what is said otherwise."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mmserve.kernels import build
from mmserve.kernels.build import SOURCES, WITHOUT_MATRIX

Offer = Callable[..., tuple[list[str], str]]


def processor_has(*features: str) -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return set(features) <= set(next((line for line in lines if line.startswith("flags")), "").split())


MATRIX_UNITS = processor_has("amx_tile", "amx_bf16", "avx512_bf16")


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> Offer:
    """Sets and what is missing, of a library compiled with `flags` and asked with `words`."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler for x86-64")
    if WITHOUT_MATRIX in build._flags(compiler):
        pytest.skip("the compiler has no instructions of matrix units")
    folder = tmp_path_factory.mktemp("choice")
    sources = [Path(__file__).with_name("choice.cpp"), SOURCES / "dispatch.cpp"]

    def ask(*words: str, flags: Sequence[str] = ()) -> tuple[list[str], str]:
        program = folder / "".join(["choice", *flags])
        if not program.exists():
            subprocess.run([compiler, "-std=c++20", *flags, f"-I{SOURCES}", *sources, "-o", program], check=True)
        said = subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout
        sets, missing = said.splitlines()
        return sets.split(), missing

    return ask


def test_the_best_comes_first_and_nothing_is_missing(offer: Offer) -> None:
    sets, missing = offer()
    assert sets == [name for name in ("amx", "avx512", "avx2", "plain") if name in sets]
    assert ("amx" in sets) == MATRIX_UNITS
    assert sets[-1] == "plain"
    assert not missing


def test_tile_registers_that_the_system_does_not_grant(offer: Offer) -> None:
    sets, missing = offer("refused")
    assert sets == [name for name in offer()[0] if name != "amx"]
    assert missing == ("amx: the system does not grant the tile registers" if MATRIX_UNITS else "")


def test_a_compiler_that_has_not_the_instructions(offer: Offer) -> None:
    sets, missing = offer(flags=[WITHOUT_MATRIX])
    assert sets == [name for name in offer()[0] if name != "amx"]
    assert missing == ("amx: the compiler has not its instructions" if MATRIX_UNITS else "")

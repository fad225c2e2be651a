"""Every kernel test runs for each instruction set of the compiled library, and for the torch code."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from mmserve.kernels import fallback
from mmserve.kernels.interface import KernelLibrary
from mmserve.kernels.library import native_module, status


@pytest.fixture(scope="session")
def compiled() -> ModuleType:
    """The compiled library."""
    module = native_module()
    if module is None:
        pytest.skip(f"no compiled kernels: {status().reason}")
    return module


@pytest.fixture(params=["amx", "avx512", "avx2", "plain", "torch"])
def library(request: pytest.FixtureRequest) -> Iterator[KernelLibrary]:
    """The functions under test: one instruction set, or the torch code."""
    if request.param == "torch":
        yield fallback  # type: ignore[misc]
        return
    module = request.getfixturevalue("compiled")
    if request.param not in module.available_instruction_sets():
        pytest.skip(f"this processor can not run {request.param}")
    before = module.active_instruction_set()
    module.use_instruction_set(request.param)
    yield module
    module.use_instruction_set(before)

"""Every kernel test runs for each instruction set of the compiled library, and for the torch code."""

from __future__ import annotations

import contextlib
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


_SETS = ["amx", "avx512", "avx2", "plain"]


@contextlib.contextmanager
def _running(module: ModuleType, name: str) -> Iterator[ModuleType]:
    if name not in module.available_instruction_sets():
        pytest.skip(f"this processor can not run {name}")
    before = module.active_instruction_set()
    module.use_instruction_set(name)
    yield module
    module.use_instruction_set(before)


@pytest.fixture(params=_SETS)
def native(request: pytest.FixtureRequest, compiled: ModuleType) -> Iterator[ModuleType]:
    """The compiled library, on one instruction set."""
    with _running(compiled, request.param) as module:
        yield module


@pytest.fixture(params=[*_SETS, "torch"])
def library(request: pytest.FixtureRequest) -> Iterator[KernelLibrary]:
    """The functions under test: one instruction set, or the torch code."""
    if request.param == "torch":
        yield fallback  # type: ignore[misc]
        return
    with _running(request.getfixturevalue("compiled"), request.param) as module:
        yield module  # type: ignore[misc]

"""Compiling once: what goes wrong is said, what was built is kept, and processes do not get in each other's way."""

from __future__ import annotations

import multiprocessing
import platform
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmserve.errors import ConfigError
from mmserve.kernels import build, library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMSERVE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def _a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, whatever this machine has."""
    monkeypatch.setattr(build, "_compiler", lambda: "true")


def fake_compile(home: Path, flags: list[str]) -> None:
    """Notes that it ran; takes a while, as compiling does."""
    with (home.parent / "runs").open("a") as runs:
        runs.write("run\n")
    time.sleep(0.3)
    home.mkdir()
    (home / f"{build.NAME}.so").write_bytes(b"")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("c++", "no C\\+\\+ compiler: 'c\\+\\+' is not found"), ("ninja", "ninja.*pip install ninja")],
)
def test_says_what_is_missing(missing: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name, path=None: None if name == missing else f"/bin/{name}")
    with pytest.raises(build.BuildError, match=reason):
        build.build()


@pytest.mark.usefixtures("_a_compiler")
def test_a_failure_is_remembered_with_what_the_compiler_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(home: Path, flags: list[str]) -> None:
        raise build._CompilerError("error: expected ';'")

    monkeypatch.setattr(build, "_compile", fail)
    with pytest.raises(build.BuildError, match=r"compiling failed; .*failed says why"):
        build.build()
    (said,) = folder.glob("*.failed")
    assert said.read_text() == "error: expected ';'"

    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    with pytest.raises(build.BuildError, match="failed before"):
        build.build()


@pytest.mark.usefixtures("_a_compiler")
def test_a_cache_that_can_not_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMSERVE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="set MMSERVE_CACHE_DIR"):
        build.build()


def test_the_key_changes_with_sources_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._key("true")
    assert build._key("true") == before
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build._key("true") != before
    monkeypatch.undo()
    (tmp_path / "args.h").write_text("// other\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key("true") != before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="matrix units of x86-64")
@pytest.mark.parametrize("knows", [True, False])
def test_a_compiler_without_matrix_units_builds_the_rest(
    knows: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an assembler that is older than the compiler: it fails at what it does not know."""
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ncat | grep -q tdpbf16ps\nexit {0 if knows else 1}\n")
    compiler.chmod(0o755)
    seen: list[list[str]] = []

    def note(home: Path, flags: list[str]) -> None:
        seen.append(flags)
        fake_compile(home, flags)

    monkeypatch.setattr(build, "_compiler", lambda: str(compiler))
    monkeypatch.setattr(build, "_compile", note)
    monkeypatch.setattr(build, "_load", lambda library: library)
    build.build()
    assert seen == [[*build.FLAGS] if knows else [*build.FLAGS, "-DMMSERVE_WITHOUT_AMX"]]


def _build_in_a_process(folder: str) -> str:
    build._compile = fake_compile  # type: ignore[assignment]
    build._load = lambda library: library  # type: ignore[assignment,return-value,misc]
    build._compiler = lambda: "true"  # type: ignore[assignment]
    build._key = lambda compiler: "key"  # type: ignore[assignment]  # the real one imports torch
    build.cache_folder = lambda: Path(folder)  # type: ignore[assignment]
    return build.build()[1]


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        came_from = pool.map(_build_in_a_process, [str(tmp_path)] * 3, chunksize=1)
    assert (tmp_path / "kernels" / "runs").read_text() == "run\n"
    assert sum(origin.startswith("compiled") for origin in came_from) == 1
    assert sum(origin.startswith("cached") for origin in came_from) == 2


def test_sources_compile_where_there_is_a_compiler() -> None:
    """The tests of the kernels are skipped where there is none; that the sources are broken is no reason to."""
    assert "compiling failed" not in library.status().reason


def test_switched_off_and_misspelt() -> None:
    assert library._choose("off") == (None, "switched off by MMSERVE_KERNELS")
    with pytest.raises(ConfigError, match="known: auto, off, amx, avx512, avx2, plain"):
        library._choose("avx1024")


def test_each_instruction_set_can_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = library.native_module()
    if module is None:
        pytest.skip(f"no compiled kernels: {library.status().reason}")
    before = module.active_instruction_set()
    try:
        for name in module.available_instruction_sets():
            assert library._choose(name)[0].active_instruction_set() == name
        monkeypatch.setattr(module, "available_instruction_sets", lambda: ["plain"])
        with pytest.raises(ConfigError, match="'avx2', which this processor can not run"):
            library._choose("avx2")
    finally:
        module.use_instruction_set(before)


def test_what_is_missing_is_said_beside_where_the_library_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(missing_instruction_set=lambda: "amx: the compiler has not its instructions")
    monkeypatch.setattr(build, "build", lambda: (module, "cached in a folder"))
    assert library._choose("auto")[1] == "cached in a folder; without amx: the compiler has not its instructions"


def test_without_a_library_the_torch_code_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", (None, "there is no C++ compiler: 'c++' is not found"))
    assert library.kernels().__name__ == "mmserve.kernels.fallback"  # type: ignore[attr-defined]
    assert library.status().describe() == {
        "native": False,
        "instruction_set": None,
        "reason": "there is no C++ compiler: 'c++' is not found",
    }

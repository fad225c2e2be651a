"""Compile the C++ sources once and keep the library, for every later process, in the user's cache folder.

    <cache>/kernels/<key>/_mmserve_kernels.so     a finished build; appears whole, by a rename
    <cache>/kernels/<key>.lock                    held by the process that is building; freed with it
    <cache>/kernels/<key>.failed                  what the compiler said; delete it to try again

The key holds everything that a build depends on: sources, flags, torch, Python, machine and compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

__all__ = ["BuildError", "build", "cache_folder"]

NAME = "_mmserve_kernels"
SOURCES = Path(__file__).with_name("csrc")
UNITS = ("extension.cpp", "isa_amx.cpp", "isa_avx512.cpp", "isa_avx2.cpp", "isa_plain.cpp")
# -fopenmp for at::parallel_for, and nothing linked for it: torch brings the OpenMP library whose threads it uses.
# The uninitialized warnings are about the compiler's own intrinsics headers.
FLAGS = ("-O3", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized")
# A compiler may know the matrix units' instructions and its assembler not: what decides is whether one comes out.
MATRIX_TRIAL = """
#include <immintrin.h>
__attribute__((target("amx-tile,amx-bf16"))) void trial() { _tile_zero(0); _tile_dpbf16ps(0, 1, 2); }
"""
WITHOUT_MATRIX = "-DMMSERVE_WITHOUT_AMX"


class BuildError(Exception):
    """There is no library, and why."""


def build() -> tuple[ModuleType, str]:
    """The loaded library, and where it came from in words.

    Raises:
        BuildError: No compiler, no ninja, no place to write, or the compiler failed.
    """
    if os.name != "posix":
        raise BuildError(f"kernels are not compiled on {platform.system()}")
    compiler = _compiler()
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache folder can not be made: {error}; set MMSERVE_CACHE_DIR") from None
    home = folder / _key(compiler)
    library = home / f"{NAME}.so"
    if library.is_file():
        return _load(library), f"cached in {home}"
    with _locked(home.with_suffix(".lock")):
        if library.is_file():  # another process built it while this one waited
            return _load(library), f"cached in {home}"
        failed = home.with_suffix(".failed")
        if failed.is_file():
            raise BuildError(f"compiling failed before; {failed} says why, and deleting it means another try")
        started = time.monotonic()
        try:
            _compile(home, _flags(compiler))
        except _CompilerError as error:
            failed.write_text(str(error), encoding="utf-8")
            raise BuildError(f"compiling failed; {failed} says why") from error
        seconds = time.monotonic() - started
        _say(f"kernels compiled in {seconds:.0f} s, kept in {home}")
        return _load(library), f"compiled in {seconds:.0f} s, kept in {home}"


def cache_folder() -> Path:
    """$MMSERVE_CACHE_DIR, or mmserve in the user's cache folder."""
    if chosen := os.environ.get("MMSERVE_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mmserve"


class _CompilerError(Exception):
    """What the compiler said."""


def _compiler() -> str:
    """Path of the compiler that torch's extension builder will use; ninja is looked for too."""
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"there is no C++ compiler: {name!r} is not found")
    if shutil.which("ninja", path=_search_path()) is None:
        raise BuildError("ninja, which torch builds extensions with, is not found (pip install ninja)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise BuildError("Python's headers (Python.h) are not installed")
    return path


def _search_path() -> str:
    """PATH and the interpreter's own folder: pip puts ninja there, and an environment need not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def _key(compiler: str) -> str:
    import torch

    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.implementation.cache_tag, platform.machine(), version, *FLAGS):
        digest.update(f"{part}\0".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _flags(compiler: str) -> list[str]:
    """Those for this machine and compiler: without kernels for the matrix units where it can not make them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return list(FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-x", "c++", "-c", "-o", f"{folder}/trial.o", "-"]
        made = subprocess.run(command, input=MATRIX_TRIAL, capture_output=True, text=True, check=False).returncode == 0
    return list(FLAGS) if made else [*FLAGS, WITHOUT_MATRIX]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a process that dies."""
    import fcntl

    try:
        handle = path.open("w")
    except OSError as error:
        raise BuildError(f"the cache folder can not be written: {error}; set MMSERVE_CACHE_DIR") from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(home: Path, flags: list[str]) -> None:
    """Build in a folder of its own and rename it to `home`: no reader ever sees half a library."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it remarks on the absence of CUDA
    from torch.utils import cpp_extension

    _say("compiling CPU kernels, once for this machine (about half a minute)")
    before = os.environ.get("PATH")
    os.environ["PATH"] = _search_path()
    work = Path(tempfile.mkdtemp(prefix=f"{home.name}.build-", dir=home.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the builder warns of compilers it does not know
            cpp_extension.load(
                name=NAME,
                sources=[str(SOURCES / unit) for unit in UNITS],
                extra_cflags=flags,
                build_directory=str(work),
                is_python_module=True,
            )
        for file in work.iterdir():
            if file.suffix != ".so":
                file.unlink()
        work.rename(home)
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
        raise _CompilerError(str(error)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _load(library: Path) -> ModuleType:
    import torch  # noqa: F401  the library needs its symbols

    loader = ExtensionFileLoader(NAME, str(library))
    spec = spec_from_file_location(NAME, library, loader=loader)
    if spec is None:
        raise BuildError(f"{library} can not be loaded")
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{library} can not be loaded: {error}") from error
    return module


def _say(text: str) -> None:
    print(f"mmserve: {text}", file=sys.stderr, flush=True)  # noqa: T201  a wait of half a minute needs a word

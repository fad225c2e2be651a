"""The shape of the code base: who may import whom, what an import costs, what is exported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mmserve

ROOT = Path(__file__).parents[2]

# Lowest first; a module imports its own level or lower. The longest matching prefix counts.
LEVELS = {
    "processors": 0,
    "mmserve": 1,
    "mmserve.cache": 2,
    "mmserve.attention": 2,
    "mmserve.kernels": 2,
    "mmserve.parallel": 2,
    "mmserve.parallel.workers": 5,
    "mmserve.model": 3,
    "mmserve.engine": 4,
    "mmserve.requests": 5,
    "mmserve.assembly": 5,
    "mmserve.batching": 5,
    "mmserve.lookahead": 5,
    "mmserve.pipeline": 5,
    "mmserve.testing": 6,
    "mmserve.bench": 6,
    "mmserve.demo": 6,
    "mmserve.inspect": 6,
    "mmserve.conformance": 6,
    "mmserve.cli": 7,
    "mmserve.__main__": 7,
}
# The package root names the public face lazily; the assembly names the demo's folder as its default model.
ALLOWED = {("mmserve", "mmserve.pipeline"), ("mmserve.assembly", "mmserve.demo")}


def _modules() -> dict[str, Path]:
    files = [*ROOT.glob("processors/**/*.py"), *ROOT.glob("mmserve/**/*.py")]
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return dict(zip(names, files, strict=True))


def _level(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (level := LEVELS.get(".".join(parts[:end]))) is not None:
            return level
    raise AssertionError(f"{module} has no level: add its package to LEVELS")


def _imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] in ("mmserve", "processors")}


MODULES = _modules()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_downwards_only(module: str) -> None:
    upwards = {
        imported
        for imported in _imports(MODULES[module])
        if _level(imported) > _level(module) and (module, imported) not in ALLOWED
    }
    assert not upwards, f"{module} (level {_level(module)}) imports {upwards}"


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


@pytest.mark.parametrize("statement", ["import mmserve", "import processors", "from mmserve.cli import main"])
def test_an_import_loads_nothing_heavy(statement: str) -> None:
    loaded = json.loads(_run(f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"))
    heavy = {"torch", "transformers", "torchvision", "numpy", "PIL", "xformers", "huggingface_hub"} & set(loaded)
    assert not heavy


def test_import_and_help_answer_within_a_second() -> None:
    """Processor time, not the clock: a busy machine must not fail this."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'mmserve', '--help'], check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    assert float(_run(code)) < 1.0


def test_every_exported_name_is_there() -> None:
    assert set(mmserve.__all__) >= {"MMPipeline", "GenerationRequest", "SamplingParams", "EngineConfig"}
    for name in mmserve.__all__:
        assert getattr(mmserve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = mmserve.Nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))

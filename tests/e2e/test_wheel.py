"""The wheel: what it holds, how large it is, and that it works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from mmserve.demo.pictures import Shape, draw_shapes

ROOT = Path(__file__).parents[2]
MOST_BYTES = 15_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_both_packages_and_the_demo_model_and_stays_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "mmserve/py.typed",
        "processors/py.typed",
        "mmserve/pipeline.py",
        "processors/types.py",
        "mmserve/demo/model/config.json",
        "mmserve/demo/model/model.safetensors",
    } <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"mmserve", "processors"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_works_in_an_empty_environment_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Only the wheel is installed anew; its dependencies are lent by the environment that runs the tests."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    picture = tmp_path / "picture.png"
    draw_shapes((Shape("circle", "red", "center"),)).save(picture)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import mmserve, processors; print(mmserve.__file__, processors.__file__)")
    assert all(Path(file).is_relative_to(site) for file in where.split())
    answer = run(str(scripts / "mmserve"), "generate", "--image", str(picture), "--prompt", "What color is the circle?")
    assert "red" in answer.lower()

"""A place like a new user's: two photos, and a model at `path/to/model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmserve.demo import demo_model_folder
from mmserve.demo.pictures import Shape, draw_shapes


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test: photo.jpg (a yellow star), other.jpg (a red circle), path/to/model."""
    draw_shapes((Shape("star", "yellow", "top left"),)).save(tmp_path / "photo.jpg", quality=95)
    draw_shapes((Shape("circle", "red", "right"),)).save(tmp_path / "other.jpg", quality=95)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(demo_model_folder(), target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path

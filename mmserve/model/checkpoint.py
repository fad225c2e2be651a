"""A model folder before anything is built from it: its config, its architecture, its weight files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.errors import ModelNotFoundError, UnsupportedModelError, WeightsError

__all__ = ["Checkpoint", "open_checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that can be loaded.

    Attributes:
        folder: Where it is. config: config.json as it stands. model_type: Its architecture's name.
        files: The safetensors files, each readable from end to end.
        tensors: Tensor name -> dtype as safetensors spells it ("BF16", "F32", ...).
    """

    folder: Path
    config: Mapping[str, Any]
    model_type: str
    files: tuple[Path, ...]
    tensors: Mapping[str, str]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check a folder by its small files and its weight files' headers; no tensor is read.

    Raises:
        ModelNotFoundError: No such folder, or no config.json in it.
        UnsupportedModelError: config.json is not a model's.
        WeightsError: No safetensors weights, or a file is missing, truncated or not safetensors.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no model folder {str(folder)!r}")
    config = _read_config(folder)
    files = _weight_files(folder)
    tensors: dict[str, str] = {}
    for file in files:
        tensors.update(_read_header(file))
    return Checkpoint(folder, config, config["model_type"], files, tensors)


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{str(folder)!r} holds no config.json: name the folder that save_pretrained() wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UnsupportedModelError(f"{path} names no model_type, so its architecture is unknown")
    return config


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not an index of weight files: {error!r}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightsError(f"{index} names files that are not there: {', '.join(missing)}")
        return tuple(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        raise WeightsError(
            f"{str(folder)!r} holds pickled weights only ({', '.join(pickled)}); unpickling can run code. "
            "Save the model again as safetensors"
        )
    raise WeightsError(f"{str(folder)!r} holds no weights: neither {_SINGLE} nor {_INDEX}")


def _read_header(path: Path) -> dict[str, str]:
    """Names and dtypes of one file; the library checks the header against the file's length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise WeightsError(f"{path} ({size:,} bytes) is truncated or not safetensors: {error}") from None

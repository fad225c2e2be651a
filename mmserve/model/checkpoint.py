"""A model folder before anything is built from it: its config, its architecture, its weight files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mmserve.errors import ModelNotFoundError, UnsupportedModelError, WeightsError

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "load_pickled", "open_checkpoint"]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_PICKLED: Final = "pytorch_model.bin"
_PICKLED_INDEX: Final = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that can be loaded.

    Attributes:
        folder: Where it is. config: config.json as it stands. model_type: Its architecture's name.
        files: The weight files, each readable from end to end.
        tensors: Tensor name -> dtype as safetensors spells it ("BF16", "F32", ...).
        pickled: Whether the files are torch pickles, which was asked for; else they are safetensors.
    """

    folder: Path
    config: Mapping[str, Any]
    model_type: str
    files: tuple[Path, ...]
    tensors: Mapping[str, str]
    pickled: bool = False


def open_checkpoint(folder: Path, *, allow_pickled: bool = False) -> Checkpoint:
    """Check a folder by its small files and its weight files' headers; no tensor is read.

    Args:
        folder: The model folder.
        allow_pickled: Whether pickled weights are taken where there are no safetensors. They are unpickled as
            tensors and nothing else (torch's `weights_only`).

    Raises:
        ModelNotFoundError: No such folder, or no config.json in it.
        UnsupportedModelError: config.json is not a model's.
        WeightsError: No weights that may be read, a file is missing, truncated or of another format, or a tensor is
            in two files.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no model folder {str(folder)!r}")
    config = _read_config(folder)
    files, pickled = _weight_files(folder, allow_pickled)
    tensors: dict[str, str] = {}
    owners: dict[str, Path] = {}
    for file in files:
        found = _pickled_header(file) if pickled else _read_header(file)
        twice = sorted(found.keys() & owners.keys())
        if twice:
            raise WeightsError(f"{twice[0]} is both in {owners[twice[0]]} and in {file}: which one counts is not said")
        tensors.update(found)
        owners.update(dict.fromkeys(found, file))
    return Checkpoint(folder, config, config["model_type"], files, tensors, pickled)


def load_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of one pickled file, mapped where the file allows it; nothing in it is run.

    Raises:
        WeightsError: It is not a file of torch's, or holds more than tensors by name.
    """
    import torch

    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)  # written before torch 1.6
    except pickle.UnpicklingError as error:
        detail = " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split())[:120]
        raise WeightsError(
            f"{path} holds something else than tensors, which was not unpickled since it may run as code: {detail}"
        ) from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        size = path.stat().st_size
        raise WeightsError(f"{path} ({size:,} bytes) is truncated or no file of torch.save(): {error}") from None
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise WeightsError(f"{path} is not a plain state dict: names and tensors, and nothing else")
    return {str(name): tensor for name, tensor in state.items()}


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{str(folder)!r} holds no config.json: name the folder that save_pretrained() wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UnsupportedModelError(f"{path} names no model_type, so its architecture is unknown")
    return config


def _weight_files(folder: Path, allow_pickled: bool) -> tuple[tuple[Path, ...], bool]:
    """The files, and whether they are pickled."""
    if found := _either(folder, _SINGLE, _INDEX):
        return found, False
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled and allow_pickled:
        if found := _either(folder, _PICKLED, _PICKLED_INDEX):
            return found, True
        raise WeightsError(
            f"{str(folder)!r} holds neither {_PICKLED} nor {_PICKLED_INDEX}, only {', '.join(pickled[:4])}"
        )
    if pickled:
        raise WeightsError(
            f"{str(folder)!r} holds pickled weights only ({', '.join(pickled[:4])}); unpickling can run code. "
            "Save the model again as safetensors, or pass allow_pickled_weights=True to read its tensors, and "
            "nothing else, from them"
        )
    raise WeightsError(f"{str(folder)!r} holds no weights: neither {_SINGLE} nor {_INDEX}{_what_else(folder)}")


def _what_else(folder: Path) -> str:
    """A hint, where there are weights of another kind."""
    if (folder / "adapter_config.json").is_file():
        return "; it is an adapter: merge it into its base model and name that folder"
    others = sorted(path.name for pattern in ("*.safetensors", "*.gguf") for path in folder.glob(pattern))
    return f", only {', '.join(others[:4])}: an index must say which of them are the model" if others else ""


def _either(folder: Path, single: str, index: str) -> tuple[Path, ...] | None:
    if (folder / index).is_file():
        return _indexed(folder, folder / index)
    return (folder / single,) if (folder / single).is_file() else None


def _indexed(folder: Path, index: Path) -> tuple[Path, ...]:
    """The files that an index names."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is not an index of weight files: {error!r}") from None
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightsError(f"{index} is not an index of weight files: it names none")
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise WeightsError(f"{index} names files outside the folder: {', '.join(outside)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{index} names files that are not there: {', '.join(missing)}")
    return tuple(folder / name for name in names)


def _read_header(path: Path) -> dict[str, str]:
    """Names and dtypes of one file; the library checks the header against the file's length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise WeightsError(f"{path} ({size:,} bytes) is truncated or not safetensors: {error}") from None


def _pickled_header(path: Path) -> dict[str, str]:
    spelling = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in load_pickled(path).items()}
    return {name: spelling.get(dtype, dtype) for name, dtype in dtypes.items()}

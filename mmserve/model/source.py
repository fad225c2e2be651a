"""From what a user names a model by, to a folder that holds it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mmserve.errors import ConfigError, ModelNotFoundError

__all__ = ["resolve_model_folder"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_CODE = ("*.py",)


def resolve_model_folder(model: str | Path, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The local folder of `model`: a folder as it is, a hub id through the hub's own cache.

    Args:
        model: A folder, or a hub id.
        revision: Of a hub id: a branch, tag or commit.
        trust_remote_code: Whether Python files are fetched too, so that they may be run later.

    Raises:
        ConfigError: `revision` is given for a folder.
        ModelNotFoundError: There is no such folder, it holds no config.json, or the hub does not give it.
    """
    try:
        folder = Path(model).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (TypeError, OSError, RuntimeError, ValueError) as error:
        raise ModelNotFoundError(
            f"{str(model)[:100]!r} is no model folder and no hub id: {str(error)[:100]}"
        ) from error
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"{str(folder)!r} holds no config.json: name the folder that save_pretrained() wrote"
            )
        if revision is not None:
            raise ConfigError(f"revision {revision!r} is for a hub id, and {str(folder)!r} is a folder")
        return folder
    if exists:
        raise ModelNotFoundError(f"{str(folder)!r} is a file: name the model's folder, the one with config.json")
    name = str(model)
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"there is no folder {name!r}, and it is not a hub id (owner/name) either")
    return _from_hub(name, revision, _FILES + _CODE if trust_remote_code else _FILES)


def _from_hub(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError:
        reason = "it is not in the local hub cache and the hub can not be reached"
    except HfHubHTTPError as error:
        reason = f"the hub answered: {str(error).splitlines()[0][:200]}"
    except (HFValidationError, OSError) as error:
        reason = f"the hub can not be asked: {str(error).splitlines()[0][:200]}"
    raise ModelNotFoundError(
        f"no folder {name!r} here, and as a hub id {reason}. Give the path of a downloaded model folder, "
        f"or download it once where there is a network (hf download {name})"
    )

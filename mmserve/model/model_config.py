"""config.json as transformers' config object, or one clear error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmserve.errors import UnsupportedModelError
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.config_checks import contradiction
from mmserve.model.versions import newer_than_installed, require_library_of

__all__ = ["one_line", "read_config", "takes_images"]


def read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The config object.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or can not make a config of config.json;
            a number in it can not be; the weights are quantised; a library is missing; or the architecture comes as
            code and that is not trusted.
    """
    _refuse_quantised(checkpoint)
    _refuse_unknown(checkpoint, trust_remote_code)
    for part in _configs(checkpoint.config):
        require_library_of(str(part.get("model_type")))
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Each family's config checks itself in its own way, with errors of every class.
        raise UnsupportedModelError(
            f"the config of {str(checkpoint.folder)!r} (model_type {checkpoint.model_type!r}) can not be read: "
            + one_line(error)
            + _newer(checkpoint)
        ) from error
    wrong = contradiction(config)
    if wrong is not None:
        raise UnsupportedModelError(
            f"the config of {str(checkpoint.folder)!r} (model_type {checkpoint.model_type!r}) can not be: {wrong}"
        )
    return config


def takes_images(config: Any) -> bool:
    """Whether transformers maps this config to an image+text model."""
    from transformers import AutoModelForImageTextToText

    return type(config) in AutoModelForImageTextToText._model_mapping


def one_line(error: BaseException, most: int = 300) -> str:
    """An error of a library as one line, with its class where its message alone is not a sentence."""
    text = " ".join(str(error).split())
    if len(text.split()) < 3:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= most else f"{text[:most]} ..."


def _refuse_unknown(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if checkpoint.model_type in CONFIG_MAPPING:
        return
    if checkpoint.config.get("auto_map"):
        if trust_remote_code:
            return
        raise UnsupportedModelError(
            f"the architecture of {str(checkpoint.folder)!r} (model_type {checkpoint.model_type!r}) comes as Python "
            "code with the checkpoint; read that code, and pass trust_remote_code=True to run it"
        )
    import transformers

    raise UnsupportedModelError(
        f"transformers {transformers.__version__} knows no architecture {checkpoint.model_type!r}"
        + (_newer(checkpoint) or ". A newer transformers may: pip install -U transformers")
    )


def _newer(checkpoint: Checkpoint) -> str:
    written = newer_than_installed(checkpoint.config)
    if written is None:
        return ""
    return f". The checkpoint was written by transformers {written}, newer than here: pip install -U transformers"


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    for config in _configs(checkpoint.config):
        quantised = config.get("quantization_config") or config.get("compression_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise UnsupportedModelError(
                f"the weights of {str(checkpoint.folder)!r} are quantised ({method or 'method not named'}), which is "
                "not served: take the checkpoint that it was made from"
            )


def _configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config and those of its parts."""
    yield config
    for part in config.values():
        if isinstance(part, dict):
            yield from _configs(part)

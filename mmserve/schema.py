"""The base of every public pydantic type: frozen, unknown fields refused, our own error on bad values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Strict, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError

from mmserve.errors import ConfigError, InvalidRequestError, MMServeError

__all__ = ["Bool", "Float", "Int", "Schema"]

Int: TypeAlias = Annotated[int, Strict()]
"""A whole number: not True, "5" or 5.0, which pydantic would take for one."""

Float: TypeAlias = Annotated[float, Strict()]
"""A number, whole ones included: not True or "0.5"."""

Bool: TypeAlias = Annotated[bool, Strict()]
"""True or False: not 1, "yes" or "off"."""

SchemaT = TypeVar("SchemaT", bound="Schema")

_SHOWN_VALUE = 80
"""Characters of a refused value that an error repeats; a payload never ends in a message."""

_SHOWN_PROBLEMS = 3
_SHOWN_CLAUSE = 400
"""Problems that an error tells in full, and characters of each."""


class Schema(BaseModel):
    """A frozen pydantic model whose constructor raises `error_type` in place of pydantic's own error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, validate_default=True)

    error_type: ClassVar[type[InvalidRequestError] | type[ConfigError]] = InvalidRequestError

    def __init__(self, **values: Any) -> None:
        with _own_errors(type(self)):
            super().__init__(**values)

    @classmethod
    def model_validate(cls: type[SchemaT], obj: Any, **kwargs: Any) -> SchemaT:
        """As pydantic's, raising `error_type`."""
        with _own_errors(cls):
            return super().model_validate(obj, **kwargs)

    @classmethod
    def model_validate_json(cls: type[SchemaT], json_data: str | bytes | bytearray, **kwargs: Any) -> SchemaT:
        """As pydantic's, raising `error_type`."""
        with _own_errors(cls):
            return super().model_validate_json(json_data, **kwargs)

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """As pydantic's, raising `error_type` for what has no JSON form (`mode="json"`)."""
        with _own_write_errors(type(self)):
            return super().model_dump(**kwargs)

    def model_dump_json(self, **kwargs: Any) -> str:
        """As pydantic's, raising `error_type` for what has no JSON form."""
        with _own_write_errors(type(self)):
            return super().model_dump_json(**kwargs)


@contextlib.contextmanager
def _own_errors(cls: type[Schema]) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise cls.error_type(_explain(cls, error)) from None
    except TypeError as error:
        if "keywords must be strings" not in str(error):
            raise
        raise cls.error_type(f"{cls.__name__}: a field's name is a string, here or in what it holds") from None


@contextlib.contextmanager
def _own_write_errors(cls: type[Schema]) -> Iterator[None]:
    """Pydantic wraps what a serializer raises: an error of ours, or of a picture that can not be read."""
    try:
        yield
    except PydanticSerializationError as error:
        reason = re.sub(r"^((Error serializing to JSON|Error calling function `\w+`|\w+): )+", "", str(error))
        raise cls.error_type(f"{cls.__name__} can not be written as JSON: {_shorten(reason)}") from error


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    """A clause a problem: where, what was wrong, what was given; and the known fields if one is unknown."""
    problems = error.errors(include_url=False)
    told = [problem for problem in problems if not _is_echo(problem, problems)]
    clauses = [_shorten(_clause(problem)) for problem in told[:_SHOWN_PROBLEMS]]
    if len(told) > _SHOWN_PROBLEMS:
        clauses.append(f"and {len(told) - _SHOWN_PROBLEMS} more")
    if any(problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1 for problem in told):
        clauses.append(f"known fields: {', '.join(cls.model_fields)}")
    return f"{cls.__name__}: " + "; ".join(clauses)


def _is_echo(problem: ErrorDetails, problems: list[ErrorDetails]) -> bool:
    """Pydantic counts refused items as absent, "too short"; the items' own problems say it better."""
    place = problem["loc"]
    return problem["type"] == "too_short" and any(
        other["loc"][: len(place)] == place != other["loc"] for other in problems
    )


def _clause(problem: ErrorDetails) -> str:
    where = ".".join(_shorten(str(part), _SHOWN_VALUE) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown field {where!r}"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem.get("ctx", {}).get("error"), MMServeError) or not where:
        return message if not where else f"{where}: {message}"
    return f"{where}: {message} (given {_shorten(repr(problem['input']), _SHOWN_VALUE)})"


def _shorten(text: str, limit: int = _SHOWN_CLAUSE) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."

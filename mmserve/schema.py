"""The base of every public pydantic type: frozen, unknown fields refused, our own error on bad values."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from mmserve.errors import ConfigError, InvalidRequestError, MMServeError

__all__ = ["Schema"]

SchemaT = TypeVar("SchemaT", bound="Schema")

_SHOWN_VALUE = 80
"""Characters of a refused value that an error repeats; a payload never ends in a message."""


class Schema(BaseModel):
    """A frozen pydantic model whose constructor raises `error_type` in place of pydantic's own error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, validate_default=True)

    error_type: ClassVar[type[InvalidRequestError] | type[ConfigError]] = InvalidRequestError

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self.error_type(_explain(type(self), error)) from None

    @classmethod
    def model_validate(cls: type[SchemaT], obj: Any, **kwargs: Any) -> SchemaT:
        """As pydantic's, raising `error_type`."""
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise cls.error_type(_explain(cls, error)) from None

    @classmethod
    def model_validate_json(cls: type[SchemaT], json_data: str | bytes | bytearray, **kwargs: Any) -> SchemaT:
        """As pydantic's, raising `error_type`."""
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as error:
            raise cls.error_type(_explain(cls, error)) from None


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    """One clause a problem: where, what was wrong, what was given; for an unknown field the known ones."""
    problems = error.errors(include_url=False)
    clauses = []
    for problem in problems:
        place = problem["loc"]
        if problem["type"] == "too_short" and any(
            other["loc"][: len(place)] == place != other["loc"] for other in problems
        ):
            continue  # pydantic counts refused items as absent; the items' own problems say it better
        clauses.append(_clause(cls, problem))
    return f"{cls.__name__}: " + "; ".join(clauses)


def _clause(cls: type[BaseModel], problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = f"; known fields: {', '.join(cls.model_fields)}" if len(problem["loc"]) == 1 else ""
        return f"unknown field {where!r}{known}"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem.get("ctx", {}).get("error"), MMServeError) or not where:
        return message if not where else f"{where}: {message}"
    given = repr(problem["input"])
    shown = given if len(given) <= _SHOWN_VALUE else given[:_SHOWN_VALUE] + "..."
    return f"{where}: {message} (given {shown})"

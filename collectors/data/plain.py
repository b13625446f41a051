"""Values of Arrow as JSON values."""

from typing import Any

import msgspec

from asyncrl.engine.errors import DataError


def plain(record: Any, place: str) -> Any:
    """Return a record with dates, decimals and bytes as texts; DataError, with place and field, for other objects."""
    try:
        return msgspec.to_builtins(record)
    except (TypeError, ValueError):
        for name, value in record.items():
            try:
                msgspec.to_builtins(value)
            except (TypeError, ValueError) as error:
                raise DataError(f"{place}, field {name!r}, is not a JSON value: {error}") from error
        raise

"""Describes in words what a field of the schema takes, for error messages and the reference."""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "null",
    list: "a list",
    dict: "a map",
}


def allowed_at(model: type[BaseModel], path: Sequence[int | str], *, too_much: bool = False) -> str | None:
    """Describe the type and range of the field at `path`; None if it has no simple description.

    Upper limits are far above sensible values, so they are named only if a value is `too_much`.
    """
    known: Any = model
    field: FieldInfo | None = None
    for name in path:
        fields = known.model_fields if isinstance(known, type) and issubclass(known, BaseModel) else {}
        field = fields.get(str(name))
        if field is None:
            return None
        known = field.annotation
    return None if field is None else _words(field.annotation, field.metadata, too_much)


def _words(annotation: Any, metadata: Sequence[Any], too_much: bool) -> str | None:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _words(inner, [*metadata, *more], too_much)
    if origin in (Union, UnionType):
        parts = [_words(part, metadata, too_much) for part in get_args(annotation)]
        return " or ".join(part for part in parts if part) if all(parts) else None
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    name = _NAMES.get(origin or annotation)
    if name is None:
        return None
    bounds = [words for item in metadata for words in _bounds(item, too_much)]
    return f"{name} {' and '.join(bounds)}" if bounds and annotation is not NoneType else name


def _bounds(item: Any, too_much: bool) -> Iterator[str]:
    match item:
        case FieldInfo():
            for part in item.metadata:
                yield from _bounds(part, too_much)
        case Ge(ge=limit):
            yield f"of at least {limit}"
        case Gt(gt=limit):
            yield f"greater than {limit}"
        case Lt(lt=limit):
            yield f"less than {limit}"
        case MinLen(min_length=1):
            yield "that is not empty"
        case Le(le=limit) if too_much or limit <= 1:
            yield f"of at most {limit}"

"""Parameters that a configuration gives to a user's function or class: checked against its signature."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from asyncrl.engine.errors import ConfigError

_LOOSE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_parameters(
    what: str,
    target: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    given: Collection[str] = (),
    explained: str = "",
) -> None:
    """Check names, and types where annotated, against the signature of `target`; ConfigError if they do not fit.

    `what` names it in errors. Parameters in `given` are not the configuration's to set. `explained` says where required
    parameters are described.
    """
    signature = inspect.signature(target).parameters
    known = {name: p for name, p in signature.items() if p.kind not in _LOOSE and name not in given}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    for key in parameters:
        if key in given or (key not in known and not takes_any):
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"{what} has no parameter {key!r}{hint}")
    required = [key for key, p in known.items() if p.default is p.empty and key not in parameters]
    if required:
        raise ConfigError(f"{what} needs {', '.join(required)}{explained}")
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # An annotation may not be a type at run time; then only names are checked.
        return
    for key, value in parameters.items():
        if key in hints and not _fits(value, hints[key]):
            raise ConfigError(f"{what}: {key} is {value!r}; it must be {written_type(hints[key])}")


def written_type(hint: Any) -> str:
    """Return a type as text for readers of YAML: `int | null`, not `int | None`."""
    return re.sub(r"\b(collections\.abc|typing)\.", "", inspect.formatannotation(hint)).replace("None", "null")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a YAML value has a type, strictly: text is not a number, and true is not 1."""
    try:
        # Through JSON, because a list in YAML may stand for a tuple, which strict Python mode refuses.
        TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    except (PydanticUserError, TypeError):  # YAML cannot express this type; the constructor checks it.
        return True
    return True

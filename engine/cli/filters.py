"""`asyncrl filters`: lists filters, explains one, and writes the first version of your own."""

import inspect
import keyword
import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.engine.cli.options import fail
from asyncrl.engine.errors import ConfigError

app = typer.Typer(
    help="List and explain filters, and write new ones.", invoke_without_command=True, add_completion=False
)

_FILTER = '''"""{title}: decides which groups are worth training on."""

from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, drop, keep


class {title}(BaseRolloutFilter):
    """Drop groups with a response of more than `max_tokens` tokens (reason `too_long`)."""

    requires = ("response_tokens",)
    drop_reasons = ("too_long",)

    def __init__(self, max_tokens: int = 512) -> None:
        self._max_tokens = max_tokens

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        longest = max(group.lengths[i] for i in group.live)
        return drop("too_long") if longest > self._max_tokens else keep()
'''

_TEST = '''"""{title} keeps the contract of filters and drops what it should."""

from asyncrl.filters.testing import check_filter, judge, make_group

from {module} import {title}


def test_it_keeps_the_contract():
    check_filter({title})


def test_it_drops_a_group_with_a_long_response():
    short, long = make_group([0.0, 1.0], lengths=[3, 4]), make_group([0.0, 1.0], group=1, lengths=[3, 900])
    assert [judgement.dropped for judgement in judge({title}(), short, long)] == [None, "{title}/too_long"]
'''


@app.callback()
def filters(context: typer.Context) -> None:
    """List and explain filters, and write new ones; without a command: list them."""
    if context.invoked_subcommand is None:
        list_filters()


@app.command("list")
def list_filters() -> None:
    """List all filters: the built-in ones and those of installed packages."""
    from asyncrl.filters.load import BUILT_IN, ENTRY_POINT_GROUP

    names = [*BUILT_IN, *sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]
    wide = max(map(len, names))
    for name in names:
        typer.echo(f"{name:<{wide}}  {_first_line(name)}")
    typer.echo("\nasyncrl filters show NAME explains one; asyncrl filters new NAME writes your own.")


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A filter's name, or module:Class of your own.")]) -> None:
    """Explain one filter: what it does, its parameters, the tags it needs."""
    typer.echo("\n".join(_explain(name)))


@app.command("new")
def new(name: Annotated[str, typer.Argument(help="Name of the class, such as ShortOnly.")]) -> None:
    """Write a filter and its test into this folder, and print the line for your YAML."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, flags=re.ASCII) or keyword.iskeyword(name):
        fail(f"filters new {name}: a class name has letters, digits and underscores only, as in ShortOnly")
    title = "".join(word[0].upper() + word[1:] for word in name.split("_") if word)
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", title).lower()
    files = {Path(f"{module}.py"): _FILTER, Path(f"test_{module}.py"): _TEST}
    there = [str(path) for path in files if path.exists()]
    if there:
        fail(f"filters new {name}: {', '.join(there)} exists already; nothing was written")
    taken = _taken(module)
    if taken:
        fail(f"filters new {name}: {taken}; choose another name, for example My{title}")
    for path, text in files.items():
        try:
            path.write_text(text.replace("{title}", title).replace("{module}", module), encoding="utf-8")
        except OSError as error:
            fail(f"filters new {name}: cannot write {path}: {error.strerror}")
        typer.echo(f"wrote {path}")
    typer.echo(f"\nTest it:   pytest test_{module}.py")
    typer.echo(f"Use it:    asyncrl train --filter {module}:{title}")
    typer.echo(
        f"In YAML:   filters: [{{name: staleness}}, {{name: zero_std}}, {{name: {module}:{title}, max_tokens: 512}}]"
    )


def _taken(module: str) -> str:
    """Return what a file of this name would hide or be mistaken for; empty if the name is free."""
    from asyncrl.filters.load import BUILT_IN

    if module in BUILT_IN:
        return f"{module} is a built-in filter"
    if module == "test" or module.startswith("test_"):
        return f"pytest would take {module}.py for a test"
    if module in sys.stdlib_module_names or find_spec(module) is not None:
        return f"{module}.py would hide the installed module {module}"
    return ""


def _first_line(name: str) -> str:
    from asyncrl.filters.load import load_class

    try:
        return (inspect.getdoc(load_class(name)) or "").partition("\n")[0]
    except ConfigError as error:  # One broken package must not hide the other filters.
        return f"cannot be loaded: {error}"


def _explain(name: str) -> Iterator[str]:
    from asyncrl.configs.parameters import written_type
    from asyncrl.engine.cli.options import see_user_folder
    from asyncrl.filters.load import load_class

    see_user_folder()
    try:
        found = load_class(name)
    except ConfigError as error:
        own = f"; for one in {name}.py, write {name}:Class" if Path(f"{name}.py").is_file() else ""
        fail(f"{error}{own}")
    yield f"{name}: {inspect.getdoc(found) or 'no description'}"
    parameters = inspect.signature(found).parameters.values()
    yield "\nparameters:" if parameters else "\nno parameters"
    for parameter in parameters:
        kind = "any" if parameter.annotation is parameter.empty else written_type(parameter.annotation)
        default = "required" if parameter.default is parameter.empty else f"default {parameter.default!r}"
        yield f"  {parameter.name}: {kind}, {default}"
    if isinstance(found.requires, tuple) and found.requires:
        yield f"\nneeds tags: {', '.join(found.requires)}"
    for what, reasons in (("drops", found.drop_reasons), ("masks", found.mask_reasons)):
        if reasons:
            yield f"\n{what} for: {', '.join(reasons)}"
    source = (inspect.getdoc(inspect.getmodule(found)) or "").partition("\n")[0]
    yield f"\n{source}"

"""What the commands print and parse: tables, JSON, sizes given as `name=number`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import InputError


def console() -> Console:
    """Where results go. Made at every use, so that a redirected stdout is respected."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=False)


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))


def table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table whose numbers are right-aligned and whose cells are taken literally."""
    result = Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        show_header=any(columns),
        box=None,
        pad_edge=False,
    )
    cells = [list(row) for row in rows]
    for i, column in enumerate(columns):
        numbers = bool(cells) and all(isinstance(row[i], (int, float)) for row in cells)
        result.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        result.add_row(*(_cell(value) for value in row))
    return result


def _cell(value: Any) -> str:
    from rich.markup import escape

    return f"{value:.2f}" if isinstance(value, float) else escape(str(value))


def parse_dims(given: Iterable[str]) -> dict[str, int | list[int]]:
    """`["batch=1", "x=1,3,48"]` as `{"batch": 1, "x": [1, 3, 48]}`. Raises `InputError`."""
    sizes: dict[str, int | list[int]] = {}
    for text in given:
        name, equals, value = text.rpartition("=")
        try:
            numbers = [int(number) for number in value.split(",")] if value else []
        except ValueError:
            numbers, equals = [], ""
        if not name or not equals or any(number < 0 for number in numbers):
            raise InputError(
                f"--dim {text!r}: expected NAME=SIZE for a symbolic dimension (batch=1), or an "
                "input's shape with all its sizes (x=1,3,48,320; x= for a scalar)"
            )
        if name in sizes:
            raise InputError(f"--dim {text!r}: there is a --dim for {name!r} already; give one")
        sizes[name] = numbers[0] if len(numbers) == 1 else numbers
    return sizes

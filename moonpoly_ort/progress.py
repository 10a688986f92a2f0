"""A progress bar for work that takes long, drawn only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields `report(done, total, name)`. The bar appears on stderr at the first report."""
    if not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    bar = Progress(*columns, TextColumn("{task.fields[name]}"), console=Console(stderr=True))
    task = bar.add_task(what, total=None, name="")

    def report(done: int, total: int, name: str) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, name=name)

    try:
        yield report
    finally:
        bar.stop()

"""A CSV that is written a row at a time and taken up again where it stopped."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import Timing


class CsvRows:
    """Appends rows to `path`; `key` names the columns by which a row counts as done.

    A last line that was cut short by a kill is taken off, so that its row is done again.

    Raises:
        ValueError: the file has other columns.
    """

    def __init__(self, path: Path, head: Sequence[str], key: Sequence[str]) -> None:
        self.path, self.head, self.key = path, list(head), list(key)
        self.done: set[tuple[str, ...]] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        if whole:
            reader = csv.DictReader(whole.splitlines())
            if reader.fieldnames != self.head:
                raise ValueError(f"{path} has other columns; name another file")
            self.done = {tuple(row[column] for column in self.key) for row in reader}
        self._file = path.open("a", newline="")
        self._out = csv.DictWriter(self._file, self.head, lineterminator="\n")
        if not whole:
            self._out.writeheader()

    def write(self, row: dict[str, Any]) -> None:
        """Floats are cut to five digits; columns that are not given stay empty."""
        self._out.writerow({name: _shown(value) for name, value in row.items()})
        self._file.flush()
        self.done.add(tuple(str(row[column]) for column in self.key))

    def has(self, *key: str) -> bool:
        return key in self.done

    def close(self) -> None:
        self._file.close()


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of several files; of those that two files hold, all."""
    rows = []
    for path in paths:
        with path.open(newline="") as source:
            rows += list(csv.DictReader(source))
    return rows


def timing_columns(name: str, timing: Timing) -> dict[str, float]:
    """NAME_us, NAME_low_us and NAME_high_us."""
    return {
        f"{name}_us": timing.median,
        f"{name}_low_us": timing.low,
        f"{name}_high_us": timing.high,
    }


def _shown(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.5g}"
    return int(value) if isinstance(value, bool) else value

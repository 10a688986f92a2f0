"""What has been measured so far, on disk as it comes, so that tuning goes on where it stopped.

One JSON object a line: a header that names the GPU and the kernels, then facts of the GPU, outcomes
of the correctness gate, and one line for each shape that was timed. A line that was cut short by
the end of the process is dropped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from .. import tables
from ..errors import OutputError, TableError
from .conv_shapes import ConvShape
from .measuring import Timed
from .shapes import Shape
from .work import AnyShape

VERSION = 1
ATTEMPTS = 2  # a kernel whose check never came to an end so often is taken for wrong


@dataclass
class Record:
    """The contents of a journal."""

    header: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)  # kernel: fault, empty for none
    begun: dict[str, int] = field(default_factory=dict)  # kernel: checks that did not end
    timings: dict[AnyShape, list[Timed]] = field(default_factory=dict)

    @property
    def blocked(self) -> dict[str, str]:
        """Kernels that must not be used, with what is wrong with them."""
        hung = {
            kernel: f"its check did not end in {count} attempts"
            for kernel, count in self.begun.items()
            if count >= ATTEMPTS
        }
        return hung | {kernel: fault for kernel, fault in self.checked.items() if fault}


def read(path: Path) -> Record:
    """The contents. Raises TableError for a file that is no journal or damaged before its end."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TableError(f"cannot read the journal {path}: {error.strerror or error}") from error
    record = Record()
    whole, _, _ = text.rpartition("\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            _take(record, json.loads(line), first=number == 1)
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(
                f"{path} is damaged in line {number} ({error}). Remove it, or tune with --fresh."
            ) from error
    return record


def _take(record: Record, entry: dict[str, Any], *, first: bool) -> None:
    if first:
        if entry["journal"] != VERSION:
            raise ValueError(f"version {entry['journal']}, this release reads {VERSION}")
        record.header = entry
    elif "facts" in entry:
        record.facts = entry["facts"]
    elif "begun" in entry:
        kernel = entry["begun"]
        record.begun[kernel] = record.begun.get(kernel, 0) + 1
    elif "checked" in entry:
        record.checked[entry["checked"]] = entry["fault"]
        record.begun.pop(entry["checked"], None)
    elif "interrupted" in entry:
        record.begun.pop(entry["interrupted"], None)
    else:
        shape = _shape(entry)
        record.timings[shape] = [
            Timed(str(name), int(split), float(us), bool(careful))
            for name, split, us, careful in entry["times"]
        ]


def _shape(entry: dict[str, Any]) -> AnyShape:
    if "convolution" not in entry:
        return Shape(**entry["shape"])
    given: dict[str, Any] = entry["convolution"]
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return ConvShape(**fields)


class Journal:
    """A journal that is written; one process at a time. A context manager.

    Raises:
        OutputError: it cannot be written, or another process is tuning with it.
        TableError: the file that is there is damaged.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, fresh: bool = False) -> None:
        self.path, self.record = path, Record()
        header = {"journal": VERSION} | header
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path.with_suffix(".lock"))
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OutputError(
                f"another process is tuning with {path}: wait for it, or choose another --output"
            ) from None
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            known = self._known(fresh)
            if known is not None and known.header == header:
                self.record = known
                self._cut_torn_line()
                self._file = path.open("a", encoding="utf-8")
            else:  # none, or of another driver: what it says does not hold here
                if known is not None:
                    os.replace(path, f"{path}.old")
                self._file = path.open("w", encoding="utf-8")
                self._write(header)
                self.record.header = header
        except OSError as error:
            self._lock.release()
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        except TableError:
            self._lock.release()
            raise

    def _known(self, fresh: bool) -> Record | None:
        if fresh or not self.path.exists() or self.path.stat().st_size == 0:
            return None
        return read(self.path)

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(self.path, whole)

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _note(self, entry: dict[str, Any]) -> None:
        self._write(entry)
        _take(self.record, entry, first=False)

    def facts(self, facts: dict[str, Any]) -> None:
        self._note({"facts": facts})

    def begin_check(self, kernel: str) -> None:
        """Before a kernel runs for the first time, or when it failed later on: if nothing follows,
        it hung or crashed."""
        self._note({"begun": kernel})

    def end_check(self, kernel: str, fault: str) -> None:
        """`fault` is empty for a kernel that is right."""
        self._note({"checked": kernel, "fault": fault})

    def interrupted(self, kernel: str) -> None:
        """The user ended the check; the kernel is not to blame."""
        self._note({"interrupted": kernel})

    def timed(self, shape: AnyShape, times: list[Timed]) -> None:
        rows = [[t.name, t.split, float(f"{t.us:.5g}"), t.careful] for t in times]
        kind = "convolution" if isinstance(shape, ConvShape) else "shape"
        self._note({kind: asdict(shape), "times": rows})

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_name(gpu: str, key: str, only: str = "") -> str:
    """`gemm__nvidia-h200.0123456789ab.jsonl`: one for each GPU and set of kernels."""
    part = re.sub(r"[^A-Za-z0-9_]+", "-", only)
    return f"{Path(tables.file_name(gpu)).stem}.{key[:12]}{'.' + part if part else ''}.jsonl"


def rows(record: Record) -> Iterator[tuple[AnyShape, Timed]]:
    """Every timing."""
    for shape, times in record.timings.items():
        for timed in times:
            yield shape, timed

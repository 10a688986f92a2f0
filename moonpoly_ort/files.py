"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import OutputError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file beside `path` that takes its place at the end, unless an exception gets out.

    Raises `OutputError` where it cannot be written.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        raise OutputError(f"cannot write {target}: it is there already, and is not a file")
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            yield file
        os.replace(aside, target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or never made
            aside.unlink()

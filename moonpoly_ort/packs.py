"""Kernel packs on this machine: where they are looked for, whether they are current, building them.

path = packs.ensure_pack(90)      # finds sm_90.mpk, or builds it into the cache
path = packs.catalog(90)          # the kernel list without code: plans, no GPU, no Triton
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock
from platformdirs import user_cache_dir

from .custom_ops.kernels import compiling, pack_format
from .custom_ops.kernels.kernel_list import specs
from .custom_ops.kernels.spec import SHARED_LIMIT, name
from .errors import DeviceError, MissingDependencyError, OutputError, PackError, TableError

if TYPE_CHECKING:
    from .custom_ops.kernels.pack_format import CostTable, PackInfo
    from .tables import Table

__all__ = [
    "build_pack",
    "cache_dir",
    "catalog",
    "ensure_pack",
    "find_pack",
    "is_tuned",
    "pack_name",
    "supported_architectures",
    "with_present_tables",
    "write_with_tables",
]

Progress = Callable[[int, int, str], None]
log = logging.getLogger("moonpoly_ort")


def supported_architectures() -> list[int]:
    """The architectures that packs can be built for, as numbers: 90 for sm_90."""
    return list(SHARED_LIMIT)


def pack_name(sm: int) -> str:
    """The file name of an architecture's pack. Raises DeviceError if it is not supported."""
    if sm not in SHARED_LIMIT:
        known = ", ".join(f"sm_{s}" for s in SHARED_LIMIT)
        raise DeviceError(f"no kernels can be built for sm_{sm}; supported architectures: {known}")
    return f"sm_{sm}.mpk"


def cache_dir() -> Path:
    """The folder of packs built on this machine."""
    return Path(user_cache_dir("moonpoly_ort")) / "packs"


def _places(sm: int) -> list[Path]:
    """Where a pack may lie that nobody named: beside the library, then the cache."""
    return [Path(__file__).parent / "packs" / pack_name(sm), cache_dir() / pack_name(sm)]


def _runs_on(pack_sm: int, sm: int) -> bool:
    """Whether code for `pack_sm` runs on `sm`. Code for sm_80 runs on later sm_8x; from sm_90 on,
    Triton compiles for one architecture alone (sm_90a)."""
    return pack_sm == sm or (80 <= pack_sm < sm < 90)


def _check(path: Path, sm: int) -> PackInfo:
    info = pack_format.read_info(path)
    if not _runs_on(info.sm, sm):
        raise PackError(
            f"{path} holds kernels for sm_{info.sm}, not for sm_{sm}; build them with "
            f"`moonpoly pack --arch sm_{sm}`"
        )
    return info


def _is_current(path: Path, sm: int, trial: bool = False) -> bool:
    """Whether a file is an intact pack of the present kernels.

    A pack made by another Triton release is rebuilt only where Triton is installed to do so.
    """
    try:
        info = _check(path, sm)
    except PackError:
        return False
    try:
        triton = compiling.triton_version()
    except MissingDependencyError:
        triton = info.triton
    return info.sm == sm and info.key == compiling.content_key(sm, triton, trial=trial)


def find_pack(sm: int, path: str | os.PathLike[str] | None = None) -> Path | None:
    """The pack for an architecture (90 for sm_90): `path`, else $MOONPOLY_PACK, else a current one
    beside the library or in the cache, else None.

    A pack that the caller or the environment names is taken whatever kernel sources it was built
    from, but raises PackError where it is missing, corrupt or for another architecture.
    DeviceError: unsupported `sm`.
    """
    places = _places(sm)
    named = path or os.environ.get("MOONPOLY_PACK")
    if named:
        _check(Path(named), sm)
        return Path(named)
    current = [place for place in places if _is_current(place, sm)]
    # The cache's copy is there for its tables.
    if len(current) > 1 and (measured := _usable_tables(sm)) is not None:
        current.sort(key=lambda place: not _same(pack_format.read_tables(place), measured))
    return current[0] if current else None


def _measured(sm: int) -> list[CostTable]:
    from .tables import cost_tables

    return cost_tables(sm)


def _usable_tables(sm: int) -> list[CostTable] | None:
    """The tables of an architecture; None, said in the log, where one cannot be used."""
    try:
        return _measured(sm)
    except TableError as error:
        log.warning("performance tables are left aside: %s", error)
        return None


def _same(tables: Sequence[CostTable], others: Sequence[CostTable]) -> bool:
    return list(tables) == list(others) and all(
        np.array_equal(a.costs, b.costs) and np.array_equal(a.vendor, b.vendor)
        for a, b in zip(tables, others, strict=True)
    )


def build_pack(
    sm: int, output: str | os.PathLike[str], *, tables: Sequence[CostTable] = (),
    progress: Progress | None = None, trial: bool = False,
) -> Path:  # fmt: skip
    """Compiles all kernels of an architecture (90 for sm_90) into one file, written aside and
    renamed.

    With `trial`, kernels on trial are added: such a pack is used where it is named, and never taken
    for the current one. `tables` are measured costs, one row per kernel in the order of `specs(sm,
    trial=trial)`. `progress` is called with (kernels done, kernels in all, name). No GPU is needed.
    Raises DeviceError (unsupported `sm`), MissingDependencyError (no Triton), PackError (a kernel
    does not compile), OutputError (`output` cannot be written).
    """
    pack_name(sm)
    target = Path(output)
    try:  # now, not after minutes of compiling
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}") from error
    triton = compiling.triton_version()
    key = compiling.content_key(sm, triton, trial=trial)
    kernels = compiling.compile_specs(specs(sm, trial=trial), sm, progress=progress)
    try:
        pack_format.write_pack(target, sm, kernels, tables, key=key, triton=triton)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}") from error
    return target


def write_with_tables(
    pack: str | os.PathLike[str], output: str | os.PathLike[str], measured: Sequence[Table]
) -> Path:
    """A copy of a pack with these tables in place of its own; the code stays.

    Raises PackError (`pack` cannot be read), TableError (a table of other kernels), OutputError.
    """
    from .tables import merged

    whole = pack_format.read_pack(pack)
    costs = merged(measured, [name(kernel.spec) for kernel in whole.kernels])
    return _write_pack(Path(output), whole, costs)


def _write_pack(target: Path, pack: pack_format.Pack, costs: Sequence[CostTable]) -> Path:
    info = pack.info
    try:
        pack_format.write_pack(
            target, info.sm, pack.kernels, costs, key=info.key, triton=info.triton
        )
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def with_present_tables(found: Path, sm: int, path: str | os.PathLike[str] | None = None) -> Path:
    """What `find_pack(sm, path)` found, with the tables that are there now, as after tuning.

    Renewed where it lies in the cache, else copied there. A pack that was named stays as it is.

    Raises PackError where the cache's pack cannot be renewed.
    """
    named = bool(path or os.environ.get("MOONPOLY_PACK"))
    if named and found != cache_dir() / pack_name(sm):
        return found
    measured = _usable_tables(sm)
    if measured is None or _same(pack_format.read_tables(found), measured):
        return found
    target = cache_dir() / pack_name(sm)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return _write_pack(target, pack_format.read_pack(found), measured)
    except (OSError, OutputError) as error:
        if found == target:
            raise PackError(f"cannot renew the cost tables in {found}: {error}") from error
        log.warning(
            "%s is used with the tables that it was built with, not with those that are there "
            "now: they would go into a copy in the cache, and %s", found, error,
        )  # fmt: skip
        return found


def is_tuned(pack: str | os.PathLike[str], gpu: str, sm_count: int) -> bool:
    """Whether a pack holds costs measured on exactly that GPU, so that plans there use them."""
    measured = pack_format.read_tables(pack)
    return any((table.gpu, table.sm_count) == (gpu, sm_count) for table in measured)


def _unwritable(folder: Path, error: OSError) -> str:
    return (
        f"cannot write the pack cache {folder}: {error.strerror}. Set XDG_CACHE_HOME to a writable "
        "folder, or name a pack in MOONPOLY_PACK."
    )


def ensure_pack(
    sm: int, path: str | os.PathLike[str] | None = None, *, progress: Progress | None = None,
    build: bool = True, trial: bool = False,
) -> Path:  # fmt: skip
    """`find_pack`, and where there is none, a pack built into the cache (minutes, with `progress`).

    A pack that nobody named holds the tables that are there now, the user's before shipped ones. A
    pack with the kernels on `trial` is kept in the cache under a name of its own. Where another
    process is building the same pack, waits for it. With `build=False`, or MOONPOLY_NO_BUILD=1 in
    the environment, a missing pack is a PackError that says where it was looked for.
    """
    target = cache_dir() / (pack_name(sm).replace(".mpk", ".trial.mpk") if trial else pack_name(sm))
    found = (target if _is_current(target, sm, trial) else None) if trial else find_pack(sm, path)
    if found is not None:
        return found if trial else with_present_tables(found, sm, path)
    if not build or os.environ.get("MOONPOLY_NO_BUILD", "0") not in ("", "0"):
        reason = "MOONPOLY_NO_BUILD is set" if build else "the caller forbids building"
        searched = ", ".join(map(str, [target] if trial else _places(sm)))
        raise PackError(
            f"no current kernel pack for sm_{sm}, and {reason}. Looked for: $MOONPOLY_PACK (not "
            f"set), {searched}. Build one with `moonpoly pack --arch sm_{sm}`."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not _is_current(target, sm, trial):  # else another process built it meanwhile
                tables = [] if trial else _measured(sm)
                build_pack(sm, target, tables=tables, progress=progress, trial=trial)
    except OSError as error:
        raise PackError(_unwritable(target.parent, error)) from error
    return target


def catalog(sm: int) -> Path:
    """A pack without code for an architecture: the kernel list with estimated resources and the
    cost tables, for plans on a machine with neither Triton nor a built pack. Written in
    milliseconds, to the cache or else the temporary folder.
    """
    file_name = pack_name(sm).replace(".mpk", ".catalog.mpk")
    kernels = compiling.catalog_kernels(sm)
    tables = _measured(sm)
    key = compiling.content_key(sm, "none")
    temporary = Path(tempfile.gettempdir()) / f"moonpoly_ort-{os.getuid()}"
    for folder in (cache_dir(), temporary):
        target = folder / file_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            pack_format.write_pack(target, sm, kernels, tables, key=key, triton="none")
        except OSError:
            continue
        return target
    raise PackError(f"cannot write the kernel catalog {file_name} to {cache_dir()} or {temporary}")

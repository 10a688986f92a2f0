"""`moonpoly pack`, `doctor` and `version`: commands about this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError, DeviceError, OutputError
from ..progress import progress
from .terminal import console, print_json, table


def pack(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sm_NN", help="An architecture, or all; by default this GPU's. Repeatable."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the packs go; by default the cache.")
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Add kernels on trial, to try with MOONPOLY_PACK.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the packs that are found.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print JSON.")] = False,
) -> None:
    """Build kernel packs: all kernels of an architecture in one file. Needs Triton, no GPU."""
    from .. import packs, tables

    if listing:
        _list_packs(as_json)
        return
    if as_json:
        raise typer.BadParameter("--json goes with --list")
    if trial and output is None:
        raise typer.BadParameter("--trial needs --output: the cache is for packs without them")
    for sm in _architectures(arch or []):
        folder = output or packs.cache_dir()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or error
            raise OutputError(f"cannot make the folder {folder}: {why}") from error
        with progress(f"sm_{sm}") as report:
            path = packs.build_pack(
                sm,
                folder / packs.pack_name(sm),
                tables=tables.cost_tables(sm, trial=trial),
                progress=report,
                trial=trial,
            )
        typer.echo(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def _list_packs(as_json: bool) -> None:
    from ..doctor import examine

    found = examine()
    if as_json:
        print_json(found.packs)
        return
    columns = ("pack", "kernels", "MiB", "Triton", "state")
    rows = [
        (
            p["path"],
            p["kernels"],
            p["bytes"] / 2**20,
            p["triton"],
            "fresh" if p["fresh"] else "stale",
        )
        for p in found.packs
    ]
    console().print(table("", columns, rows))
    if not rows:
        typer.echo(f"no packs in {', '.join(found.pack_folders)}")


def _architectures(given: list[str]) -> list[int]:
    from .. import native, packs

    supported = packs.supported_architectures()
    accepted = ", ".join(f"sm_{sm}" for sm in supported)
    if not given:
        if not native.device_count():
            raise ArgumentError(
                f"there is no GPU here to build for: give --arch, one of {accepted}, or --arch all"
            )
        return [native.device_query(0).sm]
    if given == ["all"]:
        return supported
    wanted = []
    for text in given:
        match = re.fullmatch(r"sm_?(\d+)", text)
        if not match:
            raise ArgumentError(
                f"--arch {text} is no architecture; accepted: {accepted}, or all (alone)"
            )
        if int(match[1]) not in supported:
            raise DeviceError(
                f"--arch {text}: there are no kernels for this architecture, only for {accepted}"
            )
        wanted.append(int(match[1]))
    return wanted


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports.")] = False,
) -> None:
    """Show what is installed and found on this machine, and what is wrong with it."""
    from ..doctor import examine

    found = examine()
    if as_json:
        print_json(found.as_dict())
        return
    out = console()
    runtime = found.onnxruntime
    rows = [("Python", found.python), ("platform", found.platform)]
    rows += [(name, version or "not installed") for name, version in found.packages.items()]
    rows += [
        (flavour, f"{runtime['version']}, providers {', '.join(runtime['providers'])}")
        for flavour in runtime["flavours"]
    ]
    rows.append(("library", found.library.get("path", "missing")))
    rows += [
        (f"GPU {gpu['ordinal']}", f"{gpu['name']}, sm_{gpu['sm']}, {gpu['sm_count']} SMs")
        for gpu in found.gpus
    ] or [("GPU", "none found")]
    rows += [
        ("pack", f"{p['path']}, {p['kernels']} kernels, {'fresh' if p['fresh'] else 'stale'}")
        for p in found.packs
    ] or [("packs", f"none in {', '.join(found.pack_folders)}")]
    rows += [
        ("table", f"{t['path']}, {t['gpu']}, {t['kernels']} kernels, {t['date']}")
        for t in found.tables
    ] or [("tables", f"none in {', '.join(found.table_folders)}")]
    out.print(table("", ("", ""), rows))
    for problem in found.problems:
        out.print(f"! {problem}", markup=False, soft_wrap=True)
    if not found.problems:
        out.print("No problems found.")


def version() -> None:
    """Print the version."""
    from .. import __version__

    typer.echo(f"moonpoly {__version__}")

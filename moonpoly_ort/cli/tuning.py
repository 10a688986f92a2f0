"""`moonpoly tune`: measures this machine's GPU and writes a performance table."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..progress import progress
from .terminal import console, print_json, table

if TYPE_CHECKING:
    from ..tuning import Outcome

QUIET_SECONDS = 15.0  # between lines of progress where there is no terminal to draw a bar on


def tune(
    dtype: Annotated[
        str, typer.Option(help="Of f16, bf16, f32 (TF32), f32ieee, with commas; all by default.")
    ] = "",
    layout: Annotated[
        str, typer.Option(help="Of nn, nt, tn, tt, with commas: t is stored transposed.")
    ] = "",
    op: Annotated[
        str,
        typer.Option(help="Of gemm, conv, with commas: products, convolutions; both by default."),
    ] = "",
    budget: Annotated[float, typer.Option(metavar="MINUTES", help="Stop measuring then.")] = 20.0,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Tune for this model's own weights.")
    ] = None,
    rows: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="With --model: row counts (M) to cover.")
    ] = "1:4096",
    pixels: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="With --model: output pixels of its convolutions."),
    ] = "64:65536",
    gpu: Annotated[int, typer.Option(metavar="ORDINAL", help="The GPU to measure.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the table goes; by default where it is found."),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(help="Measure this kernel pack: then Triton is not needed.")
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Build the pack with kernels on trial.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only kernels whose names contain it.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Measure a GPU that is in use.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what earlier runs measured.")
    ] = False,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Drop no kernel, however little it gains.")
    ] = False,
    tuned_pack: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a copy of the pack with the table.")
    ] = None,
    refit: Annotated[
        Path | None,
        typer.Option(metavar="JOURNAL", help="Only fit an earlier run's timings; needs no GPU."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the kernels on this GPU and write the table that plans are then made with.

    Goes on where an earlier run on the same GPU and pack stopped.
    """
    from .. import tuning

    if trial and pack:
        raise typer.BadParameter("--trial builds a pack and --pack names one: give either")
    options = tuning.Options(
        gpu=gpu, numbers=_listed(dtype), layouts=_listed(layout), operations=_listed(op),
        model=model, rows=_range("--rows", rows), pixels=_range("--pixels", pixels),
        minutes=budget, output=output, pack=pack, trial=trial, only=only, force=force, fresh=fresh,
        keep_all=keep_all, tuned_pack=tuned_pack,
    )  # fmt: skip

    def say(text: str) -> None:
        typer.echo(text, err=True)

    if refit is not None:
        outcome = tuning.refit(refit, options, say=say)
    else:
        with progress("tuning") as bar:
            outcome = tuning.tune(options, report=_Reporter(bar), say=say)
    if as_json:
        print_json(outcome.as_dict())
    else:
        _show(outcome)
        if outcome.convolutions is not None:
            _show(outcome.convolutions)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _range(option: str, text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+):(\d+)", text)):
        raise typer.BadParameter(f"{option} {text!r}: two numbers are expected, such as 1:4096")
    return int(match[1]), int(match[2])


class _Reporter:
    """Draws the bar; where there is no terminal, prints a line now and then."""

    def __init__(self, bar: object) -> None:
        self._bar, self._last = bar, time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        self._bar(done, total, name)  # type: ignore[operator]
        if not sys.stderr.isatty() and time.monotonic() - self._last > QUIET_SECONDS:
            self._last = time.monotonic()
            typer.echo(f"{done} of {total}: {name}", err=True)


def _show(outcome: Outcome) -> None:
    out = console()
    fitted = outcome.fitted
    qualities = [("analytic model", fitted.analytic), ("fitted, shapes held out", fitted.held_out),
                 ("fitted, its own shapes", fitted.own)]  # fmt: skip
    rows = [
        (name, f"{q.mean:.4f}", f"{q.worst:.3f}", q.shapes, q.untimed, f"{q.error:.1%}")
        for name, q in qualities
        if q is not None
    ]
    columns = ("best / chosen", "mean", "worst", "shapes", "choices not timed", "median error")
    if (checked := outcome.verified) is not None:
        for name, mean, worst in (
            ("timed on other shapes", checked.mean, f"{checked.worst:.3f}"),
            ("the same without a table", checked.untuned_share, ""),
        ):
            rows.append((name, f"{mean:.4f}", worst, len(checked.checks), 0, ""))
        if checked.against_vendor is not None:
            name, mean = "the same, cuBLASLt among both", checked.allowed_share
            rows.append((name, f"{mean:.4f}", "", len(checked.checks), 0, ""))
    out.print(table("", columns, rows))
    if checked is not None:
        worst_rows = [
            (c.shape, f"{c.share:.3f}", f"{c.tuned_us:.2f}", c.tuned, f"{c.best_us:.2f}", c.best)
            for c in checked.checks[:5]
        ]
        head = ("furthest from the best", "share", "us", "plan", "best, us", "candidate")
        out.print(table("", head, worst_rows))
    lines = [
        f"{outcome.gpu}: {outcome.kernels} kernels measured on {outcome.shapes} shapes "
        f"({outcome.timings} timings) in {outcome.seconds:.0f} s; {outcome.left} shapes left",
        f"memory bandwidth {fitted.bandwidth:.0f} GB/s fits best",
        f"without a table this GPU runs at {(checked or fitted).untuned:.3f} of its tuned speed "
        "(geometric mean)",
        f"{len(outcome.dropped)} kernels dropped, {len(outcome.blocked)} blocked as wrong",
    ]
    if checked is not None and checked.against_vendor is not None:
        lines.append(
            f"{checked.against_vendor:.3f} times the speed of cuBLASLt on the other shapes "
            "(geometric mean)"
        )
    if outcome.vendor_wins is not None:
        lines.append(f"cuBLASLt was fastest on {outcome.vendor_wins:.1%} of the shapes")
    lines += [f"journal {outcome.journal}", f"table {outcome.table}"]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)

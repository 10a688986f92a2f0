"""The command `moonpoly`. One module per group of commands; `main` is the entry point.

Exit codes: 0 success, 1 unexpected error, 2 wrong usage, 3 bad model or input, 4 output cannot be
written, 5 missing package, library, driver or GPU, 6 bad kernel pack or performance table.
"""

from __future__ import annotations

import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import MoonPolyError
from . import machine, models, tuning

HELP = """Runs exported ONNX models on polymerized Triton micro-kernels.

Exit codes: 0 success, 1 unexpected error, 2 wrong usage, 3 bad model or input, 4 output cannot be
written, 5 missing package, library, driver or GPU, 6 bad kernel pack or performance table.
"""


class _Commands(TyperGroup):
    """Turns every error of this package into one line on stderr and its exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MoonPolyError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(error.exit_code) from error


app = typer.Typer(cls=_Commands, help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass  # read in _Commands.invoke


app.command("rewrite")(models.rewrite)
app.command("run")(models.run)
app.command("explain")(models.explain)
app.command("pack")(machine.pack)
app.command("tune")(tuning.tune)
app.command("doctor")(machine.doctor)
app.command("version")(machine.version)


def main() -> None:
    """The entry point of the command `moonpoly`."""
    app(prog_name="moonpoly")

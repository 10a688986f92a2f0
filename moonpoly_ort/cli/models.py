"""`moonpoly rewrite`, `run` and `explain`: commands that take a model."""

from __future__ import annotations

import os
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import dependencies
from ..errors import DeviceError, InputError, ModelError, OutputError
from ..files import replacing
from ..progress import progress
from .terminal import console, parse_dims, print_json, table

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The ONNX model.")]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="A dimension's size (batch=1), or an input's shape (x=1,3,48,320). Repeatable.",
    ),
]
Rules = Annotated[
    list[str] | None, typer.Option(metavar="RULE", help="Apply only this rule. Repeatable.")
]
Disabled = Annotated[
    list[str] | None,
    typer.Option(metavar="RULE", help="Leave this rule, or pass of --optimize, out. Repeatable."),
]
Optimize = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Run a graph optimizer first: auto, onnxscript, ort or ort:TYPE (ort:bert); with "
        "-lean, -mha or -packed behind the library's name, passes over attention too. The "
        "result needs ONNX Runtime.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _list_rules(asked: bool) -> None:
    if asked:
        from ..rewriting import list_rules

        rules = [(rule.name, rule.transformation) for rule in list_rules()]
        console().print(table("", ("rule", "what it does"), rules))
        raise typer.Exit


def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The ONNX model.")],
    target: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Where the rewritten model goes.")
    ] = None,
    static: Annotated[
        bool, typer.Option(help="Take nodes whose shapes are all fixed, too.")
    ] = False,
    rules: Rules = None,
    disable: Disabled = None,
    optimize: Optimize = None,
    list_rules: Annotated[
        bool,
        typer.Option("--list-rules", is_eager=True, callback=_list_rules, help="List the rules."),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Say of every node why it was taken or not.")
    ] = False,
    as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report, write nothing.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace data files in OUT's folder that have other content."
        ),
    ] = False,
) -> None:
    """Replace MatMul, Gemm and Conv nodes by ops that run in any ONNX Runtime."""
    from ..rewriting import rewrite as rewrite_model

    if (target is None) != dry_run:
        raise typer.BadParameter("give either OUT or --dry-run")
    _refuse_unknown_rules(rules, disable)
    result = rewrite_model(
        source,
        target,
        static=static,
        rules=rules or None,
        disable=disable or (),
        overwrite=overwrite,
        optimize=optimize,
    )
    entries = list(result.report)
    if as_json:
        print_json(
            {
                "input": str(source),
                "output": str(target) if target else None,
                "taken": sum(entry.taken for entry in entries),
                "nodes": [describe_entry(entry) for entry in entries],
            }
        )
        return
    out = console()
    if report:
        columns = ("node", "op", "where", "rule", "why not")
        out.print(
            table("", columns, [list(describe_entry(entry).values())[:5] for entry in entries])
        )
    taken = sum(entry.taken for entry in entries)
    out.print(f"{taken} of {len(entries)} candidate nodes taken", markup=False)
    for reason, count in Counter(str(e.reason) for e in entries if not e.taken).most_common():
        out.print(f"  {count} left: {reason}", markup=False)
    if target:
        out.print(f"written to {target}", markup=False)


def _refuse_unknown_rules(rules: list[str] | None, disable: list[str] | None) -> None:
    from ..errors import ProblemError
    from ..graph_passes import pipeline

    try:
        pipeline.select(rules or None, disable or ())
    except ProblemError as error:
        raise typer.BadParameter(str(error)) from error


def describe_entry(entry: Any) -> dict[str, Any]:
    """One entry of a rewrite report as plain data."""
    return {
        "node": entry.name or entry.output,
        "op": entry.op_type,
        "where": entry.where,
        "rule": entry.rule,
        "why_not": "" if entry.taken else f"{entry.reason}: {entry.detail}",
        "taken": entry.taken,
    }


def run(
    model: ModelPath,
    inputs: Annotated[
        Path | None,
        typer.Option(metavar="X.npz", help="Inputs by name; without it they are random."),
    ] = None,
    dim: Dims = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    outputs: Annotated[
        Path | None, typer.Option(metavar="Y.npz", help="Where the outputs go, by name.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cuda or interpreter.")] = "auto",
    precision: Annotated[str, typer.Option(help="tf32 or ieee: how fp32 is multiplied.")] = "tf32",
    provider: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="cpu, cuda or a full provider name, in order. Repeatable."
        ),
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="The kernel pack to use.")] = None,
    shapes: Annotated[
        str, typer.Option(help="changing or repeating: what the session is set for.")
    ] = "changing",
    optimize: Optimize = None,
    repeat: Annotated[int, typer.Option(min=0, help="Run so many times more and time it.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a model once, rewritten on the fly, on inputs from a file or of given sizes."""
    dependencies.load("onnxruntime", "running a model")
    from ..session import InferenceSession

    if outputs:
        _refuse_output(outputs, model, inputs)
    providers = _providers(provider, backend)
    values = _load_inputs(inputs, dim) if inputs else _random_inputs(model, dim, seed)
    session = _open(
        InferenceSession,
        model,
        providers=providers,
        backend=backend,
        precision=precision,
        pack=pack,
        shapes=shapes,
        optimize=optimize,
    )
    names = [output.name for output in session.get_outputs()]
    try:
        results = session.run(None, values)
        times = []
        with progress("running") as report:
            for i in range(repeat):
                start = time.perf_counter()
                session.run(None, values)
                times.append((time.perf_counter() - start) * 1e3)
                report(i + 1, repeat, "")
    except Exception as error:  # onnxruntime has no common base for its errors
        raise InputError(f"{model} did not run on these inputs: {error}") from error
    if outputs:
        save_arrays(outputs, dict(zip(names, results, strict=True)))
    dims = {name: list(np.shape(value)) for name, value in zip(names, results, strict=True)}
    timing = {"median_ms": float(np.median(times)), "min_ms": min(times)} if times else None
    if as_json:
        print_json(
            {
                "backend": session.moonpoly_backend,
                "providers": session.get_providers(),
                "inputs": {name: list(value.shape) for name, value in values.items()},
                "outputs": dims,
                "time": timing,
            }
        )
        return
    out = console()
    rows = [("input", name, value.dtype, list(value.shape)) for name, value in values.items()]
    rows += [
        ("output", name, getattr(value, "dtype", type(value).__name__), dims[name])
        for name, value in zip(names, results, strict=True)
    ]
    out.print(table("", ("", "name", "type", "shape"), rows))
    out.print(f"backend {session.moonpoly_backend}, providers {', '.join(session.get_providers())}")
    if timing:
        out.print(
            f"median {timing['median_ms']:.3f} ms, least {timing['min_ms']:.3f} ms, {repeat} runs"
        )
    if outputs:
        out.print(f"written to {outputs}", markup=False)


def _providers(given: list[str] | None, backend: str) -> list[str]:
    short = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    ort = dependencies.load("onnxruntime", "running a model")
    available = ort.get_available_providers()
    if not given:
        given = (
            ["cuda", "cpu"] if backend != "interpreter" and short["cuda"] in available else ["cpu"]
        )
        if backend == "cuda" and "cuda" not in given:
            given = ["cuda", "cpu"]
    wanted = [short.get(name.lower(), name) for name in given]
    if unknown := [name for name in wanted if name not in available]:
        raise DeviceError(
            f"this onnxruntime {ort.__version__} has no {unknown[0]}; it has {', '.join(available)}"
        )
    if short["cuda"] in wanted:
        ort.preload_dlls()  # the CUDA libraries that pip installed
    return wanted


def _refuse_output(outputs: Path, model: Path, inputs: Path | None) -> None:
    """Before anything runs: a folder that takes no file, or a file that is read itself."""
    if not os.access(outputs.absolute().parent, os.W_OK):
        raise OutputError(f"cannot write {outputs}: its folder is missing or not writable")
    for what, path in (("model", model), ("file of the inputs", inputs)):
        if path is not None and path.exists() and outputs.exists() and outputs.samefile(path):
            raise OutputError(f"the output {outputs} is the {what} itself. Choose another name.")


def _load_inputs(path: Path, dim: list[str] | None) -> dict[str, np.ndarray[Any, Any]]:
    if dim:
        raise typer.BadParameter("give either --inputs or --dim")
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # of other files numpy expects pickles
                raise ValueError("it is no archive")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                values = {name: archive[name] for name in archive.files}
        if other := [name for name, value in values.items() if not isinstance(value, np.ndarray)]:
            raise ValueError(f"its member {other[0]!r} is no array")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"cannot read inputs from {path}: {why}. An .npz of numpy.savez is expected."
        ) from error
    return values


def _random_inputs(path: Path, dim: list[str] | None, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    from ..model_files import read
    from ..sizing import feeds

    return feeds(read(path).model, parse_dims(dim or ()), seed)


def _open(session: Any, model: Path, **arguments: Any) -> Any:
    try:
        return session(model, **arguments)
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            raise ModelError(f"ONNX Runtime cannot load {model}: {error}") from error
        raise


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes an .npz, whole or not at all. Raises `OutputError`."""
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray):
                kind = type(value).__name__
                raise OutputError(f"output {name!r} is a {kind}; an .npz holds tensors only")
            array = value.astype(str) if value.dtype == object else value
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def explain(
    model: ModelPath,
    dim: Dims = None,
    inputs: Annotated[
        Path | None, typer.Option(metavar="X.npz", help="Inputs, where shapes depend on values.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of a known GPU; by default the one here, else H200.")
    ] = None,
    precision: Annotated[str, typer.Option(help="tf32 or ieee: how fp32 is multiplied.")] = "tf32",
    pack: Annotated[Path | None, typer.Option(help="The kernel pack to plan with.")] = None,
    node: Annotated[str | None, typer.Option(help="Only the node of this name.")] = None,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph", help="Show what rewriting makes of the graph, and what it left and why."
        ),
    ] = False,
    rules: Rules = None,
    disable: Disabled = None,
    optimize: Optimize = None,
    as_json: AsJson = False,
) -> None:
    """Show the kernels chosen for every node at given sizes, or the rewritten graph. No GPU."""
    if graph:
        if dim or inputs or gpu or pack or node:
            raise typer.BadParameter("--graph takes no sizes, GPU, pack or node")
        from ..graph_explaining import explain_graph

        _refuse_unknown_rules(rules, disable)
        explained = explain_graph(
            model, rules=rules or None, disable=disable or (), optimize=optimize
        )
        if as_json:
            print_json(explained.as_dict())
        else:
            console().print(explained)
        return
    if rules or disable:
        raise typer.BadParameter("--rules and --disable go with --graph")
    from ..explaining import explain as explain_model

    sizes = _load_inputs(inputs, dim) if inputs else parse_dims(dim or ())
    plans = explain_model(
        model, sizes, gpu=gpu, precision=precision, pack=pack, node=node, optimize=optimize
    )
    if as_json:
        print_json(plans.as_dict())
    else:
        console().print(plans)

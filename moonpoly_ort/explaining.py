"""Which kernels a model's nodes get at given sizes on a GPU, without that GPU: `explain`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import onnx

from . import conv_planning, devices, native, packs
from .errors import ArgumentError, InputError, KernelMissingError, ProblemError
from .graph_passes.domain import DOMAIN
from .graph_passes.operators import BASES, OPERATORS, Operator, Residual
from .sizing import Shape, Sizes, all_nodes, mark, node_shapes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

DTYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT16: "f16",
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.FLOAT: "f32",
}
DEFAULT_GPU = "H200"
VENDOR = "cuBLASLt"
CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class Region:
    """One launch: rows [m0, m0 + m), columns [n0, n0 + n), batch entries [z0, z0 + z) of the
    product; of a depthwise convolution rows are the channels of all groups.
    """

    kernel: str  # of the pack, or "cuBLASLt"
    m0: int
    m: int
    n0: int
    n: int
    z0: int
    z: int
    split: int  # slices of K
    grid: int  # thread blocks
    waves: float  # grid over the blocks that the GPU holds at once; 0 for cuBLASLt
    predicted_us: float


@dataclass(frozen=True)
class NodePlan:
    """The plan of one node for one set of input shapes.

    `m`, `n`, `k`, `batch` are the product as it is computed (a batch may be folded into `m`, a
    product of one column is computed transposed); of a convolution the implicit one: output
    channels of a group, output pixels, input channels of a group times taps, images times groups.
    `launches` is how often the regions are launched, `calls` how often the node runs with these
    shapes in one run of the model. `copies` names the operands, "a" and "b", that are copied with
    padded rows in front of the regions; `repacked` says that the plan is for a constant weight that
    is stored anew at creation. `why_not` is empty, or says why there is no plan: then `regions` is
    empty.
    """

    name: str
    op: str
    dtype: str
    inputs: tuple[Shape | None, ...]
    calls: int
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 0
    launches: int = 0
    regions: tuple[Region, ...] = ()
    copies: tuple[str, ...] = ()
    repacked: bool = False
    workspace_bytes: int = 0
    predicted_us: float = 0.0  # one call of the node
    why_not: str = ""


@dataclass(frozen=True)
class Explanation(Sequence[NodePlan]):
    """The plans of a model's nodes in order, and what they were made with. Prints as a table."""

    gpu: str
    pack: str  # the pack file, or "catalog": estimated resources, nothing compiled
    costs: str  # "measured" on this GPU, "analytic model", or "none" where nothing is launched
    plans: tuple[NodePlan, ...] = field(repr=False)

    @overload
    def __getitem__(self, index: int) -> NodePlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[NodePlan, ...]: ...
    def __getitem__(self, index: int | slice) -> NodePlan | tuple[NodePlan, ...]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[NodePlan]:
        return iter(self.plans)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .cli.terminal import table

        yield f"{self.gpu}, kernels: {self.pack}, costs: {self.costs}"
        if not self.plans:
            yield "no node is taken; `moonpoly explain MODEL --graph` says why"
            return
        columns = (
            "node",
            "op",
            "type",
            "M",
            "N",
            "K",
            "batch",
            "calls",
            "kernel",
            "split",
            "grid",
            "waves",
            "us",
        )
        yield table("", columns, (row for plan in self.plans for row in _rows(plan)))

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(file=text, width=200, highlight=False).print(self)
        return text.getvalue().rstrip()


def _rows(plan: NodePlan) -> Iterator[tuple[Any, ...]]:
    head = (plan.name, plan.op, plan.dtype)
    if plan.why_not:
        yield *head, "", "", "", "", plan.calls, plan.why_not, "", "", "", ""
    for r in plan.regions:
        size = (r.m, r.n, plan.k, r.z, plan.calls * plan.launches)
        blocks = ("", "", "")  # cuBLASLt keeps its launch to itself
        if r.kernel != VENDOR:
            blocks = (str(r.split), str(r.grid), f"{r.waves:.2f}")
        weight = "w" if plan.op in CONVOLUTIONS else "b"
        how = [f"{operand} copied" for operand in plan.copies]
        how += [f"{weight} repacked"] * plan.repacked
        kernel = f"{r.kernel} ({', '.join(how)})" if how else r.kernel
        yield *head, *size, kernel, *blocks, f"{r.predicted_us:.2f}"


def explain(
    model: str | bytes | os.PathLike[str] | onnx.ModelProto,
    shapes: Sizes | None = None,
    *,
    gpu: str | None = None,
    precision: str = "tf32",
    pack: str | os.PathLike[str] | None = None,
    node: str | None = None,
    optimize: str | None = None,
) -> Explanation:
    """Plans every node that MoonPoly takes of a model, at given sizes. Needs no GPU.

    Args:
        model: an ONNX model, rewritten or not (static nodes are not taken on the way).
        shapes: sizes of symbolic dimensions (`{"batch": 1, "seq": 37}`), shapes of inputs
            (`{"x": [1, 37, 768]}`), or inputs themselves as arrays, where shapes depend on values.
        gpu: a known GPU (see `moonpoly_ort.devices`); by default the one here, else an H200.
        precision: how fp32 is multiplied, `tf32` or `ieee`.
        pack: a kernel pack; by default the one for the GPU if it is found, else the catalog, in
            which nothing is compiled and the kernels' resources are estimates.
        node: plan only the node of this name (or with this first output).
        optimize: a graph optimizer to run first, as for `rewrite`.

    Raises:
        ModelError: the model cannot be read. InputError: sizes that do not fit it, or no such node.
        DeviceError: the GPU is unknown. PackError: the pack cannot be used.
    """
    if precision not in ("tf32", "ieee"):
        raise ArgumentError(f"precision = {precision!r}; accepted: 'tf32', 'ieee'")
    from .rewriting import rewrite

    rewritten = rewrite(model, optimize=optimize)
    marked = rewritten.model
    nodes = _mark_ours(marked)
    if node is not None and node not in (names := [n.name or n.output[0] for n in nodes]):
        raise InputError(f"no node {node!r} is taken. Taken: {', '.join(names) or 'none'}.")
    sizes = node_shapes(marked, shapes or {}, rewritten.base_dir)
    device = _device(gpu)
    path = packs.find_pack(device.sm, pack)
    opened = native.Pack(path if path is not None else packs.catalog(device.sm))
    plans: list[NodePlan] = []
    weights = {tensor.name for tensor in marked.graph.initializer}
    measured = False
    for index, original in enumerate(nodes):
        name = original.name or original.output[0]
        if node is not None and name != node:
            continue
        dtype = DTYPES.get(sizes.elements.get(index, 0), "")
        base = NodePlan(name, OPERATORS[original.op_type].standard, dtype, (), 0)
        if not dtype:
            plans.append(replace(base, why_not="its element type is not known: no weight tells it"))
            continue
        if index in sizes.why:
            plans.append(replace(base, why_not=sizes.why[index]))
        for inputs, calls in sizes.found.get(index, {}).items():
            at_shapes = replace(base, inputs=inputs, calls=calls)
            plan, was_measured = _plan(at_shapes, original, precision, opened, device, weights)
            plans.append(plan)
            measured |= was_measured
    costs = "analytic model" if any(plan.regions for plan in plans) else "none"
    return Explanation(
        gpu=device.name,
        pack=str(path)
        if path is not None
        else "catalog (nothing compiled, resources are estimates)",
        costs="measured" if measured else costs,
        plans=tuple(plans),
    )


def _mark_ours(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Turns our nodes into marked standard ones, in place; copies of the originals, by mark."""
    originals: list[onnx.NodeProto] = []
    special: dict[str, onnx.NodeProto] = {}
    bodies = [model.graph.node, *(f.node for f in model.functions if f.domain != DOMAIN)]
    for node in (node for body in bodies for node in all_nodes(body)):
        if node.domain == DOMAIN:
            operator = OPERATORS[node.op_type]
            base = BASES[operator.base]
            # What follows the product changes no shape, but for that of special bases.
            del node.input[len(base.inputs) - base.has_vector :]
            for extra in [a for a in node.attribute if a.name not in base.attributes]:
                node.attribute.remove(extra)
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            if base.scaled:
                del node.attribute[:]
            mark(node, len(originals))
            node.domain, node.op_type = "", operator.standard
            originals.append(copy)
            if base.gated or base.to_float or base.turned:
                special[node.name] = copy
    for body in bodies:
        _give_shapes_of(special, body)
    kept = [function for function in model.functions if function.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(kept)
    return originals


def _give_shapes_of(
    special: Mapping[str, onnx.NodeProto], body: MutableSequence[onnx.NodeProto]
) -> None:
    """Puts nodes behind products, by their names, that give them the shapes and types of the
    outputs which they had; and one in front of those that transpose. Their marks name what is new,
    which no value of the model is called."""
    for index in reversed(range(len(body))):
        node = body[index]
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                _give_shapes_of(special, graph.node)
        original = special.get(node.name)
        if original is None:
            continue
        base = BASES[OPERATORS[original.op_type].base]
        output = node.output[0]
        if base.turned:
            (perm,) = (a.ints for a in original.attribute if a.name == "perm")
            turned = f"{node.name}/turned"
            transpose = onnx.helper.make_node("Transpose", [node.input[1]], [turned], perm=perm)
            node.input[1] = turned
            body.insert(index, transpose)
            continue
        node.output[0] = f"{node.name}/product"
        behind = onnx.helper.make_node(
            "Cast", [node.output[0]], [output], to=onnx.TensorProto.FLOAT
        )
        if base.gated:
            numbers = [f"{node.name}/{what}" for what in ("starts", "ends", "axes", "steps")]
            behind = onnx.helper.make_node("Slice", [node.output[0], *numbers], [output])
            for name, value in zip(numbers, (0, 2**31 - 1, -1, 2), strict=True):
                tensor = onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value])
                constant = onnx.helper.make_node("Constant", [], [name], value=tensor)
                body.insert(index + 1, constant)
        body.insert(index + 1 + (len(numbers) if base.gated else 0), behind)


def _device(gpu: str | None) -> native.Device:
    if gpu is not None:
        return devices.lookup(gpu)
    return native.device_query(0) if native.device_count() else devices.lookup(DEFAULT_GPU)


def _plan(
    base: NodePlan, node: onnx.NodeProto, precision: str, pack: native.Pack, device: native.Device,
    weights: set[str],
) -> tuple[NodePlan, bool]:  # fmt: skip
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    a, b, *rest = base.inputs
    if a is None or b is None:
        return replace(base, why_not="an operand is missing"), False
    arithmetic = native.Dtype[base.dtype.upper()], native.Precision[precision.upper()]
    if base.op in CONVOLUTIONS:
        return _plan_convolution(base, node, arithmetic, pack, device, weights)
    try:
        if base.op == "MatMul":
            turned = BASES[OPERATORS[node.op_type].base].turned
            stored = [*b[:-2], b[-1], b[-2]] if turned else b
            problem, launches = native.matmul_problem(a, stored, *arithmetic, trans_b=turned)
            problem.alpha = attributes.get("alpha", 1.0)
        else:
            launches = 1
            problem = native.gemm_problem(
                a,
                b,
                rest[0] if rest else None,
                *arithmetic,
                trans_a=bool(attributes.get("transA", 0)),
                trans_b=bool(attributes.get("transB", 0)),
                alpha=attributes.get("alpha", 1.0),
                beta=attributes.get("beta", 1.0),
            )
        _add_epilogue(problem, OPERATORS[node.op_type], b[-1], attributes.get("beta", 1.0))
        plan = pack.plan(device, problem)
        repacked = False
        # As a session does: a constant matrix, unless the product was turned round.
        if node.input[1] in weights and len(b) == 2 and b[1 - _turned(attributes)] > 1:
            packed, size = pack.repacked(problem)
            if size:
                other = pack.plan(device, packed)
                repacked = other.predicted_us < plan.predicted_us
                plan = other if repacked else plan
    except (ProblemError, KernelMissingError) as error:
        return replace(base, why_not=str(error)), False
    extents = problem.m, problem.n, problem.k, problem.batch
    at_once = replace(base, launches=launches, repacked=repacked)
    return _explained(at_once, extents, plan, pack, device), plan.measured


def _add_epilogue(problem: native.Problem, operator: Operator, columns: int, beta: float) -> None:
    """What follows the product counts in its plan: R is read, and cuBLASLt does neither."""
    if BASES[operator.base].has_vector:
        problem.bias, problem.beta = native.Bias.VECTOR, beta
        problem.bias_stride_n = columns > 1
    # By their names: LeakyRelu is LEAKY_RELU.
    codes = {code.name.replace("_", ""): code for code in native.Activation}
    problem.activation = codes[operator.activation.upper() or "NONE"]
    problem.residual = list(Residual).index(operator.residual)
    problem.wide = BASES[operator.base].to_float
    if BASES[operator.base].gated:
        _gate(problem)


def _gate(problem: native.Problem) -> None:
    """As the ops do where Y has a column for two of the product."""
    outputs = problem.n // 2
    unit = 16 // (4 if problem.dtype == native.Dtype.F32 else 2)
    problem.gated, problem.ldc = 1, outputs if problem.m > 1 else -(-outputs // unit) * unit
    problem.c_batch_stride = problem.m * outputs
    problem.align_c = math.gcd(outputs, unit) * 16 // unit


def _plan_convolution(
    base: NodePlan, node: onnx.NodeProto, arithmetic: tuple[native.Dtype, native.Precision],
    pack: native.Pack, device: native.Device, weights: set[str],
) -> tuple[NodePlan, bool]:  # fmt: skip
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    x, w, *bias = base.inputs
    assert x is not None  # it is no optional input
    assert w is not None
    try:
        found = conv_planning.plan(
            pack, device, conv_planning.attributes_of(base.op, attributes), x, w, *arithmetic,
            bias=any(shape is not None for shape in bias), constant_w=node.input[1] in weights,
        )  # fmt: skip
    except (ProblemError, KernelMissingError, KeyError, ValueError) as error:
        return replace(base, why_not=str(error)), False
    at_once = replace(base, launches=1, repacked=found.repacked)
    return _explained(at_once, found.extents, found.plan, pack, device), found.plan.measured


def _explained(
    base: NodePlan, extents: tuple[int, int, int, int], plan: native.Plan, pack: native.Pack,
    device: native.Device,
) -> NodePlan:  # fmt: skip
    m, n, k, batch = extents
    return replace(
        base,
        m=m,
        n=n,
        k=k,
        batch=batch,
        regions=tuple(_region(region, pack, device) for region in plan.regions),
        copies=tuple(operand for operand, _ in plan.copies),
        workspace_bytes=plan.workspace_bytes,
        predicted_us=plan.predicted_us * base.launches,
        why_not="" if plan.regions else "the output is empty: nothing is launched",
    )


def _turned(attributes: dict[str, Any]) -> int:
    return int(bool(attributes.get("transB", 0)))


def _region(region: native.Region, pack: native.Pack, device: native.Device) -> Region:
    sizes = {name: getattr(region, name) for name in ("m0", "m", "n0", "n", "z0", "z")}
    if region.kernel == native.VENDOR:
        name, waves = VENDOR, 0.0
    else:
        kernel = pack.kernels[region.kernel]
        name = kernel.name
        waves = region.grid / (device.sm_count * native.blocks_per_sm(kernel, device))
    return Region(
        kernel=name,
        **sizes,
        split=region.split,
        grid=region.grid,
        waves=waves,
        predicted_us=region.predicted_us,
    )

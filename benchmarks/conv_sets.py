"""A convolution of the suite as a runtime meets it: operand sets, our plan, and what is exact.

Tensors are dense and at addresses aligned to 256 bytes, as ONNX Runtime's allocator gives them;
values are normal random numbers, made where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks import accuracy
from benchmarks.conv_suite import ConvRow
from benchmarks.convolutions import reference
from benchmarks.machine import Setting
from benchmarks.measuring import Launch
from benchmarks.operand_sets import matrices
from benchmarks.operands import DTYPES, NUMBERS
from moonpoly_ort import native
from moonpoly_ort.errors import KernelMissingError, ProblemError

_HUGE = 1 << 24  # pixels of Y from which on a 1 x 1 convolution is always a product


@dataclass(frozen=True)
class ConvSets:
    """`x`, `w`, `y`: one tensor a set, as ONNX has them; the W are equal."""

    row: ConvRow
    dtype: str  # a name of `NUMBERS`
    x: list[torch.Tensor]
    w: list[torch.Tensor]
    y: list[torch.Tensor]

    @staticmethod
    def allocate(row: ConvRow, dtype: str, sets: int, device: str, seed: int = 0) -> ConvSets:
        """Random X and W, the same for the same seed; Y is NaN."""
        generator = torch.Generator(device).manual_seed(seed)
        element = DTYPES[NUMBERS[dtype][0]]
        case = row.convolution(dtype)

        def make(shape: tuple[int, ...]) -> list[torch.Tensor]:
            count = torch.Size(shape).numel()
            return [t.view(shape) for t in matrices(sets, 1, 1, count, element, device)]

        x, w, y = make(case.x_shape), make(case.w_shape), make(row.y_shape)
        for tensor in (*x, w[0]):
            tensor.normal_(generator=generator)
        for copy in w[1:]:
            copy.copy_(w[0])
        for tensor in y:
            tensor.fill_(torch.nan)
        return ConvSets(row, dtype, x, w, y)

    def judge(self, result: torch.Tensor) -> accuracy.Judgement:
        """Y of the first set against float64, image by image."""
        case, x, w = self.row.convolution(self.dtype), self.x[0], self.w[0]
        tally = accuracy.Tally(self.dtype, self.row.depth, x.device)
        ones = torch.ones_like(w[:: case.k])  # one output channel a group: the sum of its inputs
        of_w = w.double().flatten(1).norm(dim=1).view(case.groups, case.k, 1, 1)
        for n in range(self.row.n):
            image = x[n : n + 1].double()
            of_x = reference(case, image.square(), ones, None).sqrt_()
            norms = of_w * of_x.view(case.groups, 1, *of_x.shape[2:])
            exact = reference(case, image, w, None)
            tally.add(result[n : n + 1], exact, norms.view(exact.shape))
        return tally.judgement()


def set_bytes(row: ConvRow, dtype: str) -> int:
    """Bytes of one set."""
    return row.elements * DTYPES[NUMBERS[dtype][0]].itemsize


@dataclass(frozen=True)
class ConvPlan:
    """A plan for a row: of its `conv`, or of the `product` that a 1 x 1 one is. `packed`: bytes of
    W as it is stored anew, once and not timed; 0 where it is taken as it is."""

    plan: native.Plan
    conv: native.Conv
    packed: int
    product: native.Problem | None = None
    w_is_a: bool = True


def planned(setting: Setting, row: ConvRow, dtype: str) -> ConvPlan:
    """What a node with a constant W runs (`conv_op.cc` chooses by the same rule).

    Raises:
        MoonPolyError: there is no plan.
    """
    problem = row.convolution(dtype).problem()
    product = problem.product
    if product is None:
        conv, packed = packed_conv(problem.conv)
        return ConvPlan(setting.pack.plan_conv(setting.device, conv), conv, packed)
    plan = setting.plan(product, flags=native.PlanFlag.NO_VENDOR)  # which nodes of Conv never use
    multiplied = ConvPlan(plan, problem.conv, 0, product, problem.w_is_a)
    if product.align_b == 16 or not problem.w_is_a or row.y_shape[2] * row.y_shape[3] > _HUGE:
        return multiplied
    # Rows of an odd number of pixels: kernels of convolutions load them ahead, products' do not.
    # There is no copy of such a W.
    convolved = setting.pack.plan_conv(setting.device, problem.conv)
    if convolved.predicted_us < multiplied.plan.predicted_us:
        return ConvPlan(convolved, problem.conv, 0)
    return multiplied


def packed_conv(conv: native.Conv) -> tuple[native.Conv, int]:
    """The convolution with its constant W stored anew where that is of use, and the bytes of that;
    else as it is, and 0."""
    packed, size = native.conv_packed(conv)
    return (packed, size) if size else (conv, 0)


def forced(setting: Setting, row: ConvRow, dtype: str) -> dict[str, ConvPlan]:
    """The plans of every kernel of convolutions that takes the row, by the kernel's name."""
    problem = row.convolution(dtype).problem()
    conv, packed = packed_conv(problem.conv)
    found = {}
    for index, kernel in enumerate(setting.pack.kernels):
        if not native.Family(kernel.family).convolves:
            continue
        for one, size in ((conv, packed), (problem.conv, 0)):
            try:
                plan = setting.pack.plan_conv(setting.device, one, kernel=index)
            except (KernelMissingError, ProblemError):
                continue
            found[kernel.name] = ConvPlan(plan, one, size)
            break
    return found


def ours(setting: Setting, sets: ConvSets, chosen: ConvPlan) -> Launch:
    """Launches the plan; W is stored anew here, where the plan takes it so."""
    runner, product = setting.runner, chosen.product
    runner.reserve(chosen.plan)
    weights = _stored_anew(sets, chosen.packed) if chosen.packed else sets.w
    pointers = [
        (x.data_ptr(), w.data_ptr(), 0, y.data_ptr())
        for x, w, y in zip(sets.x, weights, sets.y, strict=True)
    ]
    if product is not None and chosen.w_is_a:
        pointers = [(w, x, bias, y) for x, w, bias, y in pointers]

    def launch(index: int, keep: object = weights) -> None:
        if product is None:
            runner.launch_conv(chosen.conv, chosen.plan, pointers[index])
        else:
            runner.launch(product, chosen.plan, pointers[index])

    return launch


def _stored_anew(sets: ConvSets, size: int) -> list[torch.Tensor]:
    conv = sets.row.convolution(sets.dtype).problem().conv
    host, out = sets.w[0].cpu().contiguous(), torch.empty(size, dtype=torch.uint8)
    native.conv_pack(conv, host.data_ptr(), out.data_ptr())
    copies = matrices(len(sets.w), 1, 1, size, torch.uint8, str(sets.w[0].device))
    for copy in copies:
        copy.copy_(out.view(copy.shape))
    return copies


def cudnn(sets: ConvSets) -> Launch:
    """cuDNN as torch calls it for a convolution in NCHW: the fastest of the first ten plans of its
    heuristic, TF32 but for `f32ieee`.

    By the operator itself, since torch.nn.functional allocates Y, in a graph always at the same
    place. TF32 is allowed for 2-byte types too, as torch does: it stands for all tensor cores.
    """
    row, pad = sets.row, sets.row.kernel // 2
    convolve = torch.ops.aten.cudnn_convolution.out

    def launch(index: int) -> None:
        benchmark, deterministic, allow_tf32 = True, False, sets.dtype != "f32ieee"
        convolve(
            sets.x[index], sets.w[index], [pad, pad], [row.stride, row.stride], [1, 1],
            row.groups, benchmark, deterministic, allow_tf32, out=sets.y[index],
        )  # fmt: skip

    return launch

"""The structs and codes of `custom_ops/runtime/moonpoly.h` for ctypes; `native` calls with them
and checks their sizes against the library's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64
from enum import IntEnum, IntFlag

MAX_REGIONS = 16
VENDOR = -2  # MP_VENDOR: as the kernel of a region, cuBLASLt
VENDOR_TILES = 8
VENDOR_NODES = 5


class Dtype(IntEnum):
    F16 = 0
    BF16 = 1
    F32 = 2


class Precision(IntEnum):
    """How fp32 is multiplied; fp16 and bf16 problems say TF32."""

    TF32 = 0
    IEEE = 1


class Bias(IntEnum):
    """Gemm's C by its broadcast: scalar, row and column are VECTOR."""

    NONE = 0
    VECTOR = 1
    MATRIX = 2


class Activation(IntEnum):
    """`mp_activation`: what becomes of a result, with the numbers alpha and beta."""

    NONE = 0
    RELU = 1
    LEAKY_RELU = 2
    CLIP = 3
    SIGMOID = 4
    TANH = 5
    HARD_SIGMOID = 6
    HARD_SWISH = 7
    GELU = 8
    GELU_TANH = 9
    QUICK_GELU = 10
    SILU = 11


class Residual(IntEnum):
    """`mp_residual`: a tensor R of Y's shape, added before or after the activation, or multiplied
    with its result.
    """

    NONE = 0
    BEFORE = 1
    AFTER = 2
    MULTIPLIED = 3


class Family(IntEnum):
    GEMM_TMA = 0
    GEMM_POINTER = 1
    GEMM_WS = 2
    GEMM_DOT = 6
    GEMM_SHALLOW = 7
    GEMM_TMA_MASKED = 8
    COPY_PADDED = 9
    GEMV = 10
    CONV = 16
    CONV_TAPS4 = 17
    CONV_TAPS8 = 18
    CONV_TRANSPOSED = 19
    CONV_DEPTHWISE = 20
    CONV_DEPTHWISE_TRANSPOSED = 21

    @property
    def convolves(self) -> bool:
        return self >= Family.CONV


class PlanFlag(IntFlag):
    """`mp_plan_flags`: what a plan must do without."""

    NO_SPLIT = 1
    NO_REGIONS = 2
    NO_VENDOR = 4
    NO_STREAM = 8


class AutoPad(IntEnum):
    NOTSET = 0
    SAME_UPPER = 1
    SAME_LOWER = 2
    VALID = 3


class _Struct(ctypes.Structure):
    """A struct that shows its fields and can be filled by keyword."""

    def __repr__(self) -> str:
        values = ((field[0], getattr(self, field[0])) for field in self._fields_)
        shown = (
            f"{name}={list(value) if isinstance(value, ctypes.Array) else value!r}"
            for name, value in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


_EPILOGUE: tuple[tuple[str, type[c_int32] | type[c_float]], ...] = (
    ("activation", c_int32),
    ("residual", c_int32),
    ("act_alpha", c_float),
    ("act_beta", c_float),
)


class Problem(_Struct):
    """`mp_problem`: Y[z] = act(alpha * op(A[a(z)]) @ op(B[b(z)]) + beta * C), R[z] as `residual`
    says; a(z) = z // a_div % a_mod and b alike. Sizes and strides count elements, alignments bytes.

    `gated` 1: Y has the n / 2 products of columns 2 i, with the activation, and 2 i + 1. `wide` 1:
    Y of a 16-bit product is fp32, rounded to its type all the same.
    """

    _fields_ = [
        *((name, c_int32) for name in ("dtype", "precision", "trans_a", "trans_b")),
        *((name, c_int64) for name in ("m", "n", "k", "batch", "lda", "ldb", "ldc")),
        *((name, c_int64) for name in ("a_batch_stride", "b_batch_stride", "c_batch_stride")),
        *((name, c_int32) for name in ("a_div", "a_mod", "b_div", "b_mod")),
        *((name, c_int32) for name in ("align_a", "align_b", "align_c", "bias")),
        ("bias_stride_m", c_int64),
        ("bias_stride_n", c_int64),
        ("alpha", c_float),
        ("beta", c_float),
        *_EPILOGUE,
        ("gated", c_int32),
        ("wide", c_int32),
    ]


def epilogue_code(problem: Problem) -> int:
    """What a kernel gets as its parameter `activation`."""
    special = problem.gated << 16 | problem.wide << 17
    return int(problem.activation | problem.residual << 8 | special)


class Conv(_Struct):
    """`mp_conv`: a convolution at given sizes. Axes are depth, height, width; strides of W count
    elements. `w_taps`: how W is stored, 0 for anyhow.
    """

    _fields_ = [
        *((name, c_int32) for name in ("dtype", "precision", "transposed", "bias")),
        *((name, c_int64) for name in ("n", "groups", "c", "k")),
        *((name, c_int64 * 3) for name in ("inputs", "out", "kernel", "stride", "dilation", "pad")),
        *((name, c_int64) for name in ("w_g", "w_k", "w_c", "w_h", "w_w")),
        ("w_taps", c_int32),
        *_EPILOGUE,
        ("reserved", c_int32),
    ]


class ConvAttributes(_Struct):
    """`mp_conv_attributes`: those of an ONNX node. A list's count is 0 where the node lacks it."""

    _fields_ = [
        ("transposed", c_int32),
        ("auto_pad", c_int32),
        ("group", c_int64),
        *(
            (f"{name}_count", c_int32)
            for name in ("kernel", "stride", "dilation", "pad", "output_padding", "output_shape")
        ),
        *((name, c_int64 * 3) for name in ("kernel", "stride", "dilation")),
        ("pad", c_int64 * 6),
        *((name, c_int64 * 3) for name in ("output_padding", "output_shape")),
    ]

    @classmethod
    def of_node(
        cls,
        transposed: bool,
        *,
        auto_pad: str = "NOTSET",
        group: int = 1,
        kernel_shape: Sequence[int] = (),
        strides: Sequence[int] = (),
        dilations: Sequence[int] = (),
        pads: Sequence[int] = (),
        output_padding: Sequence[int] = (),
        output_shape: Sequence[int] = (),
    ) -> ConvAttributes:
        """From attributes as ONNX names them. Raises ValueError for lists that are too long."""
        out = cls(transposed=transposed, auto_pad=AutoPad[auto_pad], group=group)
        for name, values in (
            ("kernel", kernel_shape), ("stride", strides), ("dilation", dilations), ("pad", pads),
            ("output_padding", output_padding), ("output_shape", output_shape),
        ):  # fmt: skip
            array = getattr(out, name)
            if len(values) > len(array):
                raise ValueError(f"{name} has {len(values)} values; {len(array)} are possible")
            array[: len(values)] = list(values)
            setattr(out, f"{name}_count", len(values))
        return out


class Device(_Struct):
    """`mp_device`: the attributes of a GPU that planning reads. Bytes, MHz, GB/s."""

    _fields_ = [
        ("_name", c_char * 64),
        *(
            (name, c_int32)
            for name in (
                "sm", "sm_count", "shared_per_sm", "shared_per_block", "registers_per_sm",
                "threads_per_sm", "blocks_per_sm", "clock_mhz", "memory_clock_mhz",
                "memory_bus_bits",
            )
        ),
        ("l2_bytes", c_int64),
        ("memory_bytes", c_int64),
        ("bandwidth_gbps", c_double),
    ]  # fmt: skip

    def __init__(self, *, name: str = "", **attributes: float) -> None:
        super().__init__(_name=name.encode(), **attributes)

    @property
    def name(self) -> str:
        return str(self._name.decode())


class Region(_Struct):
    """`mp_region`: one launch, rows [m0, m0+m), columns [n0, n0+n), batch entries [z0, z0+z).
    `kernel`: its place in the pack, or `VENDOR`.
    """

    _fields_ = [
        ("kernel", c_int32),
        ("split", c_int32),
        *((name, c_int64) for name in ("m0", "m", "n0", "n", "z0", "z")),
        *((name, c_int64) for name in ("grid", "workspace_bytes", "counters")),
        ("predicted_us", c_double),
        ("workspace_offset", c_int64),
        ("counters_offset", c_int64),
        ("joins_previous", c_int32),
        ("reserved", c_int32),
    ]


class Copy(_Struct):
    """`mp_copy`: an operand copied to the workspace first, its rows along K and padded with zeros
    to whole units of 16 bytes. 0 bytes: no copy.
    """

    _fields_ = [
        ("kernel", c_int32),
        ("transposed", c_int32),
        *((name, c_int64) for name in ("offset", "bytes", "pitch", "batch_stride", "grid")),
    ]


class Plan(_Struct):
    """`mp_plan`: the regions that cover a problem, and the workspace they need."""

    _fields_ = [
        ("region_count", c_int32),
        ("_measured", c_int32),
        ("workspace_bytes", c_int64),
        ("counters", c_int64),
        ("predicted_us", c_double),
        ("_regions", Region * MAX_REGIONS),
        ("_copies", Copy * 2),
    ]

    @property
    def measured(self) -> bool:
        """Whether the costs came from a table measured on this GPU."""
        return bool(self._measured)

    @property
    def regions(self) -> list[Region]:
        return list(self._regions[: self.region_count])

    @property
    def copies(self) -> list[tuple[str, Copy]]:
        """The operands, "a" and "b", that are copied first."""
        return [(x, copy) for x, copy in zip("ab", self._copies, strict=True) if copy.bytes]


class DescShape(_Struct):
    """`mp_desc_shape`: the TMA box (batch, rows, columns) and swizzle code of one operand."""

    _fields_ = [("box", c_int32 * 3), ("swizzle", c_int32)]


class KernelRecord(_Struct):
    """`mp_kernel`: one micro-kernel of a pack."""

    _fields_ = [
        ("_name", c_char * 96),
        ("_entry", c_char * 64),
        *(
            (name, c_int32)
            for name in (
                "family", "dtype", "precision", "trans_a", "trans_b", "bm", "bn", "bk", "warps",
                "stages", "group_m", "split_k", "swap", "bias_matrix", "align_a", "align_b",
                "align_c", "shared_bytes", "registers", "param_offset", "param_count",
            )
        ),
        ("desc", DescShape * 3),
        *(
            (field, c_int32)
            for field in ("dependent_launch", "persistent", "tf32x3", "sliced", "pingpong")
        ),
        ("cubin_offset", c_int64),
        ("cubin_bytes", c_int64),
    ]  # fmt: skip

    @property
    def name(self) -> str:
        return str(self._name.decode())

    @property
    def entry(self) -> str:
        return str(self._entry.decode())


class Cost(_Struct):
    """`mp_cost`: measured time of one wave (fixed) and of one K step, microseconds."""

    _fields_ = [
        (name, c_float) for name in ("fixed_us", "step_us", "single_step_us", "blocks_per_sm")
    ]


class Table(_Struct):
    """`mp_table`: the head of a GPU's measured costs."""

    _fields_ = [
        ("gpu", c_char * 64),
        ("sm_count", c_int32),
        ("vendor_count", c_int32),
        ("bandwidth_gbps", c_double),
        ("launch_us", c_double),
    ]


class VendorTile(_Struct):
    """`mp_vendor_tile`: microseconds of a K step of 64 of a wave of such tiles."""

    _fields_ = [("bm", c_int32), ("bn", c_int32), ("step_us", c_float)]


class LogFactors(_Struct):
    """`mp_log_factors`: logs of factors for misaligned operands and for sizes."""

    _fields_ = [("misaligned", c_float * 3 * 3), ("nodes", c_float * VENDOR_NODES**3)]


class VendorCost(_Struct):
    """`mp_vendor_cost`: the fitted time of cuBLASLt on one class of problems."""

    _fields_ = [
        *((name, c_int32) for name in ("dtype", "precision", "trans_a", "trans_b")),
        *((name, c_int32) for name in ("aligned", "batched", "tile_count")),
        *((name, c_float) for name in ("margin", "fixed_us", "epilogue_us", "split_us")),
        *((name, c_float) for name in ("slice_us", "lone_share", "bandwidth_gbps")),
        ("tiles", VendorTile * VENDOR_TILES),
        ("correction", LogFactors),
        ("promise", LogFactors),
    ]


class PackHeader(_Struct):
    """`mp_pack_header`."""

    _fields_ = [
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("sm", c_uint32),
        ("file_bytes", c_uint64),
        ("checksum", c_uint64),
        *((name, c_uint32) for name in ("kernel_count", "param_count", "table_count")),
        ("header_bytes", c_uint32),
        *((f"{name}_offset", c_int64) for name in ("kernels", "params", "tables", "cubins")),
        ("key", c_char * 64),
        ("triton", c_char * 32),
    ]


class Stats(_Struct):
    """`mp_stats`: counters since the library was loaded, over all sessions."""

    _fields_ = [
        ("plan_hits", c_int64),
        ("plan_misses", c_int64),
        ("launches", c_int64),
        ("plan_miss_us_total", c_double),
        ("plan_miss_us_max", c_double),
    ]


STRUCTS: dict[str, type[_Struct]] = {
    "mp_problem": Problem,
    "mp_device": Device,
    "mp_region": Region,
    "mp_copy": Copy,
    "mp_plan": Plan,
    "mp_desc_shape": DescShape,
    "mp_kernel": KernelRecord,
    "mp_cost": Cost,
    "mp_table": Table,
    "mp_log_factors": LogFactors,
    "mp_vendor_cost": VendorCost,
    "mp_pack_header": PackHeader,
    "mp_stats": Stats,
    "mp_conv": Conv,
    "mp_conv_attributes": ConvAttributes,
}

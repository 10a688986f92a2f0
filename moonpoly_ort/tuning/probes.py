"""Work of a chosen number of tiles and K steps of one kernel, to read its costs off predictions."""

from __future__ import annotations

from dataclasses import dataclass

from .. import native
from ..custom_ops.kernels.conv_spec import is_transposed, taps
from ..custom_ops.kernels.pack_format import DTYPE_CODE, PRECISION_CODE
from ..custom_ops.kernels.spec import KernelSpec, Precision
from .shapes import Shape


@dataclass(frozen=True)
class ConvProbe:
    """A convolution of `tiles` tiles in a row, `steps` K steps each, for one kernel."""

    spec: KernelSpec
    tiles: int
    steps: int

    def problem(self) -> native.Conv:
        """The `mp_conv`; no image need have these sizes."""
        spec, pixels = self.spec, self.spec.bn * self.tiles
        conv = native.Conv(
            dtype=DTYPE_CODE[spec.dtype], precision=PRECISION_CODE[spec.precision],
            transposed=is_transposed(spec.family), n=1, groups=1, k=spec.bm,
        )  # fmt: skip
        if spec.family.depthwise:
            conv.groups, conv.c, conv.k = spec.bm, 1, 1
            conv.kernel[:] = 1, self.steps, spec.bk if spec.bk > 1 else 1
        else:
            per_step = taps(spec.family)
            conv.c = spec.bk // per_step * self.steps
            conv.kernel[:] = 1, 1, per_step
            conv.w_taps = per_step if spec.align_a == 16 else 0
        conv.inputs[:] = conv.out[:] = 1, 1, pixels
        conv.stride[:] = conv.dilation[:] = 1, 1, 1
        conv.pad[:] = tuple((size - 1) // 2 for size in conv.kernel)
        conv.w_w, conv.w_c = 1, conv.kernel[2]
        conv.w_k = conv.c * conv.w_c
        conv.w_h = conv.k * conv.w_k
        conv.w_g = conv.w_h * conv.kernel[1]
        return conv


def probe(spec: KernelSpec, tiles: int, steps: int) -> Shape | ConvProbe:
    """What a kernel computes in that many blocks of that many K steps."""
    if spec.family.convolves:
        return ConvProbe(spec, tiles, steps)
    name = "f32ieee" if spec.precision is Precision.IEEE else str(spec.dtype)
    layout = "nt"[spec.trans_a] + "nt"[spec.trans_b]
    return Shape(name, layout, spec.bm, spec.bn * tiles, spec.bk * steps)

"""What follows the product in a kernel's epilogue: an activation, and another tensor R added to or
multiplied with the result, or neighbouring columns multiplied with each other. All in fp32, before
the one rounding to Y's type.

Which of them there are is known at run time: every product takes the same kernels, and those that
have neither pass one uniform branch. What the codes share is computed in one place, since each
element of a tile in registers has instructions of its own: 128 a thread in the largest tiles.

The functions hold for `triton` and for `gluon` kernels: they use nothing that differs.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# mp_activation, in the low byte of the code.
LEAKY_RELU = tl.constexpr(2)
CLIP = tl.constexpr(3)
SIGMOID = tl.constexpr(4)
TANH = tl.constexpr(5)
HARD_SIGMOID = tl.constexpr(6)
HARD_SWISH = tl.constexpr(7)
GELU = tl.constexpr(8)
GELU_TANH = tl.constexpr(9)
QUICK_GELU = tl.constexpr(10)
# mp_residual, in the byte above.
BEFORE = tl.constexpr(1)
AFTER = tl.constexpr(2)
# Bits above, one of them at most: `mp_problem.gated` and `mp_problem.wide`.
GATED = tl.constexpr(1 << 16)
WIDE = tl.constexpr(1 << 17)

INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
# Gelu(x) = x * sigmoid(x * p(x^2)), where x * p(x^2) is the logit of the normal distribution: a
# polynomial in x^2 that keeps Gelu within 1e-7 up to |x| = 6, beyond which it is 0 or x to 6e-9.
# The coefficients are scaled by -log2(e), for exp2(-logit).
LARGEST_SQUARE = tl.constexpr(36.0)
NORMAL = tl.constexpr((
    -2.3022072035967147, -0.10483858124482272, 9.559292718098578e-05, 1.5938941396520395e-04,
    -1.1452430246963055e-05, 3.85045018996565e-07, -5.209909321835096e-09,
))  # fmt: skip
# Its approximation by tanh: (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
TANH_LINEAR = tl.constexpr(-2.302208198144325)
TANH_CUBIC = tl.constexpr(-0.1029432395800235)


@triton.jit
def reciprocal(x):
    """1 / x, to the last bit but one."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def power_of_2(x):
    """2^x, to the last bit but one; 0 below 2^-126."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def limited(x, low, high):
    """x between two bounds; NaN stays NaN."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smooth(x, c0, c1, gelu, factor, multiplied, tanh):
    """An element of the activations that are made of sigmoid(x * (c0 + c1 x^2 + ...))."""
    # Limited, so that 0 * x^2 stays 0 and large x do not turn the polynomial's sign.
    square = tl.minimum(x * x, LARGEST_SQUARE)
    logit = square * tl.where(gelu, NORMAL[6], 0.0) + tl.where(gelu, NORMAL[5], 0.0)
    logit = logit * square + tl.where(gelu, NORMAL[4], 0.0)
    logit = logit * square + tl.where(gelu, NORMAL[3], 0.0)
    logit = logit * square + tl.where(gelu, NORMAL[2], 0.0)
    logit = (logit * square + c1) * square + c0
    share = reciprocal(1.0 + power_of_2(logit * x))
    scaled = tl.where(multiplied, x, factor) * share + tl.where(tanh, -1.0, 0.0)
    # Near 0 the difference would lose what x is worth there.
    near = tl.where(tanh, 0.0016, -1.0)
    return tl.where(square < near, x - x * square * (1.0 / 3.0), scaled)


@triton.jit
def bent(x, negative, slope, start, low, high, multiplied):
    """An element of the activations that are made of straight lines."""
    line = x * tl.where(x < 0, negative, slope) + start
    return limited(line, low, high) * tl.where(multiplied, x, 1.0)


@triton.jit
def activated(x, activation, alpha, beta):
    """The activation of an fp32 tensor, to 1e-6 of the larger of 1 and |x|. NaN stays NaN, and
    infinities give what the formula gives: NaN where it multiplies them by zero.

    `activation` is not 0; `alpha` and `beta` are f32.
    """
    if (activation == SIGMOID) | (activation == TANH) | (activation >= GELU):
        gelu = activation == GELU
        tanh = activation == TANH
        c0 = tl.where(tanh, -2 * LOG2_E, -LOG2_E)
        c0 = tl.where(activation == QUICK_GELU, c0 * alpha, c0)
        c0 = tl.where(activation == GELU_TANH, TANH_LINEAR, tl.where(gelu, NORMAL[0], c0))
        c1 = tl.where(activation == GELU_TANH, TANH_CUBIC, tl.where(gelu, NORMAL[1], 0.0))
        factor = tl.where(tanh, 2.0, 1.0)
        multiplied = activation >= GELU
        if INTERPRETED:
            x = smooth(x, c0, c1, gelu, factor, multiplied, tanh)
        else:
            x = tl.map_elementwise(smooth, x, c0, c1, gelu, factor, multiplied, tanh)
    else:
        # Limits of a line, which LeakyRelu bends at 0 and HardSwish multiplies with x.
        clip = activation == CLIP
        hard = activation >= HARD_SIGMOID
        swish = activation == HARD_SWISH
        leaky = activation == LEAKY_RELU
        slope = tl.where(swish, 1.0 / 6.0, tl.where(hard, alpha, 1.0))
        negative = tl.where(leaky, alpha, slope)
        start = tl.where(swish, 0.5, tl.where(hard, beta, 0.0))
        low = tl.where(clip, alpha, tl.where(leaky, -INFINITY, 0.0))
        high = tl.where(clip, beta, tl.where(hard, 1.0, INFINITY))
        if INTERPRETED:
            x = bent(x, negative, slope, start, low, high, swish)
        else:
            x = tl.map_elementwise(bent, x, negative, slope, start, low, high, swish)
    return x


@triton.jit
def finish(
    tile, at, inside, activation, act_alpha, act_beta, CACHE: tl.constexpr = ".cg"
):  # fmt: skip
    """The fp32 tile with its activation and its part of R.

    `activation` is mp_activation, and mp_residual times 256; not both are 0. `at` are R's addresses
    of the tile's elements, which are read where they are `inside` and where there is an R at all.
    """
    kind = activation >> 8
    if kind == BEFORE:
        tile += tl.load(at, mask=inside, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if (activation & 255) != 0:
        tile = activated(tile, activation & 255, act_alpha, act_beta)
    if kind > BEFORE:
        other = tl.load(at, mask=inside, other=0.0, cache_modifier=CACHE).to(tl.float32)
        if kind == AFTER:
            tile += other
        else:
            tile *= other
    return tile


@triton.jit
def columns(x, COUNT: tl.constexpr):
    """The tile cut into COUNT (a power of two) groups of columns; threads keep their elements."""
    if COUNT == 1:
        return (x,)
    else:
        low, high = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        return columns(low, COUNT // 2) + columns(high, COUNT // 2)


@triton.jit
def rest_of(chunks):
    """The chunks behind the first one, and the last one again: as many as there were, so that a
    loop may take one after the other. Registers cannot be addressed, but moved.
    """
    return chunks[1:] + chunks[-1:]


@triton.jit
def entry_of(z, c_batch, activation):
    """Where batch entry `z` of Y begins, in elements of the type that the kernel knows Y by."""
    return z * c_batch * tl.where(activation >= WIDE, 2, 1)


@triton.jit
def store_gated(tile, y, m, n, M, N, ldc, activation, act_alpha, act_beta):
    """Stores of each pair of neighbouring columns of the fp32 tile, from row m, column n of the
    product on, the product; the even one has the activation."""
    ROWS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    if HALF > 0:
        gate, up = tile.reshape((ROWS, HALF, 2)).split()
        if (activation & 255) != 0:
            gate = activated(gate, activation & 255, act_alpha, act_beta)
        offs_m = m + tl.arange(0, ROWS)
        offs_n = n // 2 + tl.arange(0, HALF)
        at = offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
        inside = (offs_m < M)[:, None] & (offs_n < N // 2)[None, :]
        tl.store(y + at, (gate * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def store_wide(tile, y, m, n, M, N, ldc):
    """Stores the fp32 tile as it is but for being rounded to the 16-bit type that the kernel knows
    Y by all the same."""
    if y.dtype.element_ty != tl.float32:
        offs_m = m + tl.arange(0, tile.shape[0])
        offs_n = n + tl.arange(0, tile.shape[1])
        at = offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
        inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        rounded = tile.to(y.dtype.element_ty).to(tl.float32)
        tl.store(y.to(tl.pointer_type(tl.float32), bitcast=True) + at, rounded, mask=inside)


@triton.jit
def store_whole(
    tile, y, residual, z, c_batch, m, n, M, N, ldc, activation, act_alpha, act_beta
):  # fmt: skip
    """Stores the fp32 tile of batch entry `z` from row m, column n on, in one piece and finished
    where something follows."""
    y += entry_of(z, c_batch, activation)
    if activation < GATED:
        offs_m = m + tl.arange(0, tile.shape[0])
        offs_n = n + tl.arange(0, tile.shape[1])
        at = offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
        inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        if activation != 0:
            r = residual + z.to(tl.int64) * c_batch + at
            tile = finish(tile, r, inside, activation, act_alpha, act_beta)
        tl.store(y + at, tile.to(y.dtype.element_ty), mask=inside)
    elif activation < WIDE:
        store_gated(tile, y, m, n, M, N, ldc, activation, act_alpha, act_beta)
    else:
        store_wide(tile, y, m, n, M, N, ldc)


@triton.jit
def store_finished(
    tile, y, residual, m, n, M, N, ldc, activation, act_alpha, act_beta, CHUNKS: tl.constexpr
):  # fmt: skip
    """Stores the fp32 tile from row m, column n on, finished. `y` and `residual` point at their
    batch entry.

    It goes in CHUNKS groups of columns, through one copy of the code for all.
    """
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1] // CHUNKS
    chunks = columns(tile, CHUNKS)
    offs_m = m + tl.arange(0, ROWS)
    for c in range(CHUNKS):
        offs_n = n + c * WIDTH + tl.arange(0, WIDTH)
        at = offs_m.to(tl.int64)[:, None] * ldc + offs_n[None, :]
        inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        done = finish(chunks[0], residual + at, inside, activation, act_alpha, act_beta)
        tl.store(y + at, done.to(y.dtype.element_ty), mask=inside)
        chunks = rest_of(chunks)


@triton.jit
def store_product(
    tile, y, residual, m, n, M, N, ldc, activation, act_alpha, act_beta, CHUNKS: tl.constexpr
):  # fmt: skip
    """`store_finished` of all that may follow a product."""
    WIDTH: tl.constexpr = tile.shape[1] // CHUNKS
    if activation < GATED:
        store_finished(
            tile, y, residual, m, n, M, N, ldc, activation, act_alpha, act_beta, CHUNKS
        )  # fmt: skip
    elif activation < WIDE:
        chunks = columns(tile, CHUNKS)
        for c in range(CHUNKS):
            left = n + c * WIDTH
            store_gated(chunks[0], y, m, left, M, N, ldc, activation, act_alpha, act_beta)
            chunks = rest_of(chunks)
    else:
        chunks = columns(tile, CHUNKS)
        for c in range(CHUNKS):
            store_wide(chunks[0], y, m, n + c * WIDTH, M, N, ldc)
            chunks = rest_of(chunks)

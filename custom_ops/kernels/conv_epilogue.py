"""How a dense convolution's tile reaches Y. Its columns are pixels of all images in turn, those of
one image adjacent, the images farther apart.
"""

import triton
import triton.language as tl

from .activations import columns, finish, rest_of


@triton.jit
def addresses(offs_m, offs_n, pixels, image_pitch):
    """Elements from the first row of image 0 to (row, column): `pixels` to a row, `image_pitch` to
    an image.
    """
    at = offs_n // pixels * image_pitch + offs_n % pixels
    return offs_m.to(tl.int64)[:, None] * pixels + at[None, :]


@triton.jit
def store_images(
    tile, y, residual, m, n, M, N, pixels, image_pitch, activation, act_alpha, act_beta,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Stores the fp32 tile from row m, column n on, finished as `finish` says. `y` and `residual`
    point at the group's first row in the image that column 0 belongs to; image and pixel of a
    column are worked out here again, since the loop over K has no registers to keep them in.
    `image_pitch` is i32 where all offsets of columns are: i64 takes some 25 registers more.

    What has an activation or a residual goes in CHUNKS groups of columns, through one copy of the
    code for all.
    """
    ROWS: tl.constexpr = tile.shape[0]
    offs_m = m + tl.arange(0, ROWS)
    if activation == 0:
        offs_n = n + tl.arange(0, tile.shape[1])
        inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        at = addresses(offs_m, offs_n, pixels, image_pitch)
        tl.store(y + at, tile.to(y.dtype.element_ty), mask=inside)
    else:
        WIDTH: tl.constexpr = tile.shape[1] // CHUNKS
        chunks = columns(tile, CHUNKS)
        for c in range(CHUNKS):
            offs_n = n + c * WIDTH + tl.arange(0, WIDTH)
            inside = (offs_m < M)[:, None] & (offs_n < N)[None, :]
            at = addresses(offs_m, offs_n, pixels, image_pitch)
            done = finish(chunks[0], residual + at, inside, activation, act_alpha, act_beta)
            tl.store(y + at, done.to(y.dtype.element_ty), mask=inside)
            chunks = rest_of(chunks)

"""Kernels that the tiles of `tile_lists` and `small_tiles` give, but that packs do without.

On an H200 `moonpoly tune` dropped these: at whatever shape, others were as fast. Of 2-byte types
those are here that it dropped for both, so that noise does not decide. One is kept though it was
dropped, so that every alignment has few rows with a cut K. They were 287 of 753.
The names are without the beginning that they share; f16 stands for bf16, too.
"""

from __future__ import annotations

_SM_90 = {
    "conv_f32": """
        128x128x16_w8_s3_swap_a16b4c4
    """,
    "gemm_pointer_f16_nn": """
        128x128x32_w8_s6_a16b2c2 128x128x32_w8_s6_a2b16c16 16x128x32_w4_s2_swap_a2b2c2
        16x128x32_w4_s6_swap_a16b2c2 16x128x32_w4_s6_swap_a16b4c4 16x128x32_w4_s6_swap_a4b16c16
        16x16x32_w1_s4_a16b2c2 16x16x32_w1_s4_a16b4c4 16x16x32_w1_s4_a2b16c16
        16x16x32_w1_s4_a2b2c2 16x16x32_w1_s4_a4b16c16 16x32x64_w4_s2_a2b2c2 16x64x16_w4_s2_a2b2c2
        16x64x64_w4_s3_a16b4c4 32x16x128_w4_s4_a16b2c2 32x16x128_w4_s4_a16b4c4
        32x64x32_w4_s4_a2b16c16 32x64x32_w4_s4_a4b16c16 64x16x64_w4_s2_a2b2c2
    """,
    "gemm_pointer_f16_nt": """
        128x128x32_w8_s6_a16b16c2 16x128x32_w4_s6_swap_split_a16b16c2
        64x64x32_w4_s6_split_a16b16c2
    """,
    "gemm_pointer_f32_nn": """
        128x128x16_w8_s6_swap_a4b16c16 128x128x16_w8_s6_swap_a4b4c4 16x128x16_w4_s6_swap_a16b4c4
        16x128x16_w4_s6_swap_a4b16c16 16x128x16_w4_s6_swap_a4b4c4
        16x128x16_w4_s6_swap_split_a4b16c16 16x16x128_w4_s3_split_a16b4c4 16x16x16_w1_s4_a16b4c4
        16x16x16_w1_s4_a4b16c16 16x16x16_w1_s4_a4b4c4 16x64x32_w4_s3_a16b4c4 32x16x64_w4_s4_a4b4c4
        64x128x16_w4_s1_a4b16c16 64x64x16_w4_s6_swap_a16b4c4 64x64x16_w4_s6_swap_a4b16c16
    """,
    "gemm_pointer_f32_nt": """
        128x128x16_w8_s6_a16b16c4 16x128x16_w4_s6_swap_a4b4c4 16x128x16_w4_s6_swap_split_a16b16c4
        32x16x64_w4_s4_split_a16b16c4
        32x16x64_w4_s4_split_a4b4c4 64x64x16_w4_s6_a16b16c4 64x64x16_w4_s6_split_a16b16c4
    """,
    "gemm_pointer_f32ieee_nn": """
        128x128x16_w8_s6_a4b4c4 128x128x16_w8_s6_swap_x3_a16b4c4 128x128x16_w8_s6_swap_x3_a4b16c16
        16x16x16_w1_s4_a4b4c4 16x64x32_w4_s6_swap_split_x3_a4b16c16 16x64x32_w4_s6_swap_x3_a16b4c4
        16x64x32_w4_s6_swap_x3_a4b16c16 16x64x32_w4_s6_swap_x3_a4b4c4 64x128x16_w8_s6_a4b4c4
        64x64x16_w8_s6_a4b4c4 64x64x16_w8_s6_split_a4b4c4
    """,
    "gemm_pointer_f32ieee_nt": """
        128x128x16_w8_s6_a4b4c4 128x128x16_w8_s6_x3_a16b16c4 16x128x16_w4_s6_a4b4c4
        16x128x16_w4_s6_split_a4b4c4 16x16x16_w1_s4_a16b16c4 16x16x16_w1_s4_a4b4c4
        64x128x16_w8_s6_a4b4c4 64x64x16_w8_s6_a4b4c4 64x64x16_w8_s6_split_a4b4c4
    """,
    "gemm_pointer_f32ieee_tt": """
        64x64x16_w8_s6_a4b4c4 64x64x16_w8_s6_split_a4b4c4
    """,
    "gemm_tma_f16_nn": """
        128x128x64_w4_s3 128x128x64_w8_s6 128x128x64_w8_s6_split 128x256x64_w8_s4 128x64x64_w4_s4
        16x128x128_w4_s6_swap_split 16x128x64_w4_s6_swap 16x32x64_w1_s3 16x64x128_w4_s5_swap_split
        256x128x64_w8_s4 32x128x128_w4_s5_swap 32x128x128_w4_s5_swap_split 32x128x64_w4_s5_swap
        32x64x128_w4_s4_swap 32x64x128_w4_s4_swap_split 64x128x128_w4_s4 64x128x64_w4_s4
        64x128x64_w4_s4_split 64x128x64_w4_s4_swap 64x128x64_w4_s4_swap_split 64x256x64_w4_s5
        64x64x128_w4_s6 64x64x64_w4_s4_split
    """,
    "gemm_tma_f16_nt": """
        128x128x64_w4_s3 128x128x64_w8_s6 128x128x64_w8_s6_split 128x16x128_w4_s3 128x256x64_w8_s4
        128x64x64_w4_s4 16x128x128_w4_s6_swap 16x128x128_w4_s6_swap_split 16x128x64_w4_s6_swap
        16x64x128_w4_s5_swap 16x64x128_w4_s5_swap_split 256x128x64_w8_s4 32x128x128_w4_s5_swap
        32x64x128_w4_s4_swap 32x64x128_w4_s4_swap_split 64x128x64_w4_s4 64x128x64_w4_s4_split
        64x128x64_w4_s4_swap 64x128x64_w4_s4_swap_split 64x16x128_w4_s4_split 64x256x64_w4_s5
        64x64x128_w4_s6 64x64x128_w4_s6_split 64x64x64_w4_s4 64x64x64_w4_s4_split
    """,
    "gemm_tma_f16_tn": """
        128x128x64_w8_s6 16x128x128_w4_s6_swap 64x128x64_w4_s4_split 64x64x64_w4_s4
    """,
    "gemm_tma_f16_tt": """
        128x128x64_w8_s6 64x64x64_w4_s4 64x64x64_w4_s4_split
    """,
    "gemm_tma_f32_nn": """
        128x128x32_w8_s6_swap 128x128x32_w8_s6_swap_split 16x128x64_w4_s6_swap
        16x128x64_w4_s6_swap_split 16x64x128_w4_s5_swap 16x64x64_w4_s6_swap 32x128x64_w4_s6_swap
        32x128x64_w4_s6_swap_split
    """,
    "gemm_tma_f32_nt": """
        128x128x32_w8_s6 128x128x32_w8_s6_split 128x256x32_w8_s4 128x64x32_w4_s4
        16x128x64_w4_s6_swap 16x128x64_w4_s6_swap_split 16x32x32_w1_s3 16x64x64_w4_s5_swap
        16x64x64_w4_s5_swap_split 64x128x32_w4_s4 64x128x32_w4_s4_split 64x64x32_w4_s4
        64x64x32_w4_s4_split
    """,
    "gemm_tma_f32_tn": """
        128x128x32_w8_s6_swap 128x128x32_w8_s6_swap_split 16x128x64_w4_s6_swap
        64x128x32_w4_s5_swap 64x64x32_w4_s5_swap_split
    """,
    "gemm_tma_f32_tt": """
        128x128x32_w8_s6 128x128x32_w8_s6_split 16x128x64_w4_s6_swap 64x128x32_w4_s5
        64x128x32_w4_s5_split 64x64x32_w4_s5 64x64x32_w4_s5_split
    """,
    "gemm_tma_f32ieee_nn": """
        128x128x32_w8_s6_swap_split_x3 128x128x32_w8_s6_swap_x3 128x64x32_w4_s5_swap_x3
        32x128x32_w4_s4_swap_split_x3 64x128x32_w4_s5_swap_split_x3 64x128x32_w4_s5_swap_x3
        64x64x32_w4_s5_swap_x3
    """,
    "gemm_tma_f32ieee_nt": """
        128x128x32_w8_s6_split_x3 128x128x32_w8_s6_x3 128x64x32_w4_s5_x3 64x128x32_w4_s5_split_x3
        64x128x32_w4_s5_swap_split_x3 64x128x32_w4_s5_x3 64x64x32_w4_s5_x3
    """,
    "gemm_tma_f32ieee_tn": """
        64x64x32_w4_s4_swap_split_x3 64x64x32_w4_s4_swap_x3
    """,
    "gemm_tma_f32ieee_tt": """
        16x64x64_w4_s6_swap_x3
    """,
    "gemm_ws_f16_nn": """
        128x128x64_w12_s7_sliced 128x128x64_w8_s3 192x128x64_w16_s4_split 256x128x64_w12_s4
        256x64x64_w12_s4 64x128x128_w8_s4_sliced 64x128x64_w8_s4 64x192x64_w8_s7_sliced
        64x256x64_w8_s5 64x32x128_w8_s8_sliced 64x64x128_w8_s7_sliced
        128x128x64_w12_s6_pingpong
    """,
    "gemm_ws_f16_nt": """
        128x128x64_w8_s3 192x192x64_w16_s4 256x64x64_w12_s4 64x192x64_w8_s7_sliced 64x256x64_w8_s5
        64x32x128_w8_s8_sliced
        128x128x64_w12_s6_pingpong 128x64x64_w12_s8_pingpong
    """,
    "gemm_ws_f32_nt": """
        128x192x32_w12_s4 128x256x32_w12_s4 256x128x32_w12_s4 64x128x32_w8_s4
    """,
    "gemm_ws_f32ieee_nn": """
        64x128x32_w16_s6_swap_x3
    """,
}


def _names(listed: dict[str, str]) -> frozenset[str]:
    found = {f"{prefix}_{end}" for prefix, ends in listed.items() for end in ends.split()}
    return frozenset(found | {name.replace("_f16_", "_bf16_") for name in found})


LEFT_OUT = {90: _names(_SM_90)}
"""Names by architecture."""

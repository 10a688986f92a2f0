"""Whether a product is right: each output against float64, within a bound of its own.

The bound follows from the formats. With S = ||row of A|| * ||column of B||, which is at least the
sum of |a_k b_k|, an output may be off by

    (rounding + K 2^-26) |y|  +  (inputs min(1, 8 / sqrt(K)) + 2^-24 sqrt(K)) S  +  tiny

rounding: half a step of the result's format. inputs: what rounding the operands themselves costs
(TF32 keeps 10 bits; three products of TF32 stand for an fp32 one to about 2^-21); over many
products these errors are independent, which the factor with 8 / sqrt(K) allows for. 2^-24 sqrt(K):
an fp32 sum in any order. K 2^-26: tensor cores truncate their running sum, which for long K is
a share of the result. IEEE fp32 has no such term and a flat 2^-20 S: a sum that loses more than a
careful fp32 one is not of that class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Half a step, relative; the smallest result that keeps it, as an absolute term.
ROUNDING = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-23, "f32ieee": 2.0**-23}
TINY = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126, "f32ieee": 2.0**-126}
CHUNK = 2**27  # outputs at once: 1 GiB of doubles


@dataclass(frozen=True)
class Judgement:
    """`error`: ||y - reference|| / ||reference||. `excess`: the largest error of an output as a
    share of its bound; infinite where an output is NaN or Inf. `outputs`: how many were looked at.
    """

    error: float
    excess: float
    outputs: int

    @property
    def right(self) -> bool:
        return self.excess <= 1


class Tally:
    """Outputs of one result, compared part by part on `device`; `k`: products summed for each."""

    def __init__(self, dtype: str, k: int, device: torch.device) -> None:
        self._tiny, self._factors = TINY[dtype], factors(dtype, k)
        self._squares = torch.zeros(2, dtype=torch.float64, device=device)
        self._excess = torch.zeros((), dtype=torch.float64, device=device)
        self._outputs = 0

    def add(self, y: torch.Tensor, reference: torch.Tensor, norms: torch.Tensor) -> None:
        """`norms` are S, and broadcast to `reference`, which is float64 and overwritten."""
        of_result, of_norms = self._factors
        difference = (y.double() - reference).abs_()
        self._squares += torch.stack([difference.square().sum(), reference.square().sum()])
        bound = reference.abs_().mul_(of_result).add_(self._tiny)
        bound += of_norms * norms
        share = difference.div_(bound).nan_to_num_(math.inf, math.inf, math.inf)
        self._excess = torch.maximum(self._excess, share.max())
        self._outputs += y.numel()

    def judgement(self) -> Judgement:
        wrong, whole, largest = torch.cat([self._squares, self._excess[None]]).tolist()
        error = math.sqrt(wrong / whole) if whole > 0 else (0.0 if wrong == 0 else math.inf)
        return Judgement(error if math.isfinite(error) else math.inf, largest, self._outputs)


def factors(dtype: str, k: int) -> tuple[float, float]:
    """The factors of |y| and of S in the bound."""
    rounding = ROUNDING[dtype]
    if dtype == "f32ieee":
        return rounding, 2.0**-20
    inputs = 0.0
    if dtype == "f32":  # TF32: a systematic part, where operands are truncated, and a random one
        rounding += 2.0**-10
        inputs = 2.0**-10 * min(1.0, 8 / math.sqrt(k))
    return rounding + k * 2.0**-26, inputs + 2.0**-24 * math.sqrt(k)


def sampled_rows(m: int, most: int, seed: int = 0) -> torch.Tensor:
    """Indices of at most `most` rows (at least 32 where there are as many), ascending: the first
    and last eight, and random ones between."""
    most = max(most, 32)
    if m <= most:
        return torch.arange(m)
    middle = torch.randperm(m - 16, generator=torch.Generator().manual_seed(seed))[: most - 16]
    return torch.cat([torch.arange(8), middle.sort().values + 8, torch.arange(m - 8, m)])


def judge(
    a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, dtype: str, most_flops: float = 4e11
) -> Judgement:
    """Y (batch, m, n) against A (batch, m, k) @ B (batch, k, n) in float64, where the tensors are.

    `dtype` is f16, bf16, f32 (TF32) or f32ieee. Products beyond `most_flops` are judged by a part
    of their rows.
    """
    batch, m, k = a.shape
    n = b.shape[2]
    index = sampled_rows(m, int(most_flops // max(2 * batch * n * k, 1))).to(a.device)
    tally = Tally(dtype, k, a.device)
    entries = max(1, CHUNK // max(index.numel() * n, k * n, index.numel() * k))
    for z in range(0, batch, entries):
        right = b[z : z + entries].double()
        columns = right.norm(dim=1, keepdim=True)
        rows_at_once = max(1, CHUNK // (min(entries, batch) * max(n, k)))
        for rows in torch.split(index, rows_at_once):
            left = a[z : z + entries, rows].double()
            norms = left.norm(dim=2, keepdim=True) * columns
            tally.add(y[z : z + entries, rows], torch.matmul(left, right), norms)
    return tally.judgement()

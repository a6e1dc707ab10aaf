# SPDX-License-Identifier: Apache-2.0
"""What E4M3 probabilities cost, stock and scaled: the tables of the README's precision section.

Left: one hot key at score 0 and 8191 cold keys 11 (or 9) powers of two below it, all cold values 1:
how much of the cold keys' share reaches the output. Right: relative error on Gaussian data.
"""

from __future__ import annotations

import math

import torch

from kbmla import BalancedMla, reference, workloads

P_SCALES = (1.0, 4.0, 16.0, 64.0, 256.0)


def cold_keys(p_scale: float, log2_below: int, clusters: int) -> tuple[float, float]:
    """(output, exact output) of 8191 cold keys of value 1 beside one hot key of value 0."""
    tokens, page = 8192, 64
    rows = torch.zeros(tokens, 576)
    rows[1:, 0] = 1.0
    rows[1:, 512] = -8.0 * log2_below
    cache = rows.to(torch.float8_e4m3fn).view(-1, page, 576)
    query = torch.zeros(1, 1, 1, 576)
    query[..., 512] = 1.0
    table = torch.arange(tokens // page, dtype=torch.int32)[None]
    lengths = torch.tensor([tokens], dtype=torch.int32)
    mla = BalancedMla(1, "cpu", False, p_scale=p_scale, clusters=clusters)
    mla.require(1, 1)
    mla.plan(1, lengths)
    out = torch.empty(1, 1, 1, 512, dtype=torch.bfloat16)
    scales = (math.log(2) / 8, 1.0)
    mla.decode(query.to(torch.float8_e4m3fn), cache, table, lengths, scales, out)
    weight = 8191 * 2.0**-log2_below
    return out[0, 0, 0, 0].item(), weight / (1 + weight)


def gaussian(p_scale: float, length: int, heads: int = 64) -> tuple[float, float]:
    """(relative Frobenius error of out, largest error of lse) of unsplit Gaussian requests."""
    batch = workloads.paged_cache([length] * 3, 64, heads=heads, q=1, seed=length)
    scales = (192**-0.5, 1.0)
    mla = BalancedMla(heads, "cpu", False, p_scale=p_scale, clusters=1)
    mla.require(1, 3)
    mla.plan(1, batch.lengths)
    out = torch.empty(3, 1, heads, 512, dtype=torch.bfloat16)
    lse = torch.empty(3, 1, heads)
    mla.decode(batch.query, batch.cache, batch.block_table, batch.lengths, scales, out, lse)
    exact, exact_lse = reference.attention(
        batch.query, batch.cache, batch.block_table, batch.lengths, scales
    )
    error = float((out.double() - exact).norm() / exact.norm())
    return error, float((lse.double() - exact_lse).abs().max())


def main() -> None:
    """Prints both tables."""
    lengths = (256, 512, 1024, 4096, 16384)
    exact = [cold_keys(1.0, below, 1)[1] for below in (11, 9)]
    titles = [f"cold 2^-{below} (is {x:.4f})" for below, x in zip((11, 9), exact, strict=True)]
    print(f"p_scale  {titles[0]:>25}  {titles[1]:>24}  " + "".join(f"{n:>9}" for n in lengths))
    worst_lse = 0.0
    for p_scale in P_SCALES:
        cold = [cold_keys(p_scale, below, 1)[0] for below in (11, 9)]
        results = [gaussian(p_scale, n) for n in lengths]
        worst_lse = max(worst_lse, *(lse for _, lse in results))
        errors = "".join(f"{error:9.4f}" for error, _ in results)
        print(f"{p_scale:7.0f}  {cold[0]:25.4f}  {cold[1]:24.4f}  {errors}", flush=True)
    print(f"largest error of lse on the Gaussian requests: {worst_lse:.1e}")


if __name__ == "__main__":
    main()

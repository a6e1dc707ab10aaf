# SPDX-License-Identifier: Apache-2.0
"""Backend "sm90" by name: its FP22 scores against their model, its sums of O over long splits, any
configuration against the portable backend, and the edges of its pipeline.

Everything the suite checks on a GPU it checks on this backend as well, where it is the fastest;
here is only what aims at how it works, or needs both backends.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from cases import (
    FP8,
    LOG2E,
    NAN_BYTE,
    SCALES,
    TILE,
    UNUSED_PAGE,
    Batch,
    auto_plan,
    core_for,
    decode,
    make_batch,
    make_core,
    manual_plan,
    new_out,
    new_workspace,
)
from compare import (
    BF16_NORM,
    FP22_SCALE,
    LSE_BOUND,
    NORM_BOUND,
    PROBE_LSE,
    ROW_BOUND,
    assert_probe,
    assert_result,
    assert_same,
    fp22_lse_bound,
    fp22_score_error,
    gaussian_bounds,
    norm_error,
    truth,
)

from kbmla import BalancedMla, reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

STEP = reference.STEP_TOKENS["sm90"]


def core(batch: Batch, **options):
    return core_for(batch, backend="sm90", **options)


@pytest.fixture(scope="module")
def pool(sm90: torch.device) -> torch.Tensor:
    """Gaussian cache rows [20000, 576] as bytes, to cut requests from."""
    g = torch.Generator().manual_seed(90)
    return torch.randn(20_000, 576, generator=g).to(FP8).view(torch.uint8).to(sm90)


# ---------------------------------------------------------------------------- scores


@pytest.mark.parametrize("heads", [16, 32, 48, 56, 64])
@pytest.mark.parametrize("kind", ["gaussian", "aligned", "wide"])
def test_scores_are_those_of_the_model(sm90, kind, heads):
    """Requests of one key: at a softmax scale of ln 2 the lse is the raw score itself: to FP32
    roundings that of `reference.fp22_products` (neighbours are 2^-13 of a panel's sum apart), and
    no further from the exact one than the rule allows."""
    requests = 200
    g = torch.Generator().manual_seed(len(kind))
    keys = torch.randn(requests, 576, generator=g)
    query = torch.randn(requests, 1, heads, 576, generator=g)
    if kind == "aligned":
        query = query * 0.5 + keys[:, None, None]
    elif kind == "wide":
        keys, query = (
            x * torch.exp2(torch.randint(-8, 5, x.shape, generator=g).float())
            for x in (keys, query)
        )
    rows, query = keys.to(FP8), query.to(FP8)
    batch = make_batch(
        [1] * requests,
        heads,
        1,
        device=sm90,
        rows=list(rows[:, None]),
        query=query,
        scales=(math.log(2), 1.0),
    )
    got = decode(core(batch), batch, 1)[1][:, 0].cpu().double()
    model = torch.empty_like(got)
    for b in range(requests):
        q, k = batch.query[b, 0].double(), rows[b : b + 1].to(sm90).double()
        model[b] = reference.fp22_products(q, k)[:, 0].cpu()
        exact = (q @ k.T)[:, 0].cpu()
        bound = fp22_score_error(q, k)[:, 0].cpu()
        assert ((got[b] - exact).abs() <= bound).all()
    differ = (got - model).abs()
    print(f"{kind}: {int((differ > 0).sum())} of {differ.numel()} differ, by {differ.max():.2e}")
    assert (differ <= 1e-6 * model.abs()).all()


@pytest.mark.parametrize("p_scale", [1.0, 256.0])
def test_queries_along_their_keys(sm90, p_scale):
    """Scores of hundreds, all products of one sign: they err by per cents of P, which the model
    knows, so against it the lse is as good as a probe's. Few keys hold the weight of a row: their
    roundings of P, 2^-4 at most each, hardly average, for which out has twice the usual bound."""
    batch = make_batch([600, 1, 65], 16, 2, device=sm90, seed=2)
    for b, rows in enumerate(batch.rows):
        batch.query[b, :, : min(16, rows.shape[0])] = rows[:16].to(sm90)
    got = decode(core(batch, p_scale=p_scale), batch, 3)
    assert_result(*got, *truth(batch, fp22=True, on=sm90), norm=2 * NORM_BOUND, lse_bound=PROBE_LSE)


# ---------------------------------------------------------------------------- sums of O


@pytest.mark.parametrize("heads", [16, 56, 64])
@pytest.mark.parametrize("length", [8192, 32768, 131072])
def test_mean_of_v_over_one_long_split(sm90, capsys, heads, length):
    """V with mean 0.25 in one split. Summed in one FP22 accumulator the mean of out / ref - 1 would
    be -3 % at 8K tokens and -39 % at 131K; summed by 128 tokens truncation leaves 4.2e-4 at most
    (emulated, 128 to 2,048 keys), whatever the length, and P makes up for the least of it.
    The rounding of P itself is not unbiased against its unrounded sum: -5e-4 to -8e-4 on this data,
    on every backend alike."""
    requests = 4 if length < 100_000 else 1
    g = torch.Generator(sm90).manual_seed(length)
    rows = torch.randn(requests, length, 576, generator=g, device=sm90)
    rows[..., :512] += 0.25
    query = torch.randn(requests, 1, heads, 576, generator=g, device=sm90).to(FP8)
    count = length // 64
    cache = rows.view(requests * count, 64, 576).to(FP8).view(torch.uint8)
    order = torch.randperm(requests * count, generator=g, device=sm90)
    table = torch.empty_like(order)
    table[order] = torch.arange(requests * count, device=sm90)
    batch = Batch(
        query,
        cache[order].view(FP8),
        table.view(requests, count).to(torch.int32),
        torch.full((requests,), length, dtype=torch.int32, device=sm90),
        [],
        (FP22_SCALE, 1.0),
    )
    ref_out, ref_lse = truth(batch, on=sm90)
    errors, means = {}, {}
    for backend in ("sm90", "cuda"):
        out, lse = decode(core_for(batch, backend=backend, p_scale=256.0), batch, 1)
        assert_result(out, lse, ref_out, ref_lse)
        # Of the sums: single elements of ref come close to 0, where a quotient means nothing.
        signed = (out.double().sum() / ref_out.sum() - 1).item()
        error = (out.double() - ref_out).norm(dim=-1) / ref_out.norm(dim=-1)
        errors[backend] = error.mean().item()
        with capsys.disabled():
            print(
                f"\n{heads} heads, {length} tokens, {backend:>4}: signed mean {signed:+.1e}, row "
                f"error mean {error.mean():.5f} p99 {error.quantile(0.99):.5f} "
                f"worst {error.max():.5f}"
            )
        means[backend] = signed
    assert max(map(abs, means.values())) <= 1e-3
    # From the most that is cut off to nothing cut off, less what P makes up for.
    made_up = reference.FP22_LEAST_CUT
    assert -(4.2e-4 - made_up) <= means["sm90"] - means["cuda"] <= made_up
    # The rounding of P, 0.0265 of it, is alike on both. Scores move P by 2e-4 rms besides, 1 % of
    # that, and the sums of O are cut off by 2.9e-4 of their norm at most (compare.py).
    assert errors["sm90"] <= 1.01 * errors["cuda"] + 2.9e-4


@pytest.mark.parametrize("length", [8192, 131072])
def test_equal_weights_over_one_long_split(sm90, length):
    """P = 1 for every key, V = 1.125 or 0.125: the sums that stop growing in one accumulator. Each
    tile's sum fits 14 bits and every P is a power of two, so only BF16 is left."""
    bytes_of = torch.tensor([1.125, 0.125]).to(FP8).view(torch.uint8).to(sm90)
    which = torch.randint(0, 2, (length // 64, 64, 1), device=sm90)
    batch = Batch(
        torch.zeros(1, 1, 16, 576, dtype=torch.uint8, device=sm90).view(FP8),
        bytes_of[which].expand(-1, -1, 576).contiguous().view(FP8),
        torch.arange(length // 64, dtype=torch.int32, device=sm90)[None],
        torch.tensor([length], dtype=torch.int32, device=sm90),
        [],
        (1.0, 1.0),
    )
    assert_probe(*decode(core(batch), batch, 1), *truth(batch, on=sm90))


# ---------------------------------------------------------------------------- any configuration


EDGES = [0, 1, 63, 64, 65, 127, 128, 129]


def strided_cache(
    pool: torch.Tensor, lengths: list[int], page: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache and table of requests cut from `pool`: rows, pages and the first row at any multiples
    of 16 bytes that leave room, NaN between them, ids permuted, the table cut from a wider one."""
    need = [-(-n // page) for n in lengths]
    pages = sum(need) + 3
    row_stride = 576 + 16 * rng.choice([0, 0, 1, 4, 28])
    page_stride = page * row_stride + 16 * rng.choice([0, 0, 1, 37])
    offset = 16 * rng.choice([0, 1, 63])
    buffer = torch.full(
        (offset + pages * page_stride,), NAN_BYTE, dtype=torch.uint8, device=pool.device
    )
    cache = buffer.as_strided((pages, page, 576), (page_stride, row_stride, 1), offset)
    ids = rng.sample(range(pages), pages)
    wide = torch.full((len(lengths), max(need) + 4), UNUSED_PAGE, dtype=torch.int32)
    first = 0
    for b in range(len(lengths)):
        wide[b, 1 : 1 + need[b]] = torch.tensor(ids[first : first + need[b]], dtype=torch.int32)
        first += need[b]
    table = wide.to(pool.device)[:, 1:-1]
    for b, n in enumerate(lengths):
        token = torch.arange(n, device=pool.device)
        start = rng.randrange(pool.shape[0] - n)
        cache[table[b, token // page].long(), token % page] = pool[start : start + n]
    return cache.view(FP8), table


def strided_query(shape: tuple[int, int, int], seed: int, rng: random.Random, device):
    """[B, q, heads, 576] e4m3, heads or tokens further apart than they need be, or heads outside;
    NaN between them."""
    requests, q, heads = shape
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, 576, generator=g).to(FP8).view(torch.uint8).to(device)
    head = 576 + 16 * rng.choice([0, 1, 4])
    token = heads * head + 16 * rng.choice([0, 0, 5])
    strides = (q * token + 16 * rng.choice([0, 3]), token, head, 1)
    size = requests * strides[0]
    if rng.random() < 0.2:
        token = requests * q * head
        strides, size = (q * head, head, token, 1), heads * token
    query = torch.full((size,), NAN_BYTE, dtype=torch.uint8, device=device).as_strided(
        (*shape, 576), strides
    )
    query.copy_(values)
    return query.view(FP8)


def random_case(pool: torch.Tensor, seed: int) -> tuple[Batch, dict]:
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 5, 8, 12, 16, 17, 24, 33, 40, 48, 56, 64, 65, 96, 127, 128])
    q = rng.choice([n for n in range(1, 9) if heads * n <= 1024])
    page = 2 ** rng.randrange(9)
    world = rng.choice([1, 1, 1, 2, 3, 8])
    cp = (world, rng.randrange(world), rng.choice([1, 16, 64]))
    totals = [rng.choice([*EDGES, *(rng.randint(0, 5000) for _ in range(8))]) for _ in range(3)]
    totals = totals[: rng.choice([1, 2, 3])]
    lengths = [reference.local_length(n, cp) for n in totals]
    device = pool.device
    i32 = {"dtype": torch.int32, "device": device}
    batch = Batch(
        strided_query((len(lengths), q, heads), seed, rng, device),
        *strided_cache(pool, lengths, page, rng),
        torch.tensor(lengths, **i32),
        [],
        SCALES,
        torch.tensor(totals, **i32) if world > 1 else None,
        cp,
    )
    return batch, {
        "clusters": rng.choice([None, 1, 7]),
        "policy": rng.choice(["balanced", "equal"]),
        "partial_fp16": rng.random() < 0.3,
        "p_scale": rng.choice([1.0, 16.0, 256.0]),
        "reducer_d_tiles": rng.choice([1, 2]),
    }


@pytest.mark.parametrize("block", range(10))
def test_against_the_portable_backend(sm90, pool, block):
    """20 configurations a block, against float64 and against the portable kernel, and again with
    other poison: bitwise the same. Each backend errs by at most `norm` of the truth, independently
    where P is rounded against another maximum; a few rows alone say nothing about a norm."""
    for seed in range(20 * block, 20 * block + 20):
        batch, options = random_case(pool, seed)
        what = f"seed {seed}: {batch.shape}, {batch.lengths.tolist()}, {batch.cp}, {options}"
        ours = core(batch, **options)
        out, lse = decode(ours, batch)
        again = decode(
            ours,
            batch,
            workspace=new_workspace(ours, sm90, 0xFF),
            out=new_out(batch, 7.0)[0],
            lse=new_out(batch, 7.0)[1],
        )
        assert_same(again, (out, lse), what)
        bounds = gaussian_bounds(batch)
        portable = decode(core_for(batch, backend="cuda", **options), batch)
        try:
            assert_result(out, lse, *truth(batch, on=sm90), **bounds)
            bounds["norm"] *= 2**0.5
            assert_result(out, lse, *portable, row=2 * ROW_BOUND, **bounds)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


# ---------------------------------------------------------------------------- the kept maximum


def softmax_of(log2_scale: float) -> float:
    """The softmax scale whose product with log2(e) is `log2_scale`, exactly if that is a power of
    two: growth by exactly the allowance must be that for the model as well."""
    near = log2_scale / LOG2E
    for x in (near, math.nextafter(near, 0.0), math.nextafter(near, 2 * near)):
        if x * LOG2E == log2_scale:
            return x
    assert math.frexp(log2_scale)[0] != 0.5, f"no double times log2(e) is {log2_scale}"
    return near


def staircase(levels: list[int], tail: int, log2_scale: float, heads: int, device) -> Batch:
    """A tile of keys per level, raw score `level` for one of them and up to 48 less for the others,
    and `tail` keys more at level 0, the last of them at the highest. Scores are whole: digits
    in base 16 in three rope channels that the query weighs with 256, 16 and 1, or the half or a
    quarter of it, so that no FP22 sum loses anything. Latents are Gaussian."""
    g = torch.Generator().manual_seed(len(levels))
    n = TILE * len(levels) + tail
    score = torch.zeros(n, dtype=torch.int64)
    for i, level in enumerate(levels):
        tile = slice(i * TILE, (i + 1) * TILE)
        score[tile] = (level - torch.randint(0, 49, (TILE,), generator=g)).clamp_min(0)
        score[i * TILE + int(torch.randint(0, TILE, (1,), generator=g))] = level
    if tail:
        score[-1] = max(levels) + 64
    rows = torch.randn(n, 576, generator=g)
    rows[:, 512:] = 0
    for channel, digit in ((512, score // 256), (513, score // 16 % 16), (514, score % 16)):
        rows[:, channel] = digit.float()
    query = torch.zeros(1, 1, heads, 576)
    query[..., 512:515] = torch.tensor([256.0, 16.0, 1.0])
    query /= 2.0 ** (torch.arange(heads) % 3)[:, None]
    return make_batch(
        [n],
        heads,
        1,
        rows=[rows.to(FP8)],
        query=query.to(FP8),
        scales=(softmax_of(log2_scale), 1.0),
        device=device,
    )


@pytest.mark.parametrize("p_scale", [1.0, 16.0, 256.0])
@pytest.mark.parametrize("rise", [-0.125, 0.0, 0.125, 2.0**10])
@pytest.mark.parametrize("shape", ["rising", "falling", "hot key last"])
@pytest.mark.parametrize("heads", [12, 40, 56, 64])
def test_staircases_of_the_maximum(sm90, p_scale, rise, shape, heads):
    """Every tile raises the maximum by just under, exactly or just over what is allowed, or by
    2^10; heads see the whole, half and a quarter of it. The model says what each tile's maximum
    is, so P must be the same numbers: BF16 is left, as in test_numerics."""
    step = 2.0**10 if rise > 1 else max(8 - math.log2(p_scale) + rise, 0.125)
    levels = [64 + 16 * i for i in range(20)]
    levels = levels[::-1] if shape == "falling" else levels
    batch = staircase(levels, 77 if shape == "hot key last" else 0, step / 16, heads, sm90)
    for count in (1, 3):
        ours = core(batch, p_scale=p_scale)
        counts = manual_plan(ours, batch.lengths, count)[0]
        out, lse = decode(ours, batch, count)
        model = reference.e4m3_model(
            batch.query,
            batch.cache,
            batch.block_table,
            batch.lengths,
            batch.scales,
            counts=counts,
            p_scale=p_scale,
            step=STEP,
            fp22=True,
        )
        assert norm_error(out, model[0]) < 1.2 * BF16_NORM
        # Two FP32 roundings of the maximum times the scale, and one of the scale.
        off = (lse.double() - model[1]).abs()
        assert (off <= 1e-5 + 2.0**-22 * model[1].abs()).all()
        exact = truth(batch, on=sm90)[1]
        assert (model[1] - exact).abs().max() < 1e-9, "these scores lose nothing to FP22"


# ---------------------------------------------------------------------------- what must not be read


@pytest.mark.parametrize("page", [1, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [12, 20, 24, 28, 64, 128])
def test_nothing_unused_reaches_a_result(sm90, heads, page):
    """NaN in page tails and unlisted pages, rubbish in the table past the length (a page of a
    neighbour among it), workspace and results poisoned: not a bit depends on them."""
    lengths = [300, 0, 1, 129, 64, 1023]
    results = []
    for poison, unused, fill in (
        (0x00, 0, 0x00),
        (0x7F, 2**30, 0x7F),
        (0xFF, -1, 0xFF),
        (0x7E, 3, 0x7F),
        (0x7F, -(2**31), 0xFC),
    ):
        batch = make_batch(
            lengths, heads, 2, device=sm90, page=page, seed=5, poison=poison, unused=unused
        )
        ours = core(batch, p_scale=1.0 if heads == 12 else 256.0)
        results.append(
            decode(ours, batch, 4, workspace=new_workspace(ours, sm90, fill))
            + decode(ours, batch, 1, workspace=new_workspace(ours, sm90, fill))
        )
    for got in results[1:]:
        assert_same(got[:2], results[0][:2], "split")
        assert_same(got[2:], results[0][2:], "whole")
    assert_result(*results[1][:2], *truth(batch))


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("count", [1, 3])
def test_pages_outside_the_cache_are_nan(sm90, page, count):
    """An entry inside a request's length that names no page reads as NaN: every row of that request
    that sees it is NaN, no bit of another changes."""
    batch = make_batch([700, 300, 0, 65], 40, 2, device=sm90, page=page, seed=6)
    ours = core(batch)
    base = decode(ours, batch, count)
    for bad in (-1, batch.cache.shape[0], UNUSED_PAGE, -(2**31), 2**31 - 1):
        for column in (0, 256 // page):
            table = batch.block_table.clone()
            table[1, column] = bad
            out, lse = decode(ours, replace(batch, block_table=table), count)
            for b in (0, 2, 3):
                assert_same((out[b], lse[b]), (base[0][b], base[1][b]), f"request {b}")
            assert out[1].isnan().all(), (bad, column)


# ---------------------------------------------------------------------------- walks of the list


@pytest.mark.parametrize("clusters", [1, 2, 7, 132, 1000])
@pytest.mark.parametrize("heads", [8, 48, 128])
def test_ends_of_tiles_and_of_the_list(sm90, heads, clusters):
    """Lengths at the ends of stages and tiles, empty requests between, split so that pieces end
    there too, with fewer clusters than entries, as many, and more."""
    lengths = [0, 64, 128, 0, 0, 192, 256, 255, 257, 1024, 0, 4096, 1, 0]
    batch = make_batch(lengths, heads, 1, device=sm90, seed=7)
    ours = core(batch, clusters=clusters)
    bound = fp22_lse_bound(batch)
    expected = truth(batch, on=sm90)
    per_request = [3, 1, 1, 2, 1, 2, 2, 1, 3, 8, 1, 32, 1, 9]
    # A narrow wave's workspace holds few splits: those of its own planner.
    for plan in (None, 1) if clusters < 132 else (None, 1, 2, 256, per_request):
        assert_result(*decode(ours, batch, plan), *expected, lse_bound=bound)


def test_more_clusters_than_work(sm90):
    for lengths in ([5], [0], [0, 0, 64]):
        batch = make_batch(lengths, 16, 1, device=sm90, seed=8)
        got = decode(core(batch, clusters=132), batch)
        assert_result(*got, *truth(batch), lse_bound=fp22_lse_bound(batch))


@pytest.mark.parametrize("far", ["many pages", "wide pages"])
def test_caches_beyond_four_gib(sm90, far):
    """Pages at byte offsets around 2^31, 2^32 and beyond read the right bytes: equal to the same
    rows in a small cache, bit for bit."""
    free, _ = torch.cuda.mem_get_info(sm90)
    size = 5 * 2**30
    if free < size + 2**30:
        pytest.skip(f"needs 6 GiB of GPU memory, {free / 2**30:.1f} are free")
    near = make_batch([700, 300, 64], 16, 1, device=sm90, seed=9)
    stride = 64 * 576 if far == "many pages" else 2**26
    pages = size // stride
    buffer = torch.empty(size, dtype=torch.uint8, device=sm90)
    cache = buffer.as_strided((pages, 64, 576), (stride, 576, 1))
    used = near.block_table[near.block_table != UNUSED_PAGE].long()
    edges = [2**31 // stride, 2**32 // stride, pages]
    ids = [e - 1 - i for e in edges for i in range(3)] + [
        e + i for e in edges[:2] for i in range(3)
    ]
    ids += [i for i in range(pages) if i not in ids][: used.numel() - len(ids)]
    assert used.numel() <= len(ids)
    moved = torch.tensor(ids[: used.numel()], device=sm90)
    cache[moved] = near.cache.view(torch.uint8)[used]
    table = near.block_table.clone()
    table[table != UNUSED_PAGE] = moved.to(torch.int32)
    batch = replace(near, cache=cache.view(FP8), block_table=table)
    for count in (1, 3):
        assert_same(decode(core(batch), batch, count), decode(core(near), near, count))


def test_the_longest_request(sm90):
    """2^31 - 1 tokens, the last split's tiles end at 2^31. All are on one page, so each of its rows
    counts 2^23 times, the last once less."""
    g = torch.Generator().manual_seed(13)
    rows = torch.randn(256, 576, generator=g).to(FP8)
    query = torch.randn(1, 1, 16, 576, generator=g).to(FP8)
    batch = Batch(
        query.to(sm90),
        rows.view(1, 256, 576).to(sm90),
        torch.zeros(1, 2**23, dtype=torch.int32, device=sm90),
        torch.tensor([2**31 - 1], dtype=torch.int32, device=sm90),
        [],
        (FP22_SCALE, 1.0),
    )
    out, lse = decode(core(batch, p_scale=256.0), batch, 132)
    weight = torch.full((256,), 2.0**23, dtype=torch.float64)
    weight[-1] -= 1
    scores = query.double() @ rows.double().T * FP22_SCALE + weight.log()
    ref = torch.softmax(scores, -1) @ rows[:, :512].double()
    assert norm_error(out.cpu(), ref) <= NORM_BOUND
    ref_lse = torch.logsumexp(scores, -1) * LOG2E
    assert (lse.cpu().double() - ref_lse).abs().max() < LSE_BOUND


# ---------------------------------------------------------------------------- graphs, streams


@pytest.mark.parametrize(
    ("heads", "q", "page"), [(16, 1, 64), (128, 2, 16), (40, 3, 4), (28, 2, 64)]
)
def test_graph_of_a_core(sm90, heads, q, page):
    """Captured once, replayed with lengths that empty requests, split them and leave them whole:
    each equal to the eager step."""
    batch = make_batch([20_000, 900, 129, 64], heads, q, device=sm90, page=page, seed=10)
    most = batch.lengths.tolist()
    ours = core(batch, clusters=None)
    counts, work = auto_plan(ours, batch.lengths)
    workspace = new_workspace(ours, sm90)
    out, lse = new_out(batch)

    def step() -> None:
        ours.plan(batch.lengths, counts, work)
        ours.decode(
            batch.query, batch.cache, batch.block_table, batch.lengths, *batch.scales, counts, work,
            workspace, lse=lse, out=out,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rng = random.Random(heads)
    for i in range(20):
        now = [rng.choice([0, 1, n, rng.randint(0, n)]) for n in most]
        batch.lengths.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        workspace.fill_(NAN_BYTE)
        graph.replay()
        assert_same((out, lse), decode(ours, batch), f"replay {i}, lengths {now}")


def test_two_streams(sm90):
    """Two models on two streams at once do not disturb each other."""
    batches = [
        make_batch(lengths, heads, 1, device=sm90, seed=heads)
        for lengths, heads in (([9000, 0, 70], 16), ([3000] * 5, 64))
    ]
    models, results, wanted = [], [], []
    for batch in batches:
        model = BalancedMla(batch.shape[2], sm90, False, backend="sm90")
        model.require(1, batch.shape[0])
        models.append(model)
        results.append([new_out(batch) for _ in range(50)])
        wanted.append(new_out(batch))
    streams = [torch.cuda.Stream(sm90) for _ in batches]

    def step(i: int, written: tuple[torch.Tensor, torch.Tensor]) -> None:
        batch = batches[i]
        models[i].plan(1, batch.lengths)
        tensors = (batch.query, batch.cache, batch.block_table, batch.lengths, batch.scales)
        models[i].decode(*tensors, *written)

    for i in range(2):
        step(i, wanted[i])
    torch.cuda.synchronize()
    for n in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                step(i, results[i][n])
    torch.cuda.synchronize()
    for i in range(2):
        for got in results[i]:
            assert_same(got, wanted[i], f"model {i}")


@pytest.mark.parametrize("rows", [8, 24, 32, 40, 48, 56, 64, 128])
def test_repeats_of_every_block_size(sm90, rows):
    """100 times the same bits in every instantiation of the kernel, with other poison each time."""
    q = 1 if rows == 64 else 2  # with rows that do not see the last token, or all alike
    batch = make_batch([12_000, 500, 0, 3000], rows // q, q, device=sm90, seed=rows)
    ours = core(batch, clusters=None, p_scale=256.0)
    plan = auto_plan(ours, batch.lengths)
    first = decode(ours, batch, plan)
    # At this p_scale: test_numerics.test_default_precision.
    assert_result(*first, *truth(batch, on=sm90), norm=0.02)
    for i in range(100):
        workspace = new_workspace(ours, sm90, (0x7F, 0xFF, 0x00)[i % 3])
        assert_same(decode(ours, batch, plan, workspace=workspace), first, f"repeat {i}")


def test_portable_core_beside_it(sm90):
    """Both backends are there on this card, take turns in one process, and say which they are."""
    batch = make_batch([500, 3], 16, 1, device=sm90, seed=11)
    cores = [make_core(16, 1, 2, sm90, backend=name) for name in ("sm90", "cuda")]
    assert [c.config.backend for c in cores] == [2, 1]
    bound = fp22_lse_bound(batch)
    for ours in cores * 2:
        assert_result(*decode(ours, batch, 2), *truth(batch), lse_bound=bound)

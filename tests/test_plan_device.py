# SPDX-License-Identifier: Apache-2.0
"""The device planner gives the host's plans bit for bit and stays in its buffers."""

from __future__ import annotations

import random

import pytest
import torch

from kbmla.core import KvBalancedMla

pytestmark = pytest.mark.gpu


def random_lengths(rng: random.Random, requests: int) -> list[int]:
    """Lengths as servers see them, and what they should not see: one scale for most of a batch, a
    few far longer, some empty, some negative, some huge."""
    scale = 2 ** rng.uniform(0, 17)
    spread = rng.choice([0.0, 0.3, 1.0, 2.0])
    lengths = [int(scale * rng.lognormvariate(0, spread)) for _ in range(requests)]
    for i in range(requests):
        if rng.random() < 0.03:
            lengths[i] = rng.choice([0, -1, 1, 127, 128, 129, -(2**31), 131072, 500_000])
    if rng.random() < 0.05:
        lengths[rng.randrange(requests)] = rng.choice([2**26, 2**31 - 1])
    return [max(min(n, 2**31 - 1), -(2**31)) for n in lengths]


def random_core(rng: random.Random) -> tuple[tuple, dict]:
    heads = rng.choice([1, 6, 12, 16, 20, 64, 96, 128])
    q = rng.choice([n for n in (1, 2, 4, 5, 8) if heads * n <= 1024])
    requests = rng.choice([1, 2, 3, 8, 31, 32, 33, 64, 100, 128, 129, 256, 512, 700, 1024])
    capacity = rng.choice([0, 1, 132, 264, 396, 640, 4000])
    options = {
        "clusters": rng.choice([1, 2, 7, 33, 66, 132, 264]),
        "policy": rng.choice(["balanced"] * 6 + ["equal", "fixed"]),
        "partial_fp16": rng.random() < 0.3,
    }
    return (heads, q, requests, True, capacity, rng.choice([1, 128, 256, 1000])), options


@pytest.mark.slow
def test_plans_equal_the_hosts(cuda):
    """10,000 batches over 200 configs."""
    rng = random.Random(20261129)
    for _ in range(200):
        (heads, q, requests, causal, capacity, least), options = random_core(rng)
        host = KvBalancedMla(heads, q, requests, causal, "cpu", capacity, least, **options)
        card = KvBalancedMla(heads, q, requests, causal, cuda, capacity, least, **options)
        assert host.sizes == card.sizes
        batches = [
            random_lengths(rng, rng.choice([requests, rng.randint(1, requests)])) for _ in range(50)
        ]
        counts = torch.full((50, requests), -7, dtype=torch.int32)
        work = torch.full((50, host.list_len), -7, dtype=torch.int32)
        card_counts, card_work = counts.to(cuda), work.to(cuda)
        for i, lengths in enumerate(batches):
            on_host = torch.tensor(lengths, dtype=torch.int32)
            host.plan(on_host, counts[i], work[i])
            card.plan(on_host.to(cuda), card_counts[i], card_work[i])
        for name, ours, theirs in (("counts", card_counts, counts), ("work", card_work, work)):
            same = (ours.cpu() == theirs).all(1)
            if not same.all():
                i = int(same.logical_not().nonzero()[0])
                pytest.fail(f"{name} differ: {card.config} lengths {batches[i]}")


@pytest.mark.sanitize
@pytest.mark.parametrize("requests", [1, 33, 300])
def test_a_plan_stays_in_its_buffers(cuda, requests):
    core = KvBalancedMla(96, 5, requests, True, cuda, 396, 128)
    lengths = torch.tensor(random_lengths(random.Random(requests), requests), dtype=torch.int32)
    buffer = torch.full((core.list_len + 64,), -7, dtype=torch.int32, device=cuda)
    counts = torch.full((requests + 64,), -7, dtype=torch.int32, device=cuda)
    core.plan(lengths.to(cuda), counts[32 : 32 + requests], buffer[32 : 32 + core.list_len])
    torch.cuda.synchronize()
    assert (buffer[:32] == -7).all()
    assert (buffer[32 + core.list_len :] == -7).all()
    assert (counts[:32] == -7).all()
    assert (counts[32 + requests :] == -7).all()

# SPDX-License-Identifier: Apache-2.0
"""Wrong input, by table: the exception, what its message names, and that nothing was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FP8, auto_plan, core_for, make_batch, make_core, new_out, new_workspace
from compare import assert_result, truth

from kbmla import BalancedMla, core, ops

Arguments = dict[str, Any]
HEADS, Q, B = 12, 2, 3


@pytest.fixture(scope="module")
def ready(device):
    """A core, and the arguments of a good decode on it, by name."""
    batch = make_batch([200, 0, 65], HEADS, Q, device=device, seed=1)
    c = make_core(HEADS, Q, B, device)
    counts, work = auto_plan(c, batch.lengths)
    return c, batch, counts, work, new_workspace(c, device)


def arguments(ready) -> Arguments:
    _, batch, counts, work, workspace = ready
    out, lse = new_out(batch)
    return {
        "query": batch.query,
        "cache": batch.cache,
        "block_table": batch.block_table,
        "lengths": batch.lengths,
        "softmax": batch.scales[0],
        "output_scale": batch.scales[1],
        "counts": counts,
        "work": work,
        "workspace": workspace,
        "lse": lse,
        "causal_lens": None,
        "cp": (1, 0, 1),
        "out": out,
    }


def every(t: torch.Tensor, step: int) -> torch.Tensor:
    """The same values at stride `step` in the last dimension."""
    wide = torch.zeros((*t.shape, step), dtype=t.dtype, device=t.device)
    wide.view(torch.uint8 if t.element_size() == 1 else t.dtype)[..., 0] = t.view(
        torch.uint8 if t.element_size() == 1 else t.dtype
    )
    return wide[..., 0]


def other_device(t: torch.Tensor) -> torch.Tensor:
    return t.cpu() if t.device.type == "cuda" else t.to("meta")


def set_to(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    def apply(a: Arguments) -> None:
        a[name] = change(a[name])

    return apply


def both(*changes: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    def apply(a: Arguments) -> None:
        for change in changes:
            change(a)

    return apply


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


TENSORS = [
    "query", "cache", "block_table", "lengths", "counts", "work", "workspace", "out", "lse",
]  # fmt: skip

# (id, change, exception, what the message must name)
TABLE: list[tuple[str, Callable[[Arguments], None], type[Exception], str]] = [
    # dtype
    ("query bf16", set_to("query", lambda t: t.bfloat16()), ValueError, "query.*float8_e4m3fn"),
    ("query e5m2", set_to("query", lambda t: t.view(torch.float8_e5m2)), ValueError, "query"),
    ("query uint8", set_to("query", lambda t: t.view(torch.uint8)), ValueError, "query"),
    ("cache bf16", set_to("cache", lambda t: t.bfloat16()), ValueError, "cache"),
    ("cache uint8", set_to("cache", lambda t: t.view(torch.uint8)), ValueError, "cache.*uint8"),
    ("table int64", set_to("block_table", lambda t: t.long()), ValueError, "block_table.*int64"),
    ("lengths int64", set_to("lengths", lambda t: t.long()), ValueError, "lengths.*int64"),
    ("lengths float", set_to("lengths", lambda t: t.float()), ValueError, "lengths"),
    ("counts int64", set_to("counts", lambda t: t.long()), ValueError, "counts"),
    ("work int64", set_to("work", lambda t: t.long()), ValueError, "work"),
    ("workspace u8", set_to("workspace", lambda t: t.view(torch.uint8)), ValueError, "workspace"),
    ("out f32", set_to("out", lambda t: t.float()), ValueError, "out.*bfloat16.*float32"),
    ("out f16", set_to("out", lambda t: t.half()), ValueError, "out"),
    ("lse f64", set_to("lse", lambda t: t.double()), ValueError, "lse.*float32.*float64"),
    ("lse bf16", set_to("lse", lambda t: t.bfloat16()), ValueError, "lse"),
    # shape
    ("query width", set_to("query", lambda t: t[..., :512]), ValueError, "query.*576.*512"),
    ("query heads", set_to("query", lambda t: t[:, :, :8]), ValueError, "query.*12.*8"),
    ("query tokens", set_to("query", lambda t: t[:, :1]), ValueError, "query.*2.*1"),
    ("query 2-d", set_to("query", lambda t: t[0, 0]), ValueError, "query"),
    ("query 5-d", set_to("query", lambda t: t[None]), ValueError, "query"),
    ("query rows", set_to("query", lambda t: t.flatten(0, 1)[:5]), ValueError, "query"),
    ("cache width", set_to("cache", lambda t: t[..., :512]), ValueError, "cache.*576"),
    ("cache 2-d", set_to("cache", lambda t: t.flatten(0, 1)), ValueError, "cache"),
    ("page of 48", set_to("cache", lambda t: t[:, :48]), ValueError, "power of two.*48"),
    ("page of 0", set_to("cache", lambda t: t[:, :0]), ValueError, "page size"),
    ("page of 512", set_to("cache", lambda t: t.new_empty(4, 512, 576)), ValueError, "512"),
    ("table 1-d", set_to("block_table", lambda t: t[0]), ValueError, "block_table"),
    ("table rows", set_to("block_table", lambda t: t[:2]), ValueError, "block_table.*3.*2"),
    ("lengths 2-d", set_to("lengths", lambda t: t[:, None]), ValueError, "lengths"),
    ("lengths pairs", set_to("lengths", lambda t: t[:, None].repeat(1, 2)), ValueError, "lengths"),
    ("lengths short", set_to("lengths", lambda t: t[:2]), ValueError, "lengths.*3.*2"),
    ("lengths long", set_to("lengths", lambda t: t.repeat(2)), ValueError, "lengths.*3.*6"),
    ("counts short", set_to("counts", lambda t: t[:2]), ValueError, "counts"),
    ("work short", set_to("work", lambda t: t[:-1]), ValueError, "work.*list_len"),
    ("workspace short", set_to("workspace", lambda t: t[:-1]), ValueError, "workspace.*bytes"),
    ("workspace 2-d", set_to("workspace", lambda t: t[None]), ValueError, "workspace"),
    ("out width", set_to("out", lambda t: t[..., :256]), ValueError, "out.*512.*256"),
    ("out heads", set_to("out", lambda t: t[:, :, :8]), ValueError, "out"),
    ("out batch", set_to("out", lambda t: t[:2]), ValueError, "out"),
    ("lse as [B, H, S]", set_to("lse", lambda t: t.new_empty(3, 12, 2)), ValueError, "lse"),
    ("lse 1-d", set_to("lse", lambda t: t[0, 0]), ValueError, "lse"),
    # stride
    ("query stride", set_to("query", lambda t: every(t, 2)), ValueError, "query.*stride"),
    ("cache stride", set_to("cache", lambda t: every(t, 2)), ValueError, "cache.*stride"),
    ("table stride", set_to("block_table", lambda t: every(t, 2)), ValueError,
     "block_table.*stride"),
    ("lengths stride", set_to("lengths", lambda t: every(t, 2)), ValueError, "lengths.*stride"),
    ("counts stride", set_to("counts", lambda t: every(t, 2)), ValueError, "counts.*stride"),
    ("work stride", set_to("work", lambda t: every(t, 2)), ValueError, "work.*stride"),
    ("out stride", set_to("out", lambda t: every(t, 2)), ValueError, "out.*stride"),
    ("out expanded", set_to("out", lambda t: t[:1].expand(3, -1, -1, -1)), ValueError,
     "out.*overlap"),
    ("out heads expanded", set_to("out", lambda t: t[:, :, :1].expand(-1, -1, 12, -1)),
     ValueError, "out.*overlap"),
    ("lse expanded", set_to("lse", lambda t: t[:1].expand(3, -1, -1)), ValueError, "lse.*overlap"),
    # alignment: a workspace cut at an odd byte
    ("workspace odd", set_to("workspace", lambda t: torch.cat([t, t[:16]])[1:]), ValueError,
     "workspace.*align"),
    # scales
    *[
        (f"{name} {value}", set_to(name, constant(value)), ValueError, f"{shown}.*scale > 0")
        for name, shown in (("softmax", "softmax"), ("output_scale", "output_scale"))
        for value in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60)
    ],
    # context parallel
    ("world 0", set_to("cp", constant((0, 0, 1))), ValueError, "cp.*world"),
    ("rank = world", set_to("cp", constant((2, 2, 1))), ValueError, "cp.*rank"),
    ("rank -1", set_to("cp", constant((2, -1, 1))), ValueError, "cp.*rank"),
    ("interleave 0", set_to("cp", constant((2, 0, 0))), ValueError, "cp.*interleave"),
    ("cp of two", set_to("cp", constant((2, 0))), ValueError, "cp"),
    ("cp None", set_to("cp", constant(None)), ValueError, "cp"),
    ("cp 2^40", set_to("cp", constant((2**40, 0, 1))), ValueError, "cp"),
    ("totals missing", set_to("cp", constant((2, 0, 1))), ValueError, "totals"),
    ("totals int64", both(
        set_to("cp", constant((2, 0, 1))),
        lambda a: a.update(causal_lens=a["lengths"].long())), ValueError, "totals.*int64"),
    ("totals short", both(
        set_to("cp", constant((2, 0, 1))),
        lambda a: a.update(causal_lens=a["lengths"][:1])), ValueError, "totals"),
    # not a tensor
    *[
        (f"{name} list", set_to(name, constant([1, 2])), TypeError, f"{name}.*list")
        for name in TENSORS
    ],
    *[
        (f"{name} None", set_to(name, constant(None)), TypeError, f"{name}.*NoneType")
        for name in TENSORS
        if name not in ("lse", "out")
    ],
    ("softmax text", set_to("softmax", constant("1")), TypeError, "softmax|str"),
    ("softmax None", set_to("softmax", constant(None)), TypeError, "softmax|None"),
    # other devices
    *[
        (f"{name} elsewhere", set_to(name, other_device), ValueError, name)
        for name in TENSORS
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "text"), [c[1:] for c in TABLE], ids=[c[0] for c in TABLE]
)
def test_decode_refuses(ready, change, error, text):
    """vllm#45426, #31166, aiter#4511: refused by name, and no result is half written."""
    a = arguments(ready)
    out, lse = a["out"], a["lse"]
    change(a)
    with pytest.raises(error, match=text) as raised:
        ready[0].decode(**a)
    assert type(raised.value) is error
    assert 15 < len(str(raised.value)) < 400
    assert out.isnan().all()
    assert lse.isnan().all()


def test_the_table_starts_from_a_good_call(ready):
    """What the table breaks does work: a refusal is about the change."""
    a = arguments(ready)
    ready[0].decode(**a)
    assert_result(a["out"], a["lse"], *truth(ready[1]))


def test_a_message_names_argument_wish_and_value(ready):
    a = arguments(ready)
    a["block_table"] = a["block_table"].long()
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ready[0].decode(**a)
    assert str(raised.value) == "block_table: expected dtype int32, got int64"


PLAN_TABLE: list[tuple[str, Callable[[Arguments], None], type[Exception], str]] = [
    ("lengths int64", set_to("lengths", lambda t: t.long()), ValueError, "lengths.*int64"),
    ("lengths 2-d", set_to("lengths", lambda t: t[:, None]), ValueError, "lengths"),
    ("lengths 0-d", set_to("lengths", lambda t: t[0]), ValueError, "lengths"),
    ("lengths stride", set_to("lengths", lambda t: every(t, 2)), ValueError, "lengths.*stride"),
    ("too many", set_to("lengths", lambda t: t.repeat(2)), ValueError, "requests.*3.*6"),
    ("lengths list", set_to("lengths", constant([1])), TypeError, "lengths.*list"),
    ("lengths elsewhere", set_to("lengths", other_device), ValueError, "lengths"),
    ("counts short", set_to("counts", lambda t: t[:2]), ValueError, "counts"),
    ("counts float", set_to("counts", lambda t: t.float()), ValueError, "counts"),
    ("counts elsewhere", set_to("counts", other_device), ValueError, "counts"),
    ("work short", set_to("work", lambda t: t[:-1]), ValueError, "work.*list_len"),
    ("work stride", set_to("work", lambda t: every(t, 2)), ValueError, "work.*stride"),
    ("work int16", set_to("work", lambda t: t.short()), ValueError, "work"),
    ("work None", set_to("work", constant(None)), TypeError, "work.*NoneType"),
]


@pytest.mark.parametrize(
    ("change", "error", "text"), [c[1:] for c in PLAN_TABLE], ids=[c[0] for c in PLAN_TABLE]
)
def test_plan_refuses(ready, change, error, text):
    c, batch = ready[0], ready[1]
    a: Arguments = {
        "lengths": batch.lengths,
        "counts": torch.full_like(ready[2], 7),
        "work": torch.full_like(ready[3], 7),
    }
    counts, work = a["counts"], a["work"]
    change(a)
    with pytest.raises(error, match=text) as raised:
        c.plan(**a)
    assert type(raised.value) is error
    assert (counts == 7).all()
    assert (work == 7).all()


CORE_TABLE: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("heads 0", {"heads": 0}, ValueError, "heads.*1..128.*0"),
    ("heads -1", {"heads": -1}, ValueError, "heads"),
    ("heads 129", {"heads": 129}, NotImplementedError, "heads.*128.*129"),
    ("heads 2^40", {"heads": 2**40}, ValueError, "heads"),
    ("q 0", {"q": 0}, ValueError, "q: "),
    ("rows", {"heads": 128, "q": 9}, ValueError, "heads \\* q"),
    ("requests 0", {"requests": 0}, ValueError, "requests"),
    ("requests 1025", {"requests": 1025}, ValueError, "requests.*1024.*1025"),
    ("capacity", {"capacity": -1}, ValueError, "capacity"),
    ("min split", {"min_split_tokens": 0}, ValueError, "min_split_tokens"),
    ("clusters 0", {"clusters": 0}, ValueError, "clusters"),
    ("clusters many", {"clusters": 10**6}, ValueError, "clusters"),
    ("bands", {"reducer_d_tiles": 3}, ValueError, "reducer_d_tiles"),
    ("policy", {"policy": "best"}, ValueError, "policy.*balanced.*best"),
    *[
        (f"p_scale {x}", {"p_scale": x}, ValueError, "p_scale.*power of two")
        for x in (0.0, 0.5, 3.0, 512.0, -1.0, math.nan, math.inf, 1.5)
    ],
    ("device", {"device": torch.device("meta")}, NotImplementedError, "device.*meta"),
]


@pytest.mark.parametrize(
    ("change", "error", "text"), [c[1:] for c in CORE_TABLE], ids=[c[0] for c in CORE_TABLE]
)
def test_core_refuses(device, change, error, text):
    a: Arguments = {
        "heads": 12,
        "q": 1,
        "requests": 4,
        "causal": True,
        "device": device,
        "capacity": 64,
        "min_split_tokens": 128,
        **change,
    }
    with pytest.raises(error, match=text) as raised:
        core.KvBalancedMla(**a)
    assert type(raised.value) is error


def balanced_arguments(device) -> tuple[BalancedMla, Arguments]:
    batch = make_batch([200, 65], 12, 1, device=device, seed=2)
    m = BalancedMla(12, device, False)
    m.require(1, 2)
    m.plan(1, batch.lengths)
    out, lse = new_out(batch)
    return m, {
        "query": batch.query,
        "cache": batch.cache,
        "block_table": batch.block_table,
        "lengths": batch.lengths,
        "scales": batch.scales,
        "out": out,
        "lse": lse,
    }


BALANCED_TABLE: list[tuple[str, Callable[[Arguments], None], type[Exception], str]] = [
    ("query 3-d", set_to("query", lambda t: t.flatten(0, 1)), ValueError, "query"),
    ("query list", set_to("query", constant([1])), TypeError, "query.*list"),
    ("query heads", set_to("query", lambda t: t[:, :, :5]), ValueError, "query.*12.*5"),
    ("out None", set_to("out", constant(None)), TypeError, "out.*NoneType"),
    ("one scale", set_to("scales", constant((1.0,))), ValueError, "scales"),
    ("scale number", set_to("scales", constant(0.5)), ValueError, "scales"),
    ("unknown keyword", lambda a: a.update(total=1), TypeError, "total"),
    ("bad cp", lambda a: a.update(cp=(1, 1, 1)), ValueError, "cp.*rank"),
    ("no totals", lambda a: a.update(cp=(2, 1, 1)), ValueError, "totals"),
    ("totals list", lambda a: a.update(cp=(2, 1, 1), totals=[1, 2]), TypeError, "totals.*list"),
    ("q not prepared", set_to("query", lambda t: t.repeat(1, 2, 1, 1)), RuntimeError, "require"),
    ("B not planned", set_to("query", lambda t: t[:1]), RuntimeError, "plan"),
]


@pytest.mark.parametrize(
    ("change", "error", "text"), [c[1:] for c in BALANCED_TABLE], ids=[c[0] for c in BALANCED_TABLE]
)
def test_balanced_refuses(device, change, error, text):
    m, a = balanced_arguments(device)
    out, lse = a["out"], a["lse"]
    change(a)
    with pytest.raises(error, match=text) as raised:
        m.decode(**a)
    assert type(raised.value) is error
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(("heads", "error"), [(0, ValueError), (129, NotImplementedError)])
def test_head_counts(device, heads, error):
    with pytest.raises(error, match="heads"):
        BalancedMla(heads, device, False).require(1, 1)


@pytest.mark.parametrize(("q", "requests"), [(0, 1), (-1, 1), (86, 1), (1, -1), (1, 2**31)])
def test_require_refuses(device, q, requests):
    m = BalancedMla(12, device, False)
    with pytest.raises(ValueError, match=r"^(q|requests): "):
        m.require(q, requests)
    assert m.cores == {}
    assert m.plans == {}
    assert m.workspace.numel() == 0


def test_a_refused_call_leaves_the_object_usable(device):
    m, a = balanced_arguments(device)
    with pytest.raises(ValueError, match="scale"):
        m.decode(**{**a, "scales": (0.0, 1.0)})
    m.decode(**a)
    assert not a["out"].isnan().any()


def test_reduce_refuses(ready):
    c, batch, counts, work, workspace = ready
    out, lse = new_out(batch)
    good = (batch.lengths, counts, work, workspace, out, lse, 1.0, 1000, c.config)

    def call(index: int, value: Any) -> None:
        ops.reduce(*(value if i == index else x for i, x in enumerate(good)))

    for index, value, error, text in [
        (0, batch.lengths.long(), ValueError, "lengths"),
        (1, counts[:1], ValueError, "counts"),
        (2, work[:-1], ValueError, "work"),
        (3, workspace[:-1], ValueError, "workspace"),
        (4, out.float(), ValueError, "out"),
        (5, lse.double(), ValueError, "lse"),
        (6, math.nan, ValueError, "output_scale"),
        (4, None, TypeError, "out"),
    ]:
        with pytest.raises(error, match=text):
            call(index, value)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_requires_grad_is_no_trap(device):
    """Results that require grad are refused or written, never silently detached (inference op)."""
    m, a = balanced_arguments(device)
    a["out"] = a["out"].requires_grad_()
    try:
        m.decode(**a)
    except (RuntimeError, ValueError):
        return
    assert not a["out"].isnan().any()


def test_query_stays_e4m3():
    """The dtype of the tests is the one with NaN at 0x7F and no infinities."""
    assert torch.tensor([0x7F], dtype=torch.uint8).view(FP8).float().isnan().all()


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"heads": "64"}, TypeError, "heads"),
        ({"heads": 64.5}, TypeError, "heads"),
        ({"device": "nonsense"}, ValueError, "device"),
        ({"device": None}, TypeError, "device"),
        ({"device": "meta"}, NotImplementedError, "device"),
        ({"device": "cuda:77"}, NotImplementedError, "device"),
        ({"partial_fp16": "no"}, TypeError, "partial_fp16"),
        ({"p_scale": "x"}, ValueError, "p_scale"),
        ({"clusters": 1.5}, TypeError, "clusters"),
        ({"clusters": 2**40}, ValueError, "clusters"),
    ],
)
def test_constructor_refuses(arguments, error, name):
    """Every wrong argument of a model object is named, at the latest by require."""
    given = {"heads": 16, "device": "cpu", "dcp": False, **arguments}
    with pytest.raises(error, match=name):
        BalancedMla(**given).require(1, 1)


def test_lse_inside_out_is_refused(device):
    batch = make_batch([200, 64], 16, 1, device=device, seed=8)
    core = core_for(batch)
    plan = auto_plan(core, batch.lengths)
    out, _ = new_out(batch, 7.0)
    tensors = (batch.query, batch.cache, batch.block_table, batch.lengths)
    with pytest.raises(ValueError, match="lse: expected memory apart"):
        core.decode(
            *tensors, *batch.scales, *plan, new_workspace(core, device), out=out,
            lse=out.view(torch.float32)[..., 0],
        )  # fmt: skip
    assert (out == 7).all()

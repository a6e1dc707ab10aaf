# SPDX-License-Identifier: Apache-2.0
"""Typed wrappers of the ops `torch.ops.kbmla.plan`, `decode` and `reduce`, and their fake kernels.

The ops check everything and write nothing on an error; here their RuntimeError, whose text starts
with "kbmla STATUS:", becomes the exception the status stands for. Nothing is checked twice: on a
good call a wrapper adds one Python frame.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._lib import Config, exception

_PREFIX = "kbmla "


def _raise(error: BaseException, tensors: dict[str, Any]) -> NoReturn:
    """Re-raises what an op threw as the public exception; a non-tensor argument is a TypeError."""
    text = str(error)
    for name, tensor in tensors.items():
        optional = name in ("lse", "totals")
        if not (isinstance(tensor, Tensor) or (optional and tensor is None)):
            got = type(tensor).__name__
            raise TypeError(f"{name}: expected a torch.Tensor, got {got}") from None
    if text.startswith(_PREFIX):
        status, _, rest = text[len(_PREFIX) :].partition(": ")
        raise exception(status, rest.splitlines()[0]) from None
    if "Expected a value of type" in text:  # torch's own check of a schema's types
        raise TypeError(text.splitlines()[0]) from None
    raise error


def plan(lengths: Tensor, counts: Tensor, work: Tensor, config: Config) -> None:
    """Plans one decode step into `counts` and `work`.

    lengths: [B] int32, KV tokens per request; counts: [>= B] int32 and work: [>= list_len] int32
    are written, both rewritten by every plan. All on one device, contiguous. One kernel, no
    synchronisation. ValueError names the argument that does not fit.
    """
    try:
        torch.ops.kbmla.plan(lengths, counts, work, config)
    except (RuntimeError, TypeError) as error:
        _raise(error, {"lengths": lengths, "counts": counts, "work": work})


def decode(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    totals: Tensor | None,
    counts: Tensor,
    work: Tensor,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor | None,
    softmax_scale: float,
    output_scale: float,
    cp: tuple[int, int, int],
    pdl: bool,
    config: Config,
) -> None:
    """Decodes one layer with the plan in `counts` and `work`, split requests merged.

    query: [B, q, heads, 576] e4m3fn; cache: [pages, page, 576] e4m3fn; block_table: [B, max_pages]
    int32; lengths: [B] int32; totals: [B] int32 global lengths, wanted when the world of `cp` =
    (world, rank, interleave) is above 1; workspace: int8, written; out: [B, q, heads, 512] bf16 and
    lse: [B, q, heads] float32 (log2), written. Strides of all but the last dimension are free.
    ValueError names the argument that does not fit; then nothing was written.
    """
    try:
        world, rank, interleave = (operator.index(number) for number in cp)
    except (TypeError, ValueError):
        raise ValueError(
            f"cp: expected three integers (world, rank, interleave), got {cp!r}"
        ) from None
    try:
        torch.ops.kbmla.decode(
            query, cache, block_table, lengths, totals, counts, work, workspace, out, lse,
            softmax_scale, output_scale, world, rank, interleave, pdl, config,
        )  # fmt: skip
    except (RuntimeError, TypeError) as error:
        tensors = {
            "query": query, "cache": cache, "block_table": block_table, "lengths": lengths,
            "totals": totals, "counts": counts, "work": work, "workspace": workspace, "out": out,
            "lse": lse,
        }  # fmt: skip
        _raise(error, tensors)


def reduce(
    lengths: Tensor,
    counts: Tensor,
    work: Tensor,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor | None,
    output_scale: float,
    max_tokens: int,
    config: Config,
) -> None:
    """The merge alone: rows of split requests from the partials in `workspace` into out and lse.

    Shapes as in `decode`; `max_tokens` is what a row of the block table can address (max_pages *
    page size). Rows of unsplit requests are left as they are.
    """
    try:
        torch.ops.kbmla.reduce(
            lengths, counts, work, workspace, out, lse, output_scale, max_tokens, config
        )
    except (RuntimeError, TypeError) as error:
        tensors = {
            "lengths": lengths, "counts": counts, "work": work, "workspace": workspace, "out": out,
            "lse": lse,
        }  # fmt: skip
        _raise(error, tensors)


def _check_devices(**tensors: Tensor | None) -> None:
    """Refuses mixed devices where the ops' own checks do not run: on meta tensors and in traces.
    The device that most tensors are on counts as meant."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    devices = list(given.values())
    wanted = max(devices, key=devices.count)
    for name, device in given.items():
        if device != wanted:
            raise RuntimeError(
                f"{_PREFIX}INVALID_ARGUMENT: {name}: expected device {wanted}, got {device}"
            )


@torch.library.register_fake("kbmla::plan")
def _(lengths, counts, work, config):  # type: ignore[no-untyped-def]
    _check_devices(lengths=lengths, counts=counts, work=work)


@torch.library.register_fake("kbmla::decode")
def _(  # type: ignore[no-untyped-def]
    query, cache, block_table, lengths, causal_lens, counts, work, workspace, out, lse,
    softmax_scale, output_scale, cp_world, cp_rank, cp_interleave, pdl, config,
):  # fmt: skip
    _check_devices(
        query=query, cache=cache, block_table=block_table, lengths=lengths, totals=causal_lens,
        counts=counts, work=work, workspace=workspace, out=out, lse=lse,
    )  # fmt: skip


@torch.library.register_fake("kbmla::reduce")
def _(  # type: ignore[no-untyped-def]
    lengths, counts, work, workspace, out, lse, output_scale, max_tokens, config
):
    _check_devices(lengths=lengths, counts=counts, work=work, workspace=workspace, out=out, lse=lse)

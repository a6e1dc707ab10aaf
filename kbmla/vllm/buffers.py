# SPDX-License-Identifier: Apache-2.0
"""Plans and scratch of the decode steps, made while the model is loaded.

vLLM constructs metadata builders after it has profiled memory, and layers before. So the first
layer of a shape makes everything that steps will need, where the profile counts it: a BalancedMla,
which serves one stream, for each builder that the engine will have (a drafter has its own, and a
micro-batch). A builder takes one over; where none is left (a second group of the same shape) it
makes its own.
"""

from __future__ import annotations

import weakref

import torch

from .. import BalancedMla
from ..core import CAPACITY, as_device


def prepare(mla: BalancedMla, max_q: int, max_requests: int) -> None:
    """Prepares every step of 1..`max_q` query tokens and 1..`max_requests` requests.

    From the largest down: the first step sizes the workspace for all. Returns fast when they are
    prepared. Errors as in `BalancedMla.require`.
    """
    classes = sorted({min(most, max_requests) for most, _ in CAPACITY[mla.dcp]}, reverse=True)
    for q in range(max_q, 0, -1):
        # The largest first, so that a number of requests no class takes is refused by its name.
        for requests in [max_requests, *classes]:
            mla.require(q, requests)


def make(heads: int, device: torch.device, dcp: bool) -> BalancedMla:
    """One as vLLM gets it: FP16 partials of split requests lose 2^-12, where its BF16 latents lose
    2^-9, and take half of the time to store and to merge."""
    return BalancedMla(heads, device, dcp, partial_fp16=True)


class Buffers:
    """Prepared BalancedMlas that the layers of one shape share until builders claim them.

    heads: query heads of a decode step, under DCP those of every rank; device: where the layers
    run; dcp: whether lengths are a shard's; max_q and max_requests: the largest step; builders: how
    many to make.
    """

    def __init__(
        self,
        heads: int,
        device: torch.device,
        dcp: bool,
        max_q: int,
        max_requests: int,
        builders: int,
    ) -> None:
        self.heads, self.device, self.dcp = heads, device, dcp
        self.mlas = [make(heads, device, dcp) for _ in range(builders)]
        for mla in self.mlas:
            prepare(mla, max_q, max_requests)
        self._owners: list[weakref.ref[object] | None] = [None] * builders

    def claim(
        self, owner: object, device: torch.device, max_q: int, max_requests: int
    ) -> BalancedMla:
        """A BalancedMla for `owner` alone, prepared for its steps; not during a capture.

        It is one made here where that is free and on `device`; free again when its owner is gone,
        as vLLM drops the builders that it profiled graphs with.
        """
        mla = None
        if as_device(device) == self.device:
            for i, claimed in enumerate(self._owners):
                if claimed is None or claimed() is None:
                    mla, self._owners[i] = self.mlas[i], weakref.ref(owner)
                    break
        if mla is None:
            mla = make(self.heads, device, self.dcp)
        prepare(mla, max_q, max_requests)
        return mla


# Those of living layers, by shape: the layers of an engine hold them, and they go with it.
_shared: weakref.WeakValueDictionary[tuple[object, ...], Buffers] = weakref.WeakValueDictionary()


def shared(
    heads: int, device: torch.device, dcp: bool, max_q: int, max_requests: int, builders: int
) -> Buffers:
    """The Buffers of this shape, made by the first layer that asks; each layer keeps it alive."""
    arguments = (heads, as_device(device), dcp, max_q, max_requests, builders)
    buffers = _shared.get(arguments)
    if buffers is None:
        buffers = _shared[arguments] = Buffers(*arguments)
    return buffers

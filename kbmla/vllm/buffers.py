"""Plans and scratch of the decode steps, made while the model is loaded.

vLLM constructs metadata builders after it has profiled memory, and layers before. So the first
layer of a shape makes everything that steps will need, where the profile counts it, and the builder
of a KV-cache group takes it over. A builder that finds it taken (a second group of the same shape,
a drafter, a micro-batch on a stream of its own) makes its own: a BalancedMla serves one stream.
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
    """A prepared BalancedMla that the layers of one shape share until a builder claims it.

    heads: query heads of a decode step, under DCP those of every rank; device: where the layers
    run; dcp: whether lengths are a shard's; max_q and max_requests: the largest step.
    """

    def __init__(
        self, heads: int, device: torch.device, dcp: bool, max_q: int, max_requests: int
    ) -> None:
        self.heads, self.device, self.dcp = heads, device, dcp
        self.mla = make(heads, device, dcp)
        prepare(self.mla, max_q, max_requests)
        self._owner: weakref.ref[object] | None = None

    def claim(
        self, owner: object, device: torch.device, max_q: int, max_requests: int
    ) -> BalancedMla:
        """A BalancedMla for `owner` alone, prepared for its steps; not during a capture.

        It is the one made here where that is free and on `device`; free again when its owner is
        gone, as vLLM drops the builders that it profiled graphs with.
        """
        taken = self._owner is not None and self._owner() is not None
        if taken or as_device(device) != self.device:
            mla = make(self.heads, device, self.dcp)
        else:
            mla = self.mla
            self._owner = weakref.ref(owner)
        prepare(mla, max_q, max_requests)
        return mla


# Those of living layers, by shape: the layers of an engine hold them, and they go with it.
_shared: weakref.WeakValueDictionary[tuple[object, ...], Buffers] = weakref.WeakValueDictionary()


def shared(heads: int, device: torch.device, dcp: bool, max_q: int, max_requests: int) -> Buffers:
    """The Buffers of this shape, made by the first layer that asks; each layer keeps it alive."""
    device = as_device(device)
    key = (heads, device, dcp, max_q, max_requests)
    buffers = _shared.get(key)
    if buffers is None:
        buffers = _shared[key] = Buffers(heads, device, dcp, max_q, max_requests)
    return buffers

# SPDX-License-Identifier: Apache-2.0
"""How long a planned wave would take on an H200, next to other ways of cutting the same batch.

A model, not a measurement: it ranks plans and shows where one loses time. Of a batch and a plan it
simulates every cluster of the wave (132 of one CTA where a q tile has up to 64 query rows, 66 of
two above):

* An entry is a start (the first one longer than later ones, whose KV the producer loads ahead), a
  stream of KV tiles, and a store: bf16 to the output, or FP32 to the workspace if its request is
  split. The reduce follows when all clusters are done.
* Clusters that stream share the memory. A tile takes each the longer of its share and its main
  loop, and a little more where the two are close.
* Stores share their bandwidth as well: slow when every SM stores, faster when few do.

The bound is a lower bound for every schedule in this model. For each length m of the longest piece
it takes the fewest pieces that allows, and the longest of: memory, the work and the fixed costs of
these pieces spread evenly, and one piece of m alone, plus the reduce; the least over m counts. The
floor counts only bytes and multiplications, and no schedule of a short step comes near it.

The schedules: the project's planner through `KvBalancedMla` (policies balanced, fixed, equal), and
`contiguous`: every worker takes the next equal share of a line on which each request occupies its
length and a fixed overhead, as FlashMLA's scheduler does. That one needs no list of equal pieces
and may cut each q tile of a request elsewhere; its cuts are at whole tiles of this kernel.

Constants are H200 measurements (bandwidths, stores of all SMs) but for the main loop, a line 1 to
3 % above the times measured at 48 and 64 rows, and the start of an entry, the store rate of few
SMs and the latency of the reduce, which are estimates.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import bench_shapes
import torch

from kbmla import workloads
from kbmla.core import KvBalancedMla

TILE_TOKENS = 128
TILE_BYTES = TILE_TOKENS * 576
READ_BYTES_US = 4.6e6  # all SMs
CTA_READ_BYTES_US = 130e3  # one CTA alone
MAIN_LOOP_US, MAIN_LOOP_ROW_US = 1.080, 0.026  # of a CTA over one KV tile, from 16 rows on
FIRST_US = 5.0  # first entry: list, query, first tile
NEXT_US = 1.0  # later entries, whose KV is on the way
DRAIN_US = 1.0
LAND_US = 0.9  # from the last store to its visibility
STORE_BYTES_US = 36e3  # per SM, all SMs storing
STORE_ALONE_BYTES_US = 72e3  # per SM, few storing
RING_TILES = 2.5  # loaded ahead for the next entry
REDUCE_IDLE_US, REDUCE_US = 0.84, 2.4  # launched for nothing; with work
REDUCE_ROUND_US, REDUCE_ROUND_SPLITS = 0.3, 32
REDUCE_BYTES_US = 5e6
CAPACITY, MIN_SPLIT_TOKENS = 1 << 20, 128
HEADS = {12: (12, 1), 60: (12, 5), 64: (64, 1), 96: (96, 1), 128: (128, 1), 480: (96, 5)}

Piece = tuple[float, bool]  # KV tiles, is it a part of a split request


@dataclass(frozen=True)
class Schedule:
    """Pieces of each cluster in order, and the number of splits of every (request, q tile)."""

    queues: list[list[Piece]]
    splits: list[int]


@dataclass(frozen=True)
class Machine:
    """What the model needs to know of `rows` query rows per request on an H200."""

    rows: int

    @cached_property
    def q_tiles(self) -> int:
        return -(-self.rows // 128)

    @cached_property
    def tile_rows(self) -> int:
        return -(-self.rows // self.q_tiles)

    @cached_property
    def ctas(self) -> int:
        return 2 if self.rows > 64 else 1

    @cached_property
    def clusters(self) -> int:
        return 132 // self.ctas

    @cached_property
    def loop_us(self) -> float:
        """Main loop over one KV tile, were memory free."""
        columns = max(16, -(-self.tile_rows // self.ctas // 8) * 8)
        return MAIN_LOOP_US + MAIN_LOOP_ROW_US * columns

    @cached_property
    def _tile_us(self) -> list[float]:
        times = [self.loop_us]
        for streaming in range(1, self.clusters + 1):
            ctas = streaming * self.ctas
            rate = min(CTA_READ_BYTES_US * ctas, 4.0e6 + 0.6e6 * max(0, ctas - 33) / 99)
            memory = TILE_BYTES * streaming / rate
            times.append((memory**8 + self.loop_us**8) ** 0.125)
        return times

    def tile_us(self, streaming: int) -> float:
        """One KV tile of a cluster while `streaming` clusters stream."""
        return self._tile_us[streaming]

    def store_bytes(self, partial: bool) -> float:
        """Bytes one CTA stores of an entry."""
        return self.tile_rows / self.ctas * (2048 if partial else 1024)

    def reduce_us(self, splits: Sequence[int]) -> float:
        parts = [n for n in splits if n > 1]
        if not parts:
            return REDUCE_IDLE_US
        rounds = -(-max(parts) // REDUCE_ROUND_SPLITS)
        read = sum(parts) * self.tile_rows * 2048 / REDUCE_BYTES_US
        return REDUCE_US + REDUCE_ROUND_US * (rounds - 1) + read


# ---------------------------------------------------------------- the wave


@dataclass
class _Pool:
    """Jobs that progress together at one rate: entries are (progress at which it ends, cluster)."""

    progress: float = 0.0
    jobs: list[tuple[float, int]] = field(default_factory=list)

    def add(self, amount: float, cluster: int) -> None:
        heapq.heappush(self.jobs, (self.progress + amount, cluster))

    def time_left(self, rate: float) -> float:
        return (self.jobs[0][0] - self.progress) / rate if self.jobs else math.inf


def wave_us(machine: Machine, queues: list[list[Piece]]) -> float:
    """Time until the last store of the wave has landed."""
    timers, streams, stores = _Pool(), _Pool(), _Pool()
    turn = [0] * len(queues)
    ended = [0.0] * len(queues)  # when a cluster's last stream ended
    waiting = [False] * len(queues)  # its producer loads the next entry meanwhile
    share = TILE_BYTES * machine.clusters / READ_BYTES_US
    hidden = max(0.0, 1 - machine.loop_us / machine.tile_us(machine.clusters))
    now = last = 0.0
    loading = 0

    def start(cluster: int, delay: float) -> None:
        tiles = queues[cluster][turn[cluster]][0]
        timers.add(delay if tiles else 0.15, cluster)

    for cluster, queue in enumerate(queues):
        if queue:
            start(cluster, FIRST_US)
    started = [False] * len(queues)
    while timers.jobs or streams.jobs or stores.jobs:
        stream_rate = 1 / machine.tile_us(loading)
        writers = max(len(stores.jobs) * machine.ctas, 1)
        store_rate = min(STORE_ALONE_BYTES_US, STORE_BYTES_US * 132 / writers)
        waits = timers.time_left(1.0), streams.time_left(stream_rate), stores.time_left(store_rate)
        step = min(waits)
        now += step
        timers.progress += step
        streams.progress += step * stream_rate
        stores.progress += step * store_rate
        if step == waits[1]:  # a stream ends, its last arithmetic drains
            cluster = heapq.heappop(streams.jobs)[1]
            queue, after = queues[cluster], turn[cluster] + 1
            waiting[cluster] = after < len(queue) and queue[after][0] > 0
            loading -= not waiting[cluster]
            ended[cluster] = now
            timers.add(DRAIN_US, cluster)
        elif step == waits[2]:  # a store ends
            cluster = heapq.heappop(stores.jobs)[1]
            last = now
            turn[cluster] += 1
            started[cluster] = False
            if turn[cluster] < len(queues[cluster]):
                start(cluster, NEXT_US)
        else:  # a start or a drain ends
            cluster = heapq.heappop(timers.jobs)[1]
            tiles, partial = queues[cluster][turn[cluster]]
            if tiles and not started[cluster]:
                started[cluster] = True
                ahead = (
                    min(RING_TILES, (now - ended[cluster]) / share, tiles) if turn[cluster] else 0
                )
                streams.add(tiles - ahead * hidden, cluster)
                loading += not waiting[cluster]
                waiting[cluster] = False
            else:
                stores.add(machine.store_bytes(partial), cluster)
    return last + LAND_US


def finish_us(machine: Machine, schedule: Schedule) -> float:
    """Wave and reduce of one layer."""
    return wave_us(machine, schedule.queues) + machine.reduce_us(schedule.splits)


# ---------------------------------------------------------------- bounds


def num_tiles(length: int) -> int:
    return max(0, -(-length // TILE_TOKENS))


def floor_us(machine: Machine, lengths: Sequence[int]) -> float:
    """Bytes at the full read bandwidth or the main loop's arithmetic on all SMs."""
    tiles = sum(map(num_tiles, lengths))
    work = tiles * machine.q_tiles * machine.loop_us / machine.clusters
    return max(tiles * TILE_BYTES / READ_BYTES_US, work)


def bound_us(machine: Machine, lengths: Sequence[int]) -> float:
    """Less than any schedule of whole tiles takes in this model."""
    tiles = [num_tiles(n) for n in lengths]
    longest, work = max(tiles), sum(tiles) * machine.q_tiles
    if longest == 0:
        return 0.15 + machine.store_bytes(False) / STORE_ALONE_BYTES_US + LAND_US + REDUCE_IDLE_US
    direct, partial = (machine.store_bytes(p) / STORE_ALONE_BYTES_US for p in (False, True))
    memory = FIRST_US + sum(tiles) * TILE_BYTES / READ_BYTES_US + DRAIN_US + direct + LAND_US
    best, piece = math.inf, longest
    while piece >= 1:
        counts = [max(1, -(-t // piece)) for t in tiles]
        parts = sum(n for n in counts if n > 1) * machine.q_tiles
        whole = sum(t > 0 and n == 1 for t, n in zip(tiles, counts, strict=True)) * machine.q_tiles
        busy = min(parts + whole, machine.clusters) * (FIRST_US - NEXT_US) + work * machine.loop_us
        busy += (parts + whole) * (NEXT_US + DRAIN_US) + parts * partial + whole * direct
        alone = FIRST_US + piece * machine.tile_us(1) + DRAIN_US + direct
        splits = [n for n in counts for _ in range(machine.q_tiles)]
        wave = max(memory, busy / machine.clusters + LAND_US, alone + LAND_US)
        best = min(best, wave + machine.reduce_us(splits))
        piece = min(piece - 1, int(piece / 1.03))
    return best


# ---------------------------------------------------------------- schedules


def plan_list(
    rows: int, lengths: Sequence[int], clusters: int, policy: str
) -> tuple[list[int], list[int]]:
    """Counts and work list of the project's planner."""
    heads, q_len = HEADS[rows]
    core = KvBalancedMla(
        heads, q_len, len(lengths), True, torch.device("cpu"), CAPACITY, MIN_SPLIT_TOKENS,
        clusters=clusters, policy=policy,
    )  # fmt: skip
    counts = torch.zeros(len(lengths), dtype=torch.int32)
    work = torch.zeros(core.list_len, dtype=torch.int32)
    core.plan(torch.tensor(lengths, dtype=torch.int32), counts, work)
    return counts.tolist(), work.tolist()


def planned(machine: Machine, lengths: Sequence[int], policy: str = "balanced") -> Schedule:
    """The project's planner: cluster i takes entries i, i + clusters, ... of the list."""
    counts, work = plan_list(machine.rows, lengths, machine.clusters, policy)
    queues: list[list[Piece]] = [[] for _ in range(machine.clusters)]
    for index, entry in enumerate(work):
        if entry < 0:
            break
        batch, split = (entry >> 8) % len(lengths), entry & 255
        tiles = num_tiles(lengths[batch])
        per = -(-tiles // counts[batch])
        piece = max(0, min(per, tiles - split * per))
        queues[index % machine.clusters].append((float(piece), counts[batch] > 1))
    return Schedule(queues, [n for n in counts for _ in range(machine.q_tiles)])


def contiguous(machine: Machine, lengths: Sequence[int], overhead: int = 5) -> Schedule:
    """Equal shares of one line; `overhead` of a piece in half tiles (64 tokens)."""
    line = [2 * num_tiles(n) for n in lengths for _ in range(machine.q_tiles)]
    share = -(-(sum(line) + overhead * len(line)) // machine.clusters) + overhead
    while True:
        pieces: list[list[tuple[int, int]]] = []
        splits, request, done = [0] * len(line), 0, 0
        for _ in range(machine.clusters):
            pieces.append([])
            left = share
            while request < len(line) and left > 0:
                rest = line[request] - done
                take = (
                    rest if left >= rest + overhead else min(rest, (left - overhead + 1) // 2 * 2)
                )
                if take <= 0 and rest > 0:
                    break
                pieces[-1].append((request, take))
                splits[request] += 1
                left -= take + overhead if take == rest else left
                request, done = (request + 1, 0) if take == rest else (request, done + take)
        if request == len(line):
            break
        share += 1  # rounding to whole tiles left some of the line over
    queues = [[(half / 2, splits[r] > 1) for r, half in queue] for queue in pieces]
    return Schedule(queues, splits)


SCHEDULES: dict[str, Callable[[Machine, Sequence[int]], Schedule]] = {
    "balanced": planned,
    "fixed": lambda machine, lengths: planned(machine, lengths, "fixed"),
    "equal": lambda machine, lengths: planned(machine, lengths, "equal"),
    "contiguous": contiguous,
}


# ---------------------------------------------------------------- scenarios


@dataclass(frozen=True)
class Scenario:
    name: str
    rows: int
    lengths: list[int]

    @property
    def is_mixed(self) -> bool:
        return max(self.lengths) > 1.5 * sum(self.lengths) / len(self.lengths)


def shard(lengths: Sequence[int], world: int = 8) -> list[int]:
    """The largest shard of each length under context parallelism."""
    return [-(-n // world) for n in lengths]


def _lognormal(
    draws: random.Random, requests: int, median: float, sigma: float, low: int, high: int
) -> list[int]:
    return [
        int(min(high, max(low, draws.lognormvariate(math.log(median), sigma))))
        for _ in range(requests)
    ]


def _agents(draws: random.Random, requests: int) -> list[int]:
    """Six in ten short, three middling, one long."""
    lengths = []
    for _ in range(requests):
        short, middling = draws.uniform(2e3, 16e3), draws.uniform(16e3, 64e3)
        long = draws.uniform(64e3, 2e5)
        lengths.append(int(draws.choice([short] * 6 + [middling] * 3 + [long])))
    return lengths


def synthetic_scenarios() -> list[Scenario]:
    """Single requests, uniform batches, one long among many short, log-normals, agents, DCP."""
    draws, mixed = random.Random(7), workloads.mixed
    return [
        Scenario("1 x 8K", 12, [8192]),
        Scenario("1 x 128K", 12, [131072]),
        Scenario("1 x 1M", 60, [1 << 20]),
        Scenario("8 x 32K", 12, mixed((8, 32768))),
        Scenario("64 x 8K", 12, mixed((64, 8192))),
        Scenario("132 x 4K", 12, mixed((132, 4096))),
        Scenario("140 x 4K", 12, mixed((140, 4096))),
        Scenario("512K + 63 x 2K", 12, mixed((1, 524288), (63, 2048))),
        Scenario("4 x 128K + 124 x 1K", 60, mixed((4, 131072), (124, 1024))),
        Scenario("logn B32 8K", 12, _lognormal(draws, 32, 8192, 1.5, 64, 262144)),
        Scenario("logn B128 4K", 60, _lognormal(draws, 128, 4096, 1.5, 64, 262144)),
        Scenario("logn B512 1K", 12, _lognormal(draws, 512, 1024, 1.0, 16, 65536)),
        Scenario("agents B256", 60, _agents(draws, 256)),
        Scenario("DCP8 agents B16", 96, shard(_agents(draws, 16))),
        Scenario("DCP8 agents B64", 96, shard(_agents(draws, 64))),
        Scenario("DCP8 logn B8", 480, shard(_lognormal(draws, 8, 65536, 1.0, 4096, 1 << 20))),
        Scenario("DCP8 agents B48", 480, shard(_agents(draws, 48))),
        Scenario("logn B64 4K", 128, _lognormal(draws, 64, 4096, 1.2, 64, 131072)),
    ]


def measured_scenarios() -> list[Scenario]:
    """The batches on which other kernels were measured, at every row count."""
    batches = bench_shapes.grid_batches()
    return [Scenario(name, rows, lengths) for name, lengths in batches.items() for rows in HEADS]


def trace_scenarios() -> list[Scenario]:
    """Draws from every serving trace, whole and as shards of eight ranks."""
    scenarios = []
    for i, trace in enumerate(workloads.trace_names()):
        whole = [(16, 12), (64, 60), (256, 12), (64, 128), (128, 96)]
        for j, (requests, rows) in enumerate(whole):
            lengths = workloads.draw(trace, requests, 100 * i + j)
            scenarios.append(Scenario(f"{trace} B{requests}", rows, lengths))
        for j, (requests, rows) in enumerate([(8, 96), (32, 480), (64, 96)]):
            lengths = shard(workloads.draw(trace, requests, 100 * i + 50 + j))
            scenarios.append(Scenario(f"DCP8 {trace} B{requests}", rows, lengths))
    return scenarios


def random_scenarios(number: int, seed: int) -> list[Scenario]:
    """Batches that played no part in choosing the rule's constants, unless a seed is reused."""
    draws, scenarios = random.Random(seed), []
    for i in range(number):
        rows = list(HEADS)[i % len(HEADS)]
        requests = draws.choice([2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
        requests = min(requests, 128) if rows > 128 else requests
        kind = draws.random()
        if kind < 0.6:
            trace = draws.choice(workloads.trace_names())
            lengths = workloads.draw(trace, requests, draws.randrange(10**6))
            lengths = shard(lengths) if draws.random() < 0.35 else lengths
        elif kind < 0.85:
            median, sigma = draws.choice([1024, 4096, 16384]), draws.choice([0.5, 1.0, 1.5])
            lengths = _lognormal(draws, requests, median, sigma, 16, 262144)
        elif kind < 0.95:
            groups = (draws.choice([1, 2, 4]), draws.choice([8192, 32768, 131072]))
            lengths = workloads.mixed(groups, (requests, draws.choice([1024, 2048, 4096])))
        else:
            lengths = workloads.uniform(requests, draws.choice([2048, 4096, 8192]))
        scenarios.append(Scenario(f"random {i} B{len(lengths)}", rows, lengths))
    return scenarios


# ---------------------------------------------------------------- report


@dataclass(frozen=True)
class Result:
    scenario: Scenario
    floor: float
    bound: float
    times: dict[str, float]

    @property
    def against_contiguous(self) -> float:
        return self.times["balanced"] / self.times["contiguous"]


def simulate(scenario: Scenario, schedules: Sequence[str] = tuple(SCHEDULES)) -> Result:
    machine, lengths = Machine(scenario.rows), scenario.lengths
    times = {name: finish_us(machine, SCHEDULES[name](machine, lengths)) for name in schedules}
    return Result(scenario, floor_us(machine, lengths), bound_us(machine, lengths), times)


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def print_table(results: Sequence[Result]) -> None:
    names = list(SCHEDULES)
    head = "  ".join(f"{name:>10s}" for name in names)
    print(f"{'scenario':34s} rows  bound us  {head}  balanced/contiguous")
    for r in results:
        cells = "  ".join(f"{r.times[name] / r.bound:10.3f}" for name in names)
        print(
            f"{r.scenario.name:34s} {r.scenario.rows:4d}  {r.bound:8.1f}  {cells}"
            f"  {r.against_contiguous:8.3f}"
        )


def print_summary(title: str, results: Sequence[Result]) -> None:
    mixed = [r for r in results if r.scenario.is_mixed]
    ratios = [r.against_contiguous for r in results]
    print(f"\n{title}: {len(results)} batches, geometric means")
    for name in SCHEDULES:
        bound = geomean([r.times[name] / r.bound for r in results])
        floor = geomean([r.times[name] / r.floor for r in results])
        print(f"  {name:12s} {bound:6.3f} of the bound, {floor:6.3f} of the floor")
    gain = geomean([r.times["equal"] / r.times["balanced"] for r in mixed])
    print(f"  equal / balanced over the {len(mixed)} mixed batches: {gain:.2f}")
    above = sum(x > 1.05 for x in ratios)
    print(
        f"  balanced / contiguous: {geomean(ratios):.3f}, worst {max(ratios):.3f}, "
        f"above 1.05 in {above} of {len(ratios)}"
    )


def main_scenarios() -> list[Scenario]:
    return synthetic_scenarios() + measured_scenarios() + trace_scenarios()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Modelled time of planned waves on an H200 over a lower bound, by scenario."
    )
    parser.add_argument("--random", type=int, default=120, help="random batches besides (120)")
    parser.add_argument("--seed", type=int, default=4242, help="of the random batches (4242)")
    parser.add_argument("--brief", action="store_true", help="summaries only")
    args = parser.parse_args()
    results = [simulate(s) for s in main_scenarios()]
    fresh = [simulate(s) for s in random_scenarios(args.random, args.seed)]
    if not args.brief:
        print_table(results)
    if fresh:
        print_summary(f"random, seed {args.seed}", fresh)
    print_summary("scenarios above" if not args.brief else "scenarios", results)


if __name__ == "__main__":
    main()

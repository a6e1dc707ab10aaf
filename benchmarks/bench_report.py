# SPDX-License-Identifier: Apache-2.0
"""Results of bench_decode.py: one row per shape, and how rows are printed, stored and drawn.

Needs no GPU, so a run's JSON can be printed and drawn anywhere.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import timing
from bench_shapes import HEAD_DIM_QK, HEAD_DIM_V, PAGE

from kbmla.demo import OUT_BOUND

# Two results within the error bound of each other's truth, with room for both being at it.
DIFFERENCE_BOUND = 0.05


def largest(values: Sequence[float]) -> float | None:
    """The largest value, a NaN above all others; None of none."""
    return max(values, key=lambda value: (math.isnan(value), value), default=None)


def mode(about: dict[str, Any]) -> str:
    """How the graphs of a run were timed, in a line."""
    seconds = about.get("sustained")
    if seconds is None:
        return "graphs in turn, medians"
    return f"each graph alone, {seconds:g} s after {seconds:g} s of warm-up, means"


@dataclass
class Row:
    """Result of one shape. Times are microseconds; the first policy is the one that ratios,
    rates and fractions are of."""

    batch: str
    heads: int
    q: int
    requests: int
    tokens: int
    layers: int
    repeats: int  # of the graph with the fewest
    cold: bool
    us: dict[str, float]
    plan_us: float
    floor_us: float
    roof_us: float
    recorded_us: float | None = None
    flashmla_us: float | None = None
    flashmla_plan_us: float | None = None
    error: float | None = None
    flashmla_error: float | None = None
    difference: float | None = None
    spread: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.batch}/{self.heads}x{self.q}"

    @property
    def first(self) -> float:
        """Microseconds per layer of the first policy."""
        return next(iter(self.us.values()))

    @property
    def of_floor(self) -> float:
        return self.floor_us / self.first

    @property
    def of_roof(self) -> float:
        return self.roof_us / self.first

    @property
    def tflops(self) -> float:
        return 2 * (HEAD_DIM_QK + HEAD_DIM_V) * self.heads * self.q * self.tokens / self.first / 1e6

    @property
    def ps_per_token(self) -> float:
        return self.first * 1e6 / self.tokens

    @property
    def x_recorded(self) -> float | None:
        return None if self.recorded_us is None else self.recorded_us / self.first

    @property
    def x_run(self) -> float | None:
        return None if self.flashmla_us is None else self.flashmla_us / self.first

    @property
    def good(self) -> bool:
        """Whether the outputs are within bounds, as far as they were compared."""
        return (self.error is None or self.error <= OUT_BOUND) and (
            self.difference is None or self.difference <= DIFFERENCE_BOUND
        )

    def flat(self) -> dict[str, Any]:
        """Stored and derived values by name, for CSV."""
        stored = asdict(self)
        times, spread = stored.pop("us"), stored.pop("spread")
        named = {f"{policy}_us": us for policy, us in times.items()}
        named |= {f"{policy}_spread": share for policy, share in spread.items()}
        derived = ("of_floor", "of_roof", "tflops", "ps_per_token", "x_recorded", "x_run")
        return stored | named | {name: getattr(self, name) for name in derived}


# ---------------------------------------------------------------- tables


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def header(policies: Sequence[str], with_run: bool) -> str:
    """The two lines above the table."""
    first = f"{'':14} {'':>5} {'':>2} {'':>4} | {'us per layer':>{10 * len(policies) - 1}} "
    first += f"{'':>7} | {'':>7} {'of':>5} {'of':>5} {'':>7} {'ps per':>7} | "
    first += f"{'FlashMLA':>8} {'':>5} | "
    second = f"{'batch':14} {'heads':>5} {'q':>2} {'lay.':>4} | "
    second += " ".join(f"{policy:>9}" for policy in policies)
    second += f" {'us/plan':>7} | {'floor':>7} {'floor':>5} {'roof':>5} {'TFLOP/s':>7} "
    second += f"{'token':>7} | {'recorded':>8} {'x':>5} | "
    if with_run:
        first += f"{'FlashMLA':>8} {'':>5} {'':>7} {'':>6} | "
        second += f"{'run':>8} {'x':>5} {'us/plan':>7} {'differ':>6} | "
    return f"{first}\n{second}{'error':>7}"


def line(row: Row, with_run: bool) -> str:
    """One row of the table."""
    text = f"{row.batch:14} {row.heads:>5} {row.q:>2} {row.layers:>4} | "
    text += " ".join(_cell(us, 9, 1) for us in row.us.values())
    text += f" {_cell(row.plan_us, 7, 2)} | {_cell(row.floor_us, 7, 1)} {_cell(row.of_floor, 5, 2)}"
    text += f" {_cell(row.of_roof, 5, 2)} {_cell(row.tflops, 7, 1)} {_cell(row.ps_per_token, 7, 1)}"
    text += f" | {_cell(row.recorded_us, 8, 1)} {_cell(row.x_recorded, 5, 2)} | "
    if with_run:
        text += f"{_cell(row.flashmla_us, 8, 1)} {_cell(row.x_run, 5, 2)} "
        text += f"{_cell(row.flashmla_plan_us, 7, 2)} {_cell(row.difference, 6, 4)} | "
    text += _cell(row.error, 7, 4)
    return text + ("" if row.cold else "  L2 warm") + ("" if row.good else "  OUT OF BOUNDS")


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _ratio_line(title: str, found: Sequence[tuple[float, str]]) -> str:
    worst, best = min(found), max(found)
    mean = geomean([value for value, _ in found])
    return (
        f"{title:29} geomean {mean:5.2f}, worst {worst[0]:5.2f} at {worst[1]}, "
        f"best {best[0]:5.2f} at {best[1]}"
    )


def summary(rows: Sequence[Row], limits: timing.Ceilings, gpu: str) -> str:
    """The last lines of a run."""
    rate = f"{limits.fp8_flops_per_s / 1e15:.2f} PFLOP/s" if limits.fp8_flops_per_s else "none"
    lines = [
        f"{gpu}: reads {limits.read_bytes_per_s / 1e12:.2f} TB/s ({limits.read_method}), "
        f"FP8 matrix product {rate}"
    ]
    if not rows:
        return "\n".join([*lines, "no shape was measured"])
    policies = list(rows[0].us)
    lines.append(f"{len(rows)} shapes, {policies[0]}, page {PAGE}")
    lines.append(_ratio_line("fraction of the floor", [(r.of_floor, r.label) for r in rows]))
    small = [(r.of_floor, r.label) for r in rows if r.heads * r.q <= 64]
    if small and len(small) < len(rows):
        lines.append(_ratio_line("  up to 64 rows", small))
    lines.append(_ratio_line("fraction of the roof", [(r.of_roof, r.label) for r in rows]))
    for policy in policies[1:]:
        found = [(r.us[policy] / r.first, r.label) for r in rows]
        lines.append(_ratio_line(f"{policy} over {policies[0]}", found))
    recorded = [(r.x_recorded, r.label) for r in rows if r.x_recorded is not None]
    if recorded:
        lines.append(_ratio_line("faster than FlashMLA recorded", recorded))
    run = [(r.x_run, r.label) for r in rows if r.x_run is not None]
    if run:
        lines.append(_ratio_line("faster than FlashMLA run", run))
    checked = [(r.error, r.label) for r in rows if r.error is not None]
    if checked:
        error, label = max(checked, key=lambda found: (math.isnan(found[0]), found[0]))
        lines.append(f"largest error {error:.4f} at {label}, bound {OUT_BOUND}")
    bad = [row.label for row in rows if not row.good]
    if bad:
        lines.append(f"OUT OF BOUNDS: {', '.join(bad)}")
    return "\n".join(lines)


# ---------------------------------------------------------------- files


def write_json(path: Path, rows: Sequence[Row], limits: timing.Ceilings, about: Any) -> None:
    """Everything that `read_json` needs to print and draw the run again."""
    data = {
        "about": about,
        "ceilings": limits._asdict(),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def read_json(path: Path) -> tuple[list[Row], timing.Ceilings, dict[str, Any]]:
    """Rows, ceilings and description of a run. ValueError if the file is not such a run."""
    try:
        data = json.loads(path.read_text("utf-8"))
        known = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in known}) for row in data["rows"]]
        return rows, timing.Ceilings(**data["ceilings"]), dict(data["about"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--load {path}: not a file of --json ({error})") from None


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line per row, derived values included."""
    flat = [row.flat() for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)))
        writer.writeheader()
        writer.writerows(flat)


def pyplot() -> Any:
    """matplotlib.pyplot without a display; RuntimeError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise RuntimeError(
            "--plot needs matplotlib, which is not installed; run with --json FILE and draw it "
            "elsewhere with --load FILE --plot IMAGE"
        ) from None


def plot(path: Path, rows: Sequence[Row], gpu: str) -> None:
    """Bars of time over roof, a panel for each (heads, q), a group for each batch."""
    plt = pyplot()
    panels = list(dict.fromkeys((row.heads, row.q) for row in rows))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(8 * columns, 3.6 * lines), squeeze=False)
    for axis, (heads, q) in zip(axes.flat, panels, strict=False):
        mine = [row for row in rows if (row.heads, row.q) == (heads, q)]
        bars: dict[str, list[float]] = {
            policy: [row.us[policy] / row.roof_us for row in mine] for policy in mine[0].us
        }
        peer = [row.flashmla_us or row.recorded_us for row in mine]
        bars["FlashMLA FP8"] = [
            us / row.roof_us if us else math.nan for us, row in zip(peer, mine, strict=True)
        ]
        width = 0.8 / len(bars)
        for i, (name, values) in enumerate(bars.items()):
            axis.bar([x + i * width for x in range(len(mine))], values, width, label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(mine))])
        axis.set_xticklabels([row.batch for row in mine], rotation=30, ha="right", fontsize=8)
        axis.set_title(f"{heads} heads, q {q}", fontsize=10)
        axis.set_ylabel("time / roof")
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=8)
    figure.suptitle(f"One layer's decode over what the card allows, {gpu}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

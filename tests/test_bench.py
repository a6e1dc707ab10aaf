# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the GPU benchmark (shapes, page tables, rows, files, messages) and the refusals
of the device pass; nothing here needs a GPU."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_decode  # noqa: E402
import bench_report  # noqa: E402
import bench_shapes  # noqa: E402
import timing  # noqa: E402

LIMITS = timing.Ceilings(4.5e12, "16-byte loads", 1.36e15)


def fake_row(shape: bench_shapes.Shape, factor: float = 1.0, **changed) -> bench_report.Row:
    floor, roof = timing.roofline_us(shape.kv_bytes, shape.flops, LIMITS)
    values = {
        "batch": shape.batch,
        "heads": shape.heads,
        "q": shape.q,
        "requests": len(shape.lengths),
        "tokens": shape.tokens,
        "layers": shape.layers,
        "repeats": 20,
        "cold": True,
        "us": {"balanced": roof * factor * 1.25, "equal": roof * factor * 2.5},
        "plan_us": 2.0,
        "floor_us": floor,
        "roof_us": roof,
        "recorded_us": bench_shapes.peers().get((shape.batch, shape.heads, shape.q)),
        "error": 0.014,
    }
    return bench_report.Row(**(values | changed))


# ---------------------------------------------------------------- shapes


def test_grid_is_the_recorded_one():
    shapes = bench_shapes.select()
    assert [(s.batch, s.heads, s.q) for s in shapes] == list(bench_shapes.peers())
    megabytes = {s.batch: round(s.kv_bytes / 1e6, 1) for s in shapes}
    assert megabytes == {
        "u1x8K": 4.7, "u1x128K": 75.5, "u16x8K": 75.5, "u64x4K": 151.0, "u128x8K": 604.0,
        "m1x32K+7x1K": 23.0, "m1x128K+31x2K": 112.1, "m4x64K+60x1K": 186.4, "logn64": 213.0,
        "logn256": 474.8,
    }  # fmt: skip
    assert bench_shapes.peers()["u128x8K", 96, 5] == 1691.2


def test_layers_are_cold_and_fit():
    for shape in bench_shapes.select():
        assert shape.layers * shape.kv_bytes >= 400e6
        assert shape.layers * shape.pages * bench_shapes.PAGE_BYTES < 3e9
    (tiny,) = bench_shapes.select(["q1s64"], [12])
    assert tiny.layers == bench_shapes.MAX_LAYERS


def test_select():
    select = bench_shapes.select
    assert len(select(quick=True)) == 16
    assert [s.label for s in select(["u16x8K"], [20], [1, 3])] == ["u16x8K/20x1", "u16x8K/20x3"]
    assert [s.label for s in select(["u16x8K"], [20])] == ["u16x8K/20x1"]
    assert [(s.heads, s.q) for s in select(["u16x8K"], q=[2])] == [
        (12, 2), (64, 2), (96, 2), (128, 2)
    ]  # fmt: skip
    assert [s.label for s in select(only=["u1x8K/12x", "logn64/96x5"])] == [
        "u1x8K/12x1", "u1x8K/12x5", "logn64/96x5"
    ]  # fmt: skip


def test_select_grammar():
    """A batch the grid has keeps the grid's name, so that it meets its recorded figure."""
    known, own = bench_shapes.select(["1q1s128k_31q1s2k", "3q2s1k"], [12])
    assert (known.label, known.tokens) == ("m1x128K+31x2K/12x1", 131072 + 31 * 2048)
    assert (own.label, own.lengths) == ("3q2s1k/12x2", (1024,) * 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": ["nosuch"]}, "--only: no shape's label contains nosuch"),
        ({"batch": ["nosuch"]}, "batch 'nosuch'"),
        ({"batch": ["q1s1k_q2s1k"]}, "expected one q in every segment"),
        ({"batch": ["q1s1k"], "q": [2]}, "--q: batch 'q1s1k' says q = 1"),
        ({"heads": [129]}, "expected heads in 1..128"),
        ({"heads": [128], "q": [9]}, "heads x q <= 1024"),
        ({"batch": ["1024q1s128k"]}, "pool of pages"),
    ],
)
def test_select_refuses(arguments, message):
    arguments["batches"] = arguments.pop("batch", None)
    with pytest.raises(ValueError, match=message):
        bench_shapes.select(**arguments)


def test_page_tables():
    lengths, layers = [1, 64, 65, 1000], 3
    tables = bench_shapes.page_tables(lengths, layers)
    need = [1, 1, 2, 16]
    assert tables.shape == (layers, 4, 16)
    assert tables.dtype == torch.int32
    seen = [tables[i, b, :n] for i in range(layers) for b, n in enumerate(need)]
    assert sorted(torch.cat(seen).tolist()) == list(range(layers * sum(need)))
    assert all(not tables[:, b, n:].any() for b, n in enumerate(need))


def test_gaussian():
    data = bench_decode.gaussian(50, 64, 576, seed=0, device="cpu")
    assert data.dtype == torch.float8_e4m3fn
    values = data.float()
    assert abs(values.mean().item()) < 0.01
    assert abs(values.std().item() - 1) < 0.01


# ---------------------------------------------------------------- arithmetic


def test_roofline():
    memory, roof = timing.roofline_us(4.5e6, 2.72e9, LIMITS)
    assert (memory, roof) == (pytest.approx(1.0), pytest.approx(2.0))
    assert timing.roofline_us(4.5e6, 2.72e9, LIMITS._replace(fp8_flops_per_s=None))[1] == memory


def test_fitting_repeats():
    fitting = timing.fitting_repeats
    assert [fitting(1e3, 20, 4.0), fitting(1e6, 20, 4.0), fitting(1e7, 20, 4.0)] == [20, 4, 3]
    assert fitting(1e7, 2, 4.0) == 2


def test_row():
    (shape,) = bench_shapes.select(["u64x4K"], [64], [1])
    row = fake_row(shape, us={"balanced": 50.0, "equal": 60.0}, flashmla_us=75.0)
    assert row.ps_per_token == pytest.approx(50e6 / (64 * 4096))
    assert row.tflops == pytest.approx(2 * 1088 * 64 * 64 * 4096 / 50e-6 / 1e12)
    assert row.x_recorded == pytest.approx(75.8 / 50)
    assert row.x_run == pytest.approx(1.5)


@pytest.mark.parametrize("changed", [{"error": 0.03}, {"error": math.nan}, {"difference": 0.2}])
def test_bad_output_shows(changed):
    (shape,) = bench_shapes.select(["u64x4K"], [64], [1])
    row = fake_row(shape, **changed)
    assert not row.good
    assert bench_report.line(row, False).endswith("OUT OF BOUNDS")
    assert "OUT OF BOUNDS: u64x4K/64x1" in bench_report.summary([row], LIMITS, "card")


def test_largest():
    assert bench_report.largest([0.1, math.nan, 0.2]) is not None
    assert math.isnan(bench_report.largest([0.1, math.nan, 0.2]))
    assert bench_report.largest([]) is None


def test_checked_requests():
    (mixed,) = bench_shapes.select(["m1x128K+31x2K"], [96], [5])
    assert [mixed.lengths[b] for b in bench_decode.checked_requests(mixed)] == [131072, 2048]
    (long,) = bench_shapes.select(["2q1s1m"], [128])
    assert long.heads * long.lengths[0] <= bench_decode.CHECKED_SCORES
    assert bench_decode.checked_requests(long)


def test_sustained_times(monkeypatch):
    """Each call alone, then each again in reverse, half of the seconds and as long before."""
    runs = []

    def event_times(calls, repeats, *, warmup=2):
        runs.append((calls[0](), repeats, warmup))
        return [[100.0 if calls[0]() == "fast" else 1e4] * repeats]

    monkeypatch.setattr(timing, "event_times", event_times)
    found = timing.sustained_times([lambda: "fast", lambda: "slow"], 0.4)
    assert [run for run in runs if run[1] != 3] == [
        ("fast", 2000, 2000), ("slow", 20, 20), ("slow", 20, 20), ("fast", 2000, 2000),
    ]  # fmt: skip
    assert [len(times) for times in found] == [4000, 40]


# ---------------------------------------------------------------- tables and files


@pytest.mark.parametrize("with_run", [False, True])
def test_table_columns_line_up(with_run):
    row = fake_row(bench_shapes.select()[0], flashmla_us=15.7, flashmla_plan_us=4.4, difference=0.0)
    bars = [
        [i for i, char in enumerate(text) if char == "|"]
        for text in [
            *bench_report.header(list(row.us), with_run).split("\n"),
            bench_report.line(row, with_run),
        ]
    ]
    assert bars[0] == bars[1] == bars[2]


def test_load(tmp_path, capsys):
    """A stored run prints, converts and draws the same anywhere."""
    rows = [fake_row(shape, 1 + i / 60) for i, shape in enumerate(bench_shapes.select())]
    rows[3].flashmla_us = 20.0
    stored, table, image = (tmp_path / name for name in ("run.json", "run.csv", "run.png"))
    bench_report.write_json(stored, rows, LIMITS, {"gpu": "card", "sustained": 5.0})
    command = ["--load", str(stored), "--csv", str(table)]
    try:
        import matplotlib  # noqa: F401

        command += ["--plot", str(image)]
    except ImportError:
        pass
    assert bench_decode.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") > 65
    assert printed.startswith("each graph alone, 5 s after 5 s")
    assert "geomean" in printed.splitlines()[-2]
    assert bench_report.read_json(stored)[:2] == (rows, LIMITS)
    lines = list(csv.DictReader(table.open()))
    assert len(lines) == 60
    assert float(lines[0]["balanced_us"]) == pytest.approx(rows[0].us["balanced"])
    assert image.exists() == ("--plot" in command)


def test_load_refuses_other_files(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps([1]))
    assert bench_decode.main(["--load", str(other)]) == 2
    assert "not a file of --json" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert bench_decode.main(["--quick"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_decode: error: needs a CUDA device")
    assert error.count("\n") == 1


def test_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench_decode.main(["--quick", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--repeats", "0"],
        ["--seconds", "nan"],
        ["--sustained", "0"],
        ["--sustained", "inf"],
        ["--sustained", "1", "--repeats", "9"],
        ["--quick", "--q", "0"],
    ],
)
def test_bad_numbers(argv, capsys):
    assert bench_decode.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- the device pass


def device_pass(*steps: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tests" / "device.sh"), *steps],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


def test_device_pass_names_its_steps():
    result = device_pass("nosuch")
    assert result.returncode == 2
    assert "nosuch" in result.stderr
    assert "correctness contract sanitize bench" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_pass_needs_a_gpu(tmp_path):
    result = device_pass("bench", OUT=str(tmp_path))
    assert result.returncode == 2
    assert "no CUDA device" in result.stderr

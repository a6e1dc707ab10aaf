# SPDX-License-Identifier: Apache-2.0
"""The command line and the pictures it draws."""

import subprocess
import sys

import pytest
import torch

import kbmla
from kbmla import demo, picture, workloads
from kbmla.__main__ import main

MIXED = workloads.mixed((1, 131072), (31, 2048))


def run(capsys, line):
    status = main(line.split())
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("policy", ["balanced", "equal", "fixed"])
@pytest.mark.parametrize(("heads", "q"), [(64, 1), (64, 4), (12, 1)])
def test_a_plan_reads_every_tile_once(policy, heads, q):
    lengths = [*MIXED, 0, 1]
    plan = picture.make_plan(lengths, heads=heads, q=q, clusters=132, policy=policy)
    assert plan.q_tiles == -(-heads * q // 128)
    assert len(plan.clusters) == 132
    seen = {}
    for piece in (p for pieces in plan.clusters for p in pieces):
        seen.setdefault((piece.q_tile, piece.request), []).append(piece)
    for (_, request), pieces in seen.items():
        assert sorted(p.split for p in pieces) == list(range(plan.counts[request]))
        assert sum(p.tiles for p in pieces) == -(-lengths[request] // 128)
    assert {q_tile for q_tile, _ in seen} == set(range(plan.q_tiles))
    assert sum(plan.loads) == plan.q_tiles * sum(-(-n // 128) for n in lengths)
    assert plan.finish == max(plan.loads)
    assert plan.imbalance == pytest.approx(plan.finish / (sum(plan.loads) / 132))
    assert plan.entries == sum(map(len, plan.clusters))


def test_balanced_ends_no_later_than_equal():
    balanced, equal = (
        picture.make_plan(MIXED, clusters=132, policy=policy) for policy in ("balanced", "equal")
    )
    assert balanced.finish <= equal.finish
    assert balanced.imbalance < 2


@pytest.mark.parametrize("clusters", [1, 2, 17, 132])
@pytest.mark.parametrize("lengths", [MIXED, [0], [100], [5] * 1000], ids=len)
def test_pictures_fit_the_page(clusters, lengths):
    plans = [
        picture.make_plan(lengths, clusters=clusters, policy=policy)
        for policy in ("balanced", "equal")
    ]
    text = picture.beside(*plans)
    assert text.isascii()
    assert text.splitlines()[0].endswith("capital = new piece")
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= picture.ROWS + 3
    assert max(map(len, picture.draw(plans[0], width=60))) <= 60
    assert len(picture.table(plans[0], limit=4).splitlines()) <= 6


def test_picture_of_a_known_plan():
    pieces = [[picture.Piece(0, 0, 0, 4)], [picture.Piece(0, 0, 1, 2), picture.Piece(1, 0, 0, 1)]]
    plan = picture.Plan("balanced", [768, 128], [2, 1], 1, pieces)
    assert plan.loads == [4, 3]
    assert picture.draw(plan, width=14) == [
        "balanced: 3 en",
        "   = 1.14 x me",
        "0 |Aaaaaaaa| 4",
        "1 |AaaaBb..| 3",
    ]


def test_sampled_rows_run_from_the_heaviest_to_the_lightest():
    pieces = [[picture.Piece(0, 0, i, i)] for i in range(40)]
    plan = picture.Plan("balanced", [780 * 128], [40], 1, pieces)
    rows = [line.split(" |")[0].strip() for line in picture.draw(plan, rows=5)[2:]]
    assert rows == ["39", "29", "19", "10", "0"]


def test_plans_of_nothing_are_refused():
    with pytest.raises(ValueError, match="lengths"):
        picture.make_plan([])


# ---------------------------------------------------------------- comparison


def test_check_tells_good_from_bad():
    ref, lse = torch.ones(2, 512), torch.tensor([1.0, -torch.inf])
    ref[1] = 0
    good = demo.check(ref.clone(), lse.clone(), ref.double(), lse.double())
    assert good.within_bounds
    assert good.out_error == good.rule_error == good.lse_error == 0
    near = demo.check(ref * 1.021, lse, ref.double(), lse.double(), ref.double() * 1.0205)
    assert near.within_bounds, "no worse than the rule itself"
    for out, got in [
        (ref * 1.03, lse),
        (ref, lse + torch.tensor([0.01, 0.0])),
        (ref + 1e-6, lse),
        (ref, lse.nan_to_num(neginf=0.0)),
        (ref * torch.nan, lse),
    ]:
        assert not demo.check(out, got, ref.double(), lse.double()).within_bounds


# ---------------------------------------------------------------- commands


def test_info(capsys):
    status, out, err = run(capsys, "info")
    assert (status, err) == (0, "")
    assert f"kbmla: {kbmla.__version__}" in out
    assert "cpu isa: " in out


def test_plan_of_a_grammar_batch(capsys):
    status, out, err = run(capsys, "plan 1q1s128k_31q1s2k --clusters 132")
    assert (status, err) == (0, "")
    assert "131072" in out
    assert "balanced:" in out
    assert "equal:" in out
    assert max(map(len, out.splitlines())) <= 100


def test_plan_of_a_trace(capsys):
    line = "plan --trace azure-code --requests 5 --policy fixed --q 4 --clusters 8"
    status, out, _ = run(capsys, line)
    assert status == 0
    assert "fixed:" in out
    assert "balanced:" not in out
    longest = max(workloads.draw("azure-code", 5, 1))
    assert str(longest) in out


def test_bench(capsys):
    line = "bench 1q2s300_3q2s64 --heads 4 --repeats 2 --page-size 16 --device cpu"
    status, out, err = run(capsys, line)
    assert (status, err) == (0, "")
    assert "4 requests, 492 KV tokens" in out
    assert "KV tokens/s" in out


def test_demo(capsys):
    line = "demo --requests 3 --longest 900 --device cpu --trace mooncake-conversation"
    status, out, err = run(capsys, line)
    assert (status, err) == (0, "")
    for text in ("Mooncake", "cut to 900", "kept", "132 clusters", "balanced:", "equal:"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 110


def test_demo_fails_when_a_bound_breaks(capsys, monkeypatch):
    attention = demo.reference.attention

    def shifted(*args):
        out, lse = attention(*args)
        return out, lse + 0.01

    monkeypatch.setattr(demo.reference, "attention", shifted)
    status, out, _ = run(capsys, "demo --requests 2 --longest 300 --device cpu")
    assert status == 1
    assert "BROKEN" in out
    assert "OUT OF BOUNDS" in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("plan", "--trace"),
        ("plan q1s1k --trace azure-code", "not both"),
        ("plan q1s1k_q2s1k", "same q"),
        ("plan q2s1k --q 4", "--q"),
        ("plan 1x1", "segment"),
        ("plan --trace nosuch", "mooncake-conversation"),
        ("plan q1s1k --heads 129", "heads"),
        ("plan q1s1k --clusters 0", "clusters"),
        ("plan 2000q1s1k", "requests"),
        ("bench q1s1k --page-size 0", "page_size"),
        ("bench q1s1k --repeats 0", "--repeats"),
        ("bench q1s1k --device tpu9", "device"),
        ("demo --requests 0", "requests"),
        ("demo --trace nosuch", "trace"),
    ],
)
def test_errors_are_one_line(capsys, argv, text):
    status, out, err = run(capsys, argv)
    assert (status, out) == (2, "")
    assert err.startswith("kbmla: error: ")
    assert err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize("argv", ["", "nosuch", "plan q1 --heads x", "plan q1 --policy best"])
def test_usage_errors_are_one_line(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["", "info", "demo", "plan", "bench"])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "usage: python -m kbmla" in capsys.readouterr().out


def test_runs_as_a_module():
    command = [sys.executable, "-m", "kbmla", "plan", "q1s0k"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "segment" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_only_on_a_terminal(capsys, monkeypatch):
    with demo.Progress(2) as bar:
        bar.step("quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with demo.Progress(2) as bar:
        bar.step("first")
        bar.step("second")
    err = capsys.readouterr().err
    assert "] first" in err
    assert "############------------] second" in err

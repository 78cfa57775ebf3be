"""bench/moe.py: every implementation it measures computes the same layer, and the report holds what docs/MOE.md needs."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))

import moe as bench  # noqa: E402
import moe_tables  # noqa: E402
from moe_lines import COMPILED, MOVES, SONIC, STOCK, Shape, our_line, random_weights, stock_line  # noqa: E402


def step(line, x, dy):
    """y and the gradients of x, gate, w13 and w2."""
    leaves = [x, *line.parameters]
    for leaf in leaves:
        leaf.grad = None
    y = line.forward(x)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("top_k", [1, 3])
def test_stock_torch_and_the_layer_compute_the_same_function(top_k, move):
    shape = Shape(tokens=50, dim=32, hidden_dim=48, experts=6, top_k=top_k)
    weights = random_weights(shape, "cpu", torch.float32)
    x, dy = torch.randn(50, 32, requires_grad=True), torch.randn(50, 32)
    expected = step(stock_line(shape, weights, move), x, dy)
    actual = step(our_line(shape, weights, "identity"), x, dy)  # products in f32
    # Sums of at most 2 * hidden_dim terms in f32, in another order; with one expert per token the gate has no gradient.
    scale = max(result.norm() for result in expected)
    for result, value in zip(expected, actual):
        assert (result - value).norm() <= 96 * torch.finfo(torch.float32).eps * scale


def rows_with(**seconds):
    return [{"name": name, "seconds": {"median": value}, "sustained_seconds": 2 * value} for name, value in seconds.items()]


def test_the_best_rival_is_the_faster_of_compiled_and_sonic():
    rows = rows_with(**{STOCK: 1.0, COMPILED: 3.0, SONIC: 2.0})
    assert bench.best_rival(rows, "llama4") == {"burst": (2.0, SONIC), "sustained": (4.0, SONIC)}
    assert bench.best_rival(rows[:-1], "llama4") == {"burst": (3.0, COMPILED), "sustained": (6.0, COMPILED)}


def test_sonic_that_is_not_installed_is_taken_as_a_share_of_compiled():
    rows = rows_with(**{STOCK: 1.0, COMPILED: 2.0})
    seconds, name = bench.best_rival(rows, "qwen3")["burst"]
    assert seconds == pytest.approx(0.85 * 2.0) and "taken as" in name
    assert bench.best_rival(rows, "llama4")["burst"] == (2.0, COMPILED)
    assert bench.best_rival(rows, "another shape")["burst"] == (2.0, COMPILED)


def test_growth_with_experts_keeps_the_rows():
    base = bench.NAMED["qwen3"]
    shapes = [shape for _, shape in bench.grown(base, "experts", quick=False)]
    assert [shape.experts for shape in shapes] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {shape.tokens * shape.top_k for shape in shapes} == {base.tokens * base.top_k}


def test_a_quick_run_reports_what_the_tables_need(tmp_path):
    out = tmp_path / "moe.json"
    subprocess.run(
        [sys.executable, BENCH / "moe.py", "--device", "cpu", "--quick", "--kernels", "--out", out],
        check=True,
        capture_output=True,
    )
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [STOCK, "Moxie bf16", moe_tables.OURS, moe_tables.CACHED, moe_tables.LEAN]
    assert {row["name"] for row in report["kernels"]} == set(rows)
    for row in rows.values():
        assert row["difference"] < 0.5  # rounding can send a token to another expert; another function is off by more than 1
        assert not row["ours"] or row["times_as_fast"] == rows[STOCK]["seconds"]["median"] / row["seconds"]["median"]
        row |= {"saved_mib": 1.0, "peak_mib": 2.0}  # made-up values: memory is measured on a GPU only
    for table in (moe_tables.layer_table, moe_tables.memory_table, moe_tables.growth_table):
        lines = [line for line in table(report).splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1 and "256 x 64 x 128 x 4 x 2" in lines[-1]

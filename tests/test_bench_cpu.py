"""`portattn bench` on the host: what is timed, what the record says, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from portattn.bench import cli, contenders, timing
from portattn.bench.cells import Cell, cpu_suite
from portattn.bench.contenders import Inputs, build

SMALL = (
    Cell("prefill", 16, 500, 500, False, 2, 2),
    Cell("prefill", 16, 500, 500, True, 2, 2),
    Cell("decode", 16, 1, 600, False, 4, 2),
    Cell("overhead", 16, 8, 8, False, 1, 1),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "cpu_suite", lambda: SMALL)
    for name in ("SAMPLE_SECONDS", "WARM_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(timing, name, 0.001)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(cli.cli, ["--rounds", "2", *arguments])


def test_the_suite_is_what_the_numbers_are_promised_for() -> None:
    prefill = {(c.head_dim, c.seq_q, c.causal) for c in cpu_suite() if c.kind == "prefill"}
    assert prefill == {(d, n, c) for d in (64, 128, 256) for n in (1024, 4096) for c in (0, 1)}
    assert {c.seq_k for c in cpu_suite() if c.kind == "decode"} == {131_072}


def test_the_record_has_each_peer_where_it_belongs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "bench.json"
    peers = [x for p in ("torch-sdpa", "naive-numpy", "tile-products") for x in ("--peer", p)]
    done = bench(*peers, "-o", str(output))
    assert done.exit_code == 0, done.output
    record = json.loads(output.read_text())
    rows = {row["cell"]: row for row in record["cells"]}
    assert list(rows) == [cell.name for cell in SMALL]
    for cell in SMALL:
        row = rows[cell.name]
        alone = {"torch-sdpa"} if cell.kind != "prefill" else {"naive-numpy", "tile-products"}
        assert set(row["ratio"]) == alone | {"torch-sdpa"}
        assert all(len(x) == 2 and min(x) > 0 for x in row["seconds"].values())
        for peer, value in row["ratio"].items():
            a, b = row["seconds"]["numpy"], row["seconds"][peer]
            assert value == pytest.approx(np.median(np.divide(b, a)), abs=2e-3)
        assert ("tile_products_over_torch_sdpa" in row) == (cell.kind == "prefill")
    summary = record["summary"]
    products = [r["tile_products_over_torch_sdpa"] for r in rows.values() if r["kind"] == "prefill"]
    assert summary["tile-products over torch-sdpa, geometric mean"] == pytest.approx(
        np.prod(products) ** 0.5, rel=0.01
    )
    assert {"prefill over torch-sdpa, lowest cell", "one tiny call, microseconds"} <= set(summary)
    assert "over tile-products" in done.output


@pytest.mark.parametrize("causal", [False, True])
def test_tile_products_visit_the_tiles_of_the_cell(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """Every tile once, and under a causal mask none that no row sees."""
    shapes: list[tuple[int, int]] = []
    real = np.matmul

    def noted(a: Any, b: Any, *, out: Any) -> Any:
        shapes.append(out.shape)
        return real(a, b, out=out)

    cell = Cell("prefill", 16, 800, 1000, causal, 4, 2)
    run = build("tile-products", cell, Inputs.of(cell, 0))
    monkeypatch.setattr(contenders.np, "matmul", noted)
    run()
    scores = [shape for shape in shapes if shape[1] != 16]
    # Rows [0, 512) and [512, 800) of each head see 712 and 1000 keys.
    keys = [384, 384, 232] if not causal else [384, 384]
    want = [(512, n) for n in keys] + [(288, n) for n in (384, 384, 232)]
    assert sorted(scores) == sorted(want * 4)
    assert len(shapes) == 2 * len(scores)


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        contenders.PEERS, "naive-numpy", lambda cell, inputs: lambda: inputs.q + np.float32(1)
    )
    done = bench("--peer", "naive-numpy")
    assert done.exit_code == 1
    assert "naive-numpy and numpy differ by" in done.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--backend", "nobody"), "unknown backend"),
        (("--only", "no such cell"), "no cell has"),
        (("--group", "forward"), "h200"),
        (("--peer", "nobody"), "nobody"),
        (("--rounds", "0"), "rounds"),
    ],
)
def test_wrong_questions_are_usage_errors(arguments: tuple[str, ...], word: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert word in done.output

"""The NumPy backend among threads and processes, its own answers about itself, and its bands.

The rule kept here: what goes wrong in one call leaves nothing behind for the next.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_kit import attend, everything, gradients, same_bits

from portattn.backends.numpy_tiled import BACKEND, config, forward, pool, tile
from portattn.backends.numpy_tiled.masking import Band, key_tiles
from portattn.backends.numpy_tiled.workspace import Workspace
from portattn.machine import Machine
from portattn.problem import Problem


# ---- threads, processes, errors ------------------------------------------------------------------
def blas_threads() -> list[int]:
    from threadpoolctl import threadpool_info

    return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]


def test_eight_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "3")
    limit = blas_threads()
    call = dict(everything(34))["causal"]
    want = attend(**call)
    barrier, got, failures = threading.Barrier(8), {}, []

    def work(n: int) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                got[n] = attend(**call)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert len(got) == 8
    assert all(same_bits(want[0], out) and same_bits(want[1], lse) for out, lse in got.values())
    assert blas_threads() == limit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1, 9000, 64), (3, 1, 5001, 100), (2, 3, 4099, 40)], ids=str)
def test_a_long_product_with_few_results_is_made_in_parts(
    shape: tuple[int, int, int, int], dtype: str
) -> None:
    """NumPy keeps the GIL through one of fewer than 500 results."""
    heads, m, n, dim = shape
    rng = np.random.default_rng(0)
    a = rng.standard_normal((heads, m, n)).astype(dtype)
    b = rng.standard_normal((heads, n, 2 * dim)).astype(dtype)[..., ::2]
    out, ws = np.full((heads, m, dim), np.nan, dtype), Workspace(dtype)
    tile.multiply(a, b, out, ws)
    parts = ws._flat["parts"].reshape(-1, heads, m, dim)
    assert len(parts) * m * dim >= 500
    np.testing.assert_allclose(out, a.astype(float) @ b, rtol=0, atol=4e-4)
    for h in range(heads):  # one head has the same bits alone
        alone = np.empty((1, m, dim), dtype)
        tile.multiply(a[h : h + 1], b[h : h + 1], alone, ws)
        assert same_bits(alone[0], out[h])
    few = Workspace(dtype)
    tile.multiply(a[:, :, :100], b[:, :100], out, few)
    assert "parts" not in few._flat


def test_the_limit_on_blas_is_counted() -> None:
    limit = blas_threads()
    with pool.BLAS:
        assert set(blas_threads()) <= {1}
        with pool.BLAS:
            assert set(blas_threads()) <= {1}
        assert set(blas_threads()) <= {1}
    assert blas_threads() == limit


def test_the_limit_holds_whoever_set_one_before(inputs: Any) -> None:
    """threadpoolctl lets only the thread that was first set a limit: not so for ours."""
    from threadpoolctl import threadpool_limits

    q, k, v = inputs(37, B=1, Sq=600, Hq=4, D=64)
    want, limit, inside = attend(q, k, v), blas_threads(), []

    def elsewhere() -> None:
        with pool.BLAS:
            inside.append(blas_threads())
        inside.append(attend(q, k, v)[0])

    with threadpool_limits(limits=2, user_api="blas"):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert set(blas_threads()) <= {2}
    assert set(inside[0]) <= {1}
    assert same_bits(inside[1], want[0])
    assert blas_threads() == limit


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timer")
def test_control_c(monkeypatch: pytest.MonkeyPatch, inputs: Any) -> None:
    """The call ends with its helpers idle, and the next one works."""
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "3")
    q, k, v = inputs(38, B=1, Sq=4000, Hq=8, D=64)
    small = [x[:, :300] for x in (q, k, v)]
    want, limit = attend(*small), blas_threads()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            for _ in range(100):
                attend(q, k, v)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert blas_threads() == limit
    assert same_bits(attend(*small)[0], want[0])


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_job_ends_the_call(error: type[BaseException], threads: int) -> None:
    done, lock, raised = [], threading.Lock(), threading.Event()

    def job(n: int, _: object) -> None:
        if n == 5:
            raised.set()
            raise error("job 5")
        if n > 5 and not done_before:
            raised.wait(30)
            time.sleep(0.002)  # the failing thread needs a moment to say so
        with lock:
            done.append(n)

    done_before = False
    with pytest.raises(error, match="job 5"):
        pool.run_jobs((lambda w, n=n: job(n, w) for n in range(10_000)), nullcontext, threads)
    assert len(done) < 9_999
    done_before = True
    done.clear()
    pool.run_jobs((lambda w, n=n: job(n + 6, w) for n in range(100)), nullcontext, threads)
    assert sorted(done) == list(range(6, 106))


def test_a_failure_leaves_blas_and_pool_usable(
    monkeypatch: pytest.MonkeyPatch, inputs: Any
) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "2")
    q, k, v = inputs(35, B=1, Sq=900, Hq=4, D=64)
    want, limit = attend(q, k, v), blas_threads()

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(forward._RowTile, "run", broken)
        with pytest.raises(MemoryError, match="no room"):
            attend(q, k, v)
    assert blas_threads() == limit
    assert same_bits(attend(q, k, v)[0], want[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes(fresh: Any) -> None:
    done = fresh(
        "import os, threading, numpy as np, portattn\n"
        "from portattn.backends.numpy_tiled import pool\n"
        "from threadpoolctl import threadpool_info\n"
        "x = np.random.default_rng(0).standard_normal((1, 900, 4, 64), 'f4')\n"
        "want = portattn.attention(x, x, x, backend='numpy')\n"
        "before = [i['num_threads'] for i in threadpool_info() if i['user_api'] == 'blas']\n"
        "inside, leave = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with pool.BLAS:\n"
        "        inside.set(); leave.wait()\n"
        "holder = threading.Thread(target=hold); holder.start(); inside.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    after = [i['num_threads'] for i in threadpool_info() if i['user_api'] == 'blas']\n"
        "    got = portattn.attention(x, x, x, backend='numpy')\n"
        "    os._exit(0 if after == before and got.tobytes() == want.tobytes() else 1)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "leave.set(); holder.join()\n"
        "print('status', status)\n",
        PORTATTN_NUM_THREADS="3",
    )
    assert done.stdout.strip() == "status 0"


def test_a_process_ends(fresh: Any) -> None:
    """With idle helpers, and after a call at exit, when no new thread may start."""
    fresh(
        "import atexit, numpy as np, portattn\n"
        "x = np.ones((1, 900, 4, 64), 'f4')\n"
        "def last():\n"
        "    assert (portattn.attention(x, x, x, backend='numpy') == 1).all()\n"
        "atexit.register(last)\n"
        "portattn.attention(x, x, x, backend='numpy')\n",
        PORTATTN_NUM_THREADS="3",
    )


@pytest.mark.parametrize("text", ["0", "-2", "two", "1.5"])
def test_a_bad_number_of_threads(monkeypatch: pytest.MonkeyPatch, inputs: Any, text: str) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", text)
    with pytest.raises(ValueError, match="PORTATTN_NUM_THREADS"):
        config.thread_count()


def test_floating_point_traps_of_the_caller_stay_out(inputs: Any) -> None:
    q, k, v = inputs(36, B=1, Sq=400, Sk=300, Hq=2)
    with np.errstate(all="raise"):
        out, lse = attend(q, 100 * k, v, causal="bottom_right")
        gradients(q, 100 * k, v, out, causal="bottom_right")
    assert np.isfinite(out).all()
    assert (lse[..., :100] == -np.inf).all()


# ---- the backend's own answers -------------------------------------------------------------------
def test_why_not() -> None:
    here = Machine.here()
    problem = Problem.from_numbers(head_dim=256, dtype="bfloat16", seq_q=1 << 18, causal=True)
    assert BACKEND.why_not(None, here) == ()
    assert BACKEND.why_not(problem, here) == ()
    assert BACKEND.why_not(replace(problem, device="cpu"), here) == ()
    (reason,) = BACKEND.why_not(replace(problem, device="cuda:1"), here)
    assert (reason.code, reason.got) == ("device", "cuda:1")
    fast = Problem.from_numbers(head_dim=64, precision="tf32")
    (reason,) = BACKEND.why_not(fast, here)
    assert (reason.code, reason.got, reason.limit) == ("precision", "tf32", "ieee")
    assert len(BACKEND.why_not(replace(fast, device="cuda:0"), here)) == 2


def test_the_plan_is_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "2")
    plans = [
        BACKEND.plan(Problem.from_numbers(head_dim=64, seq_q=n), Machine.here())
        for n in (1 << 12, 1 << 18)
    ]
    assert plans[0].tile == plans[1].tile == (("block_q", 512), ("block_k", 384))
    assert plans[0].workspace_bytes <= plans[1].workspace_bytes <= 64 << 20
    assert plans[0].config == config.choose(Problem.from_numbers(head_dim=64, seq_q=1 << 12))


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        (256, {"causal": "top_left"}),
        (256, {"window": (64, 64)}),
        (512, {}),  # nothing is hidden
        (512, {"causal": "top_left", "head_dim": 128}),
        (512, {"causal": "top_left", "head_dim_v": 96}),
        (512, {"causal": "top_left", "heads_q": 8, "heads_k": 2}),
        (512, {"causal": "top_left", "seq_q": config.SHORT + 1}),
    ],
    ids=str,
)
def test_short_sequences_have_fewer_rows_a_tile_where_an_edge_cuts(
    rows: int, numbers: dict[str, Any]
) -> None:
    problem = Problem.from_numbers(**{"head_dim": 64, "seq_q": config.SHORT, **numbers})
    plan = BACKEND.plan(problem, Machine.here())
    assert dict(plan.tile)["block_q"] == rows
    assert plan.config.rows_for(64, 1, problem.seq_q) == rows


def test_importing_the_backend_imports_no_numpy(fresh: Any) -> None:
    done = fresh(
        "import sys\n"
        "from portattn.backends.numpy_tiled import BACKEND\n"
        "from portattn.problem import Problem\n"
        "from portattn.machine import Machine\n"
        "p = Problem.from_numbers(head_dim=64)\n"
        "assert BACKEND.why_not(p, Machine.here()) == ()\n"
        "BACKEND.plan(p, Machine.here())\n"
        "print([m for m in ('numpy', 'threadpoolctl', 'ml_dtypes') if m in sys.modules])\n"
        "print(len(BACKEND.kernel_files()))\n"
    )
    assert done.stdout.split("\n")[0] == "[]"
    assert int(done.stdout.split("\n")[1]) >= 8


# ---- bands ---------------------------------------------------------------------------------------
@given(
    st.integers(1, 12), st.integers(0, 12), st.sampled_from([None, "top_left", "bottom_right"]),
    st.none() | st.tuples(*[st.none() | st.integers(0, 30)] * 2), st.data(),
)  # fmt: skip
def test_bands_are_what_they_say(
    rows: int, keys: int, causal: str | None, window: Any, data: st.DataObject
) -> None:
    band = Band.of(rows, keys, causal, window)
    i0 = data.draw(st.integers(0, rows - 1))
    i1 = data.draw(st.integers(i0 + 1, rows))
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    at = i + (0 if causal == "top_left" else keys - rows)
    seen = np.ones((rows, keys), bool)
    left, right = window or (None, None)
    if causal:
        seen &= j <= at
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    part = seen[i0:i1]
    assert np.array_equal(band.counts(i0, i1), part.sum(1))
    assert np.array_equal(~band.hidden(i0, i1, 0, keys), part) or keys == 0
    j0, j1 = band.seen(i0, i1)
    assert not part[:, :j0].any()
    assert not part[:, j1:].any()
    a, b = band.shared(i0, i1)
    assert part[:, a:b].all()
    assert band.covers(i0, i1, 0, keys) == part.all() or keys == 0
    tiles = list(key_tiles(band, i0, i1, 0, keys, 5, 2))
    covered = [n for a, b in tiles for n in range(a, b)]
    assert covered == list(range(j0, j1))
    for a, b in tiles:
        first, last = band.seeing(a, b)
        assert not seen[:first, a:b].any()
        assert not seen[last:, a:b].any()

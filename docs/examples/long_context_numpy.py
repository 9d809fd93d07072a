"""A few query rows against 262,144 keys of head dim 256, in plain NumPy on a laptop.

The whole score matrix of such a context is 2^18 x 2^18 numbers for each head: 128 GiB in two-byte
floats. Attention by tiles needs none of it: what a call takes beyond its inputs and its result is
measured here, and the result is checked against a float64 softmax computed in chunks of keys.

Run: python docs/examples/long_context_numpy.py [--keys 262144] [--rows 4]
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc

import numpy as np

import portattn

HEAD_DIM = 256
HEADS_Q, HEADS_K = 6, 1  # six query heads read one key head


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, chunk: int = 8192) -> np.ndarray:
    """Causal (bottom-right) attention in float64, two passes over the keys in chunks."""
    rows, keys = q.shape[1], k.shape[1]
    queries = q[0].transpose(1, 0, 2).astype(np.float64) / np.sqrt(q.shape[-1])  # (Hq, Sq, D)
    position = np.arange(rows)[:, None] + keys - rows

    def scores(start: int) -> np.ndarray:
        part = k[0, start : start + chunk, 0].astype(np.float64)
        visible = start + np.arange(len(part)) <= position
        return np.where(visible, queries @ part.T, -np.inf)

    maximum = np.max([scores(start).max(-1) for start in range(0, keys, chunk)], axis=0)
    total = np.zeros(maximum.shape)
    out = np.zeros((*maximum.shape, v.shape[-1]))
    for start in range(0, keys, chunk):
        weights = np.exp(scores(start) - maximum[..., None])
        total += weights.sum(-1)
        out += weights @ v[0, start : start + chunk, 0].astype(np.float64)
    return (out / total[..., None]).transpose(1, 0, 2)[None]


def main() -> int:
    """Run, measure, check; 0 if the result is right and the memory small."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=262_144)
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, args.rows, HEADS_Q, HEAD_DIM), dtype=np.float32)
    k, v = (rng.standard_normal((1, args.keys, HEADS_K, HEAD_DIM), np.float32) for _ in range(2))
    decision = portattn.explain(q, k, v, causal="bottom_right")
    print(f"{args.rows} rows, {args.keys:,} keys, head dim {HEAD_DIM}, heads {HEADS_Q}/{HEADS_K}")
    print(f"backend              {decision.chosen}")

    portattn.attention(q, k[:, :512], v[:, :512], causal="bottom_right")  # imports, thread pool
    start = time.perf_counter()
    out = portattn.attention(q, k, v, causal="bottom_right")
    seconds = time.perf_counter() - start
    tracemalloc.start()
    again = portattn.attention(q, k, v, causal="bottom_right")
    workspace = tracemalloc.get_traced_memory()[1] - again.nbytes
    tracemalloc.stop()

    inputs = q.nbytes + k.nbytes + v.nbytes
    error = float(np.abs(out - reference(q, k, v)).max())
    right = error < 1e-5
    small = workspace < inputs / 8
    print(f"inputs               {inputs / 2**20:.0f} MiB")
    print(f"all scores           {args.keys**2 * 2 / 2**30:.0f} GiB a head, never formed")
    print(f"workspace            {workspace / 2**20:.2f} MiB")
    print(
        f"time                 {seconds * 1e3:.0f} ms, {inputs / seconds / 1e9:.1f} GB/s of input"
    )
    print(f"error to float64     {error:.1e} {'(right)' if right else '(WRONG)'}")
    return 0 if right and small else 1


if __name__ == "__main__":
    sys.exit(main())

"""The online softmax, worked through on one row: scores 1, 3 in a first block and 5 in a second.

A softmax of the first block by itself gives the score 3 a weight of 0.881. Its weight in the whole
row is 0.117: a local denominator is wrong as soon as another block arrives. What makes blocks work
is the log-sum-exp beside each partial result, with which `portattn.merge` joins them exactly.

Run: python docs/examples/online_softmax.py
"""

from __future__ import annotations

import math

import numpy as np

import portattn

BLOCKS = ([1.0, 3.0], [5.0])


def block(scores: list[float], first: int, total: int) -> tuple[np.ndarray, float]:
    """Weights and log-sum-exp of one block: with q = 1 and scale = 1 a key is its own score, and
    with one-hot values the output is the row of weights."""
    q = np.ones((1, 1, 1, 1))  # (B, Sq, H, D)
    k = np.array(scores).reshape(1, -1, 1, 1)
    v = np.eye(total)[first : first + len(scores)].reshape(1, len(scores), 1, total)
    out, lse = portattn.attention(q, k, v, scale=1.0, return_lse=True)
    return out, lse


def main() -> None:
    """Print the blocks, their merge and the whole row."""
    total = sum(len(scores) for scores in BLOCKS)
    outs, lses, seen = [], [], 0
    maximum, denominator = -math.inf, 0.0
    print("block      weights in the block      running m   running l")
    for scores in BLOCKS:
        out, lse = block(scores, seen, total)
        outs.append(out)
        lses.append(lse)
        # l is counted from the running maximum: a higher one shrinks what was there before
        higher = max(maximum, *scores)
        denominator *= math.exp(maximum - higher)
        denominator += math.exp(lse.item() - higher)
        maximum = higher
        weights = "  ".join(f"{w:.3f}" for w in out.ravel()[seen : seen + len(scores)])
        print(f"{scores!s:<11}{weights:<26}{maximum:<12.0f}{denominator:.3f}")
        seen += len(scores)

    merged, lse = portattn.merge(outs, lses)
    whole, whole_lse = block([s for scores in BLOCKS for s in scores], 0, total)
    print()
    print(f"local weight of the score 3   {outs[0].ravel()[1]:.3f}")
    print(f"merged weights                {'  '.join(f'{w:.3f}' for w in merged.ravel())}")
    print(f"in one block                  {'  '.join(f'{w:.3f}' for w in whole.ravel())}")
    print(f"l from the merged LSE         {math.exp(lse.item() - maximum):.3f}")
    worst = max(float(np.abs(merged - whole).max()), abs((lse - whole_lse).item()))
    print(f"largest difference            {worst:.1e}")


if __name__ == "__main__":
    main()

"""A spread of small launches of the Triton backend, for compute-sanitizer (BUG-035):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python tests/sanitizer_spread.py

The rule kept here: each shape is as small as it can be and still cross the border that it is there
for; the exit status is not 0 where a number is wrong. `--list` names the cases, and further
arguments choose among them by a part of the name; PORTATTN_TRITON_MECHANISM leaves those out that
are for the other mechanism.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import portattn
from portattn.backends.triton_jit import BACKEND
from portattn.conformance import reference

CASES: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {}


def normal(seed: int, *shape: int, dtype: Any = torch.float16, off: int = 0) -> Any:
    """Normal numbers, ``off`` elements into memory that ends where they end."""
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    room = torch.zeros(math.prod(shape) + off, dtype=dtype, device="cuda")
    view = room[off:].view(shape)
    view.copy_(torch.from_numpy(made))
    return view


def dense(
    name: str, q: int, k: int, *, heads: tuple[int, int] = (2, 1), dim: int = 64, off: int = 0,
    dtype: Any = torch.float16, mechanism: str | None = None, grad: bool = False,
    extra: Callable[[], dict[str, Any]] = dict, **options: Any,
) -> None:  # fmt: skip
    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {
            n: normal(i, 1, s, h, dim, dtype=dtype, off=off)
            for i, (n, s, h) in enumerate(
                (("q", q, heads[0]), ("k", k, heads[1]), ("v", k, heads[1]))
            )
        }
        return arrays | options | extra(), {"mechanism": mechanism, "grad": grad}

    CASES[name] = make


for off in (0, 1):
    at = f" at offset {off}" if off else ""
    dense(f"portable{at}", 70, 70, off=off, causal=True)
    dense(f"portable backward{at}", 70, 70, off=off, mechanism="portable", causal=True, grad=True)
    dense(f"portable, tails{at}", 33, 65, off=off, causal="bottom_right")
    dense(f"decode{at}", 1, 700, heads=(4, 1), off=off)
    dense(f"hopper or what replaces it{at}", 150, 290, off=off, causal="bottom_right")
    dense(
        f"hopper or what replaces it, backward{at}", 150, 290, off=off, causal="top_left", grad=True
    )
dense("float32 at offset 3", 40, 40, dtype=torch.float32, off=3)
dense("an odd head dim", 40, 40, dim=63)
dense("an odd head dim, backward", 40, 40, dim=63, grad=True)
dense("hopper, full", 150, 300, mechanism="hopper")
dense("hopper, full, backward", 150, 300, mechanism="hopper", grad=True)
dense("hopper, one query", 1, 257, mechanism="hopper", causal="bottom_right")
dense("hopper, one query and one key, backward", 1, 1, mechanism="hopper", causal=True, grad=True)
dense("hopper, head dim 80", 140, 270, dim=80, mechanism="hopper", causal="bottom_right")


def features() -> dict[str, Any]:
    return {
        "bias": normal(5, 2, 33, 65, dtype=torch.float32, off=1),
        "mask": normal(6, 65, dtype=torch.float32) > -1,
        "alibi_slopes": normal(7, 2, dtype=torch.float32, off=1).abs(),
        "sinks": normal(8, 2, dtype=torch.float32, off=1),
        "seqused_k": torch.tensor([50], dtype=torch.int32, device="cuda"),
    }


dense("every feature", 33, 65, causal="bottom_right", softcap=2.0, window=(20, 3), extra=features)
dense("every feature, backward", 33, 65, causal="bottom_right", softcap=2.0, window=(20, 3),
      extra=features, grad=True)  # fmt: skip


def packed(grad: bool) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        starts = [
            torch.tensor(n, dtype=torch.int32, device="cuda")
            for n in ([0, 0, 5, 70], [0, 3, 40, 99])
        ]
        arrays = {
            n: normal(i, s, h, 64)
            for i, (n, s, h) in enumerate((("q", 70, 2), ("k", 99, 1), ("v", 99, 1)))
        }
        return arrays | {
            "layout": "thd", "causal": "bottom_right", "cu_seqlens_q": starts[0],
            "cu_seqlens_k": starts[1],
        }, {"mechanism": None, "grad": grad}  # fmt: skip

    return make


def paged(grad: bool, queries: int) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
    """The entries that no key uses name no page at all."""

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        table = torch.full((2, 40), -1, dtype=torch.int32)
        table[0, 0], table[1, :3] = 4, torch.tensor([0, 3, 1], dtype=torch.int32)
        return {
            "q": normal(0, 2, queries, 4, 64), "k": normal(1, 5, 16, 2, 64),
            "v": normal(2, 5, 16, 2, 64), "block_table": table.cuda(),
            "seqused_k": torch.tensor([9, 41], dtype=torch.int32, device="cuda"),
            "causal": "bottom_right",
        }, {"mechanism": None, "grad": grad}  # fmt: skip

    return make


CASES["packed"], CASES["packed backward"] = packed(False), packed(True)
CASES["paged decode"], CASES["paged backward"] = paged(False, 1), paged(True, 7)


def host(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return (x.float() if x.is_floating_point() else x).cpu().numpy()


def worst(got: Any, want: np.ndarray) -> float:
    """The largest error over the largest value (at least 1); inf where a number is none."""
    given = host(got).astype(np.float64)
    special = ~np.isfinite(want)
    if not np.array_equal(given[special], want[special]) or not np.isfinite(given[~special]).all():
        return math.inf
    size = max(1.0, float(np.abs(want[~special]).max(initial=0)))
    return float(np.abs(given - want)[~special].max(initial=0)) / size


def check(call: dict[str, Any], how: dict[str, Any]) -> float:
    """Run a case: its largest error."""
    BACKEND.force_mechanism(how["mechanism"])
    arrays = [call.pop(n) for n in "qkv"]
    out, lse = portattn.attention(*arrays, return_lse=True, backend="triton", **call)
    torch.cuda.synchronize()
    asked = {n: host(x) for n, x in call.items()}
    turned = asked.pop("layout", "bshd") == "bshd"

    def heads_second(x: Any, is_keys: bool = False) -> Any:
        return x if not turned or (is_keys and "block_table" in asked) else x.swapaxes(1, 2)

    numbers = [heads_second(host(x), i > 0) for i, x in enumerate(arrays)]
    problem = reference.Attention(*numbers, **asked)
    want, want_lse = reference.forward(problem)
    found = [worst(out, heads_second(want)), worst(lse, want_lse)]
    if how["grad"]:
        dout = normal(9, *out.shape, dtype=out.dtype)
        grads = portattn.attention_backward(*arrays, out, lse, dout, backend="triton", **call)
        torch.cuda.synchronize()
        exact = reference.backward(problem, heads_second(host(dout)))
        for part in ("dq", "dk", "dv", "dbias", "dsinks"):
            got = getattr(grads, part)
            if got is not None:
                right = exact[part]
                if part in ("dq", "dk", "dv"):
                    right = heads_second(right, part != "dq")
                found.append(worst(got, right) / 2)
    return max(found)


def main(chosen: list[str]) -> int:
    names = [n for n in CASES if not chosen or any(part in n for part in chosen)]
    if "--list" in chosen:
        print("\n".join(CASES))
        return 0
    held = os.environ.get("PORTATTN_TRITON_MECHANISM")
    made = {n: CASES[n]() for n in names}
    names = [n for n in names if not held or made[n][1]["mechanism"] in (None, held)]
    wrong = 0
    for name in names:
        error = check(*made[name])
        bad = not error <= 4e-3
        wrong += bad
        print(f"{name}: {error:.1e}{' WRONG' if bad else ''}", flush=True)
    BACKEND.force_mechanism(None)
    print(f"{wrong} of {len(names)} are wrong" if wrong else f"{len(names)} cases, all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

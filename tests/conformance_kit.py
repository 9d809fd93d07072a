"""A catalogue of one check, and targets that are wrong in one way each, for the engine's tests.

A target here behaves until a call comes with ``scale=TRIGGER``: the cases before and behind that
one show that the fault cost nothing but itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from portattn.conformance.case import Case, Outcome, check, collect
from portattn.conformance.context import Context
from portattn.conformance.manifest import Manifest
from portattn.conformance.targets.naive import Naive

TRIGGER = 0.125


# ---- the catalogue -------------------------------------------------------------------------------
def _cases(manifest: Manifest, tier: str) -> Iterator[Case]:
    for name, scale in (("before", 0.5), ("trigger", TRIGGER), ("after", 0.5)):
        yield Case("F01", name, {"scale": scale, "seq": 9, "dtype": "float32"})


def _inputs(case: Case, dtype: str = "float32") -> list[np.ndarray[Any, np.dtype[Any]]]:
    rng = np.random.default_rng(case.seed)
    shape = (1, 2, case.params.get("seq", 9), 8)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


@check("F01", "plain attention", level=0, cases=_cases)
def plain(ctx: Context, case: Case) -> Outcome:
    q, k, v = _inputs(case)
    out, _, _ = ctx.forward(q, k, v, scale=case.params["scale"])
    s = case.params["scale"] * (q.astype(float) @ np.swapaxes(k.astype(float), -1, -2))
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v
    error = np.abs(out - want)
    worst = np.unravel_index(error.argmax(), error.shape)
    return Outcome(
        {"e1_det": error.max() / 1e-5, "max_error": error.max()},
        worst={"index": worst, "got": out[worst], "want": want[worst], "bound": 1e-5},
    )


def _softcap_cases(manifest: Manifest, tier: str) -> Iterator[Case]:
    yield Case("K01", "softcap")


@check("K01", "softcap", level=1, cases=_softcap_cases, tiers=("cpu", "gpu"))
def softcap(ctx: Context, case: Case) -> Outcome:
    q, k, v = _inputs(case)
    ctx.forward(q, k, v, softcap=5.0)
    return Outcome({"wrong_bad": 0})


def _slow_cases(manifest: Manifest, tier: str) -> Iterator[Case]:
    for n in range(40):
        yield Case("M01", f"slow-{n:02d}")


@check("M01", "slow", level=2, cases=_slow_cases, tiers=("gpu",))
def slow(ctx: Context, case: Case) -> Outcome:
    ctx.forward(*_inputs(case), scale=0.5)
    time.sleep(0.1)
    return Outcome()


def _broken_cases(manifest: Manifest, tier: str) -> Iterator[Case]:
    yield Case("E01", "broken")


@check("E01", "the check itself is wrong", level=None, cases=_broken_cases, tiers=("gpu",))
def broken(ctx: Context, case: Case) -> Outcome:
    raise KeyError("nothing of the target's")


CATALOGUE = collect(sys.modules[__name__])


# ---- targets -------------------------------------------------------------------------------------
class Good(Naive):
    """Right, and claims little: no softcap."""

    def manifest(self) -> dict[str, Any]:
        return {
            "name": "good",
            "version": "1",
            "array": "numpy",
            "device": "cpu",
            "dtypes": ["float32"],
            "max_head_dim": 64,
            "features": ["scale", "return_lse"],
        }

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        if options.get("softcap"):
            raise NotImplementedError("no softcap")
        if options.get("scale") == TRIGGER:
            return self.trigger(q, k, v, options)
        return super().forward(q, k, v, **options)

    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        return super().forward(q, k, v, **options)


class TwoDtypes(Good):
    """Right in float32 and float16."""

    def manifest(self) -> dict[str, Any]:
        return {**super().manifest(), "name": "two", "dtypes": ["float16", "float32"]}


class WrongValue(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        out, lse = super().trigger(q, k, v, options)
        out[0, 1, 3, 2] += 0.1
        return out, lse


class WritesInputs(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        result = super().trigger(q, k, v, options)
        k[0, 0, 0, 0] = 7
        return result


class WrongShape(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        out, lse = super().trigger(q, k, v, options)
        return out[:, :, 1:], lse


class WrongDtype(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        out, lse = super().trigger(q, k, v, options)
        return out.astype("float64"), lse


class WrongType(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        return "surprise", None


class NotAPair(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        return super().trigger(q, k, v, options)[0]


class MissingLse(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        return super().trigger(q, k, v, options)[0], None


class Raises(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        raise RuntimeError("the kernel did not launch")


class Refuses(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        raise NotImplementedError("not this scale")


class Exits(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        sys.exit("enough")


class ExitsHard(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        print("last words", flush=True)
        os._exit(3)


class Segfaults(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        ctypes.string_at(0)


class Killed(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(60)


class Prints(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        for fd in (1, 2):
            for _ in range(64):
                os.write(fd, b'{"outcome": \x00\xff garbage}\n' * 4096)
        return super().trigger(q, k, v, options)


class ClosesStdout(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        os.close(1)
        os.close(2)
        return super().trigger(q, k, v, options)


class ClosesEverything(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        os.closerange(0, 256)
        return super().trigger(q, k, v, options)


class Forks(Good):
    """Both processes return from the call."""

    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        os.fork()
        return super().trigger(q, k, v, options)


class ForksAndDies(Good):
    """The copy lives on and holds the pipes open; the original is gone."""

    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        if os.fork() == 0:
            time.sleep(60)
        os._exit(5)


class Reuses(Good):
    """Hands out one buffer again and again, so that an earlier output changes."""

    _buffer: Any = None

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, lse = super().forward(q, k, v, **options)
        if self._buffer is None:
            self._buffer = np.empty_like(out)
        self._buffer[...] = out
        return self._buffer, lse


class TooLarge(Good):
    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        np.empty((1 << 40,), np.float64)
        return super().trigger(q, k, v, options)


class Grows(Good):
    """Takes real memory until it is stopped."""

    def trigger(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        kept = []
        while True:
            kept.append(np.ones(1 << 24))


class ClaimsTooLittle(Good):
    """Takes softcap and does it right, and does not say so."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return Naive.forward(self, q, k, v, **options)


class RaisesOutside(Good):
    """Does not claim softcap, and fails on it instead of refusing."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        if options.get("softcap"):
            raise RuntimeError("internal error 17")
        return super().forward(q, k, v, **options)


class Simulated(Good):
    simulated = True


class UnknownKey(Good):
    def manifest(self) -> dict[str, Any]:
        return {**super().manifest(), "max_headdim": 64, "dtypes": ["float8"]}


class NotADict(Good):
    def manifest(self) -> Any:
        return ["name"]


class ManifestRaises(Good):
    def manifest(self) -> Any:
        raise RuntimeError("no idea")


class ManifestExits(Good):
    def manifest(self) -> Any:
        os._exit(9)


class NoForward:
    def manifest(self) -> Any:
        return {}

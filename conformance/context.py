"""What a check holds in its hands: the target, its manifest, and calls that are watched.

The rule kept here: every call a check makes through the `Context` is held to the protocol. The
request is compared with the manifest, what comes back is checked for type, shape, dtype and
device, inputs must come back unwritten, and earlier outputs are looked at again after each call.

Checks speak one layout, whatever the target's: q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk,
Dv); with ``cu_seqlens_q`` packed (T, H, D); with ``block_table`` k and v are (num_blocks,
block_size, Hk, D). Arrays are NumPy of the dtype under test (bfloat16: ml_dtypes).
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from portattn.conformance import meters, placement
from portattn.conformance.case import Case, Outcome
from portattn.conformance.manifest import Manifest
from portattn.conformance.placement import NDArray

REFUSALS = (NotImplementedError, ValueError, TypeError)
"""What a target raises for a request that it does not take (`portattn.Unsupported` is one)."""

ARRAY_OPTIONS = (
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "block_table",
    "dlse",
)
OUT_OF_MEMORY = ("outofmemory", "out of memory", "can't allocate memory", "resource_exhausted")
DEVICE_LOST = (  # errors after which a CUDA context answers nothing any more
    "illegal memory access", "illegal address", "illegal instruction", "misaligned address",
    "unspecified launch failure", "launch_failed", "device-side assert", "launch timed out",
    "uncorrectable ecc", "hardware stack error", "launch timeout",
)  # fmt: skip
_PLAIN_FEATURES = (  # options that are features by their own names
    "scale", "causal", "window", "softcap", "bias", "mask", "alibi_slopes", "sinks", "return_lse",
    "deterministic",
)  # fmt: skip
KEPT = 8  # earlier outputs that are looked at again
KEPT_BYTES = 4 << 20  # larger ones are let go: watching must not become the workload


class Decided(Exception):
    """Ends a case with a cause of `verdicts.CAUSES`; the engine makes its outcome of it."""

    def __init__(self, cause: str, message: str):
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Raw:
    """What the target itself returned, and what the call cost.

    ``values`` is ``out`` in its own dtype and the checks' layout, for bitwise comparison;
    ``lse_values`` likewise. ``memory`` is there with ``measure=True``.
    """

    out: Any
    lse: Any
    values: NDArray
    lse_values: NDArray | None
    memory: meters.Memory | None
    seconds: float


class Result(NamedTuple):
    """``out`` (B, Hq, Sq, Dv) or packed (T, Hq, Dv), ``lse`` (B, Hq, Sq) or packed (Hq, T), both
    float64; ``lse`` None where the target does not give it."""

    out: NDArray
    lse: NDArray | None
    raw: Raw


class Gradients(NamedTuple):
    """float64, each in the checks' layout of the input it belongs to; ``values`` by name in their
    own dtypes, for bitwise comparison."""

    dq: NDArray
    dk: NDArray
    dv: NDArray
    dbias: NDArray | None
    dsinks: NDArray | None
    values: Mapping[str, NDArray]
    memory: meters.Memory | None


class Attempt(NamedTuple):
    """What came of a call that was allowed to fail: ``result`` or ``error``."""

    result: Any
    error: Exception | None

    @property
    def refused(self) -> bool:
        """Raised one of the errors that stand for "I do not take this"."""
        return isinstance(self.error, REFUSALS)


class Context:
    """One target in one child process; made once, used for all of the child's cases."""

    def __init__(self, target: Any, manifest: Manifest, spec: str = "", catalogue: str = ""):
        self.target = target
        self.manifest = manifest
        self._spec = spec
        self._catalogue = catalogue
        self.kind = placement.kind_of(manifest.array, manifest.device)
        self._meter = meters.meter_for(target, manifest)
        self._kept: deque[tuple[str, Any, bytes]] = deque(maxlen=KEPT)
        self.begin("")

    # ---- for the worker ------------------------------------------------------------------------
    def begin(self, case_id: str) -> None:
        """Start a case: forget the last one's request and digests, keep its outputs."""
        self.case_id = case_id
        self.outside: list[str] = []
        self._inputs = hashlib.sha256()
        self._outputs = hashlib.sha256()
        self._calls = 0

    @property
    def digests(self) -> dict[str, str]:
        """sha256 over the inputs and the outputs of this case's calls, in their order."""
        if not self._calls:
            return {}
        return {"inputs": self._inputs.hexdigest(), "output": self._outputs.hexdigest()}

    # ---- calls ---------------------------------------------------------------------------------
    def forward(
        self,
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        views: str | Mapping[str, str] = "contiguous",
        return_lse: bool | None = None,
        out: bool = False,
        measure: bool = False,
        headroom: int | None = None,
        **options: Any,
    ) -> Result:
        """Call the target's ``forward`` and check what came back.

        ``options`` are the contract's keywords with NumPy arrays; None and defaults are dropped.
        ``views``: how all of q, k, v lie in memory, or a mapping from argument names (bias and
        mask too) to `placement.VIEWS`. ``return_lse`` None: asked for where the target claims it.
        ``out=True`` hands in an array filled with NaN. ``measure=True`` fills ``raw.memory``.
        ``headroom``: most bytes that the call may allocate (a hard limit; beyond it: OOM).

        Raises `Decided`, which a check lets pass.
        """
        options = _given(options)
        if return_lse is None:
            return_lse = self.manifest.claims("return_lse")
        if return_lse:
            options["return_lse"] = True
        views = self._views(views)
        outside = self.outside_of(q, k, v, options, views=views, out=out)
        arrays = self._arrays(q, k, v, options, views)
        shape = (*q.shape[:-1], v.shape[-1])
        if out:
            arrays["out"] = self._to_target(
                np.full(shape, np.nan, q.dtype), "contiguous", "cu_seqlens_q" not in options
            )
        call = self._call(self.target.forward, arrays, options)
        returned, memory, seconds = self._run(call, outside, measure, headroom)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise Decided(
                "wrong_type", f"forward returned {_what(returned)}; wanted: a pair (out, lse)"
            )
        raw_out, raw_lse = returned
        packed = "cu_seqlens_q" in options
        values = self._from_target("out", raw_out, shape, str(q.dtype), swap=not packed)
        if out and raw_out is not arrays["out"]:
            raise Decided("out_ignored", "forward was given out= and returned another object")
        lse_values = None
        if return_lse:
            if raw_lse is None:
                raise Decided("missing_lse", "forward returned lse None although asked for it")
            wide = "float64" if str(q.dtype) == "float64" else "float32"
            lse_shape = (shape[1], shape[0]) if packed else shape[:3]
            lse_values = self._from_target("lse", raw_lse, lse_shape, wide, swap=False)
        self._after({"q": q, "k": k, "v": v, **options}, arrays)
        memory = _without(memory, 0 if out else values.nbytes, lse_values)
        self._keep(raw_out, values)
        self._outputs.update(np.ascontiguousarray(values).tobytes())
        if lse_values is not None:
            self._outputs.update(np.ascontiguousarray(lse_values).tobytes())
        raw = Raw(raw_out, raw_lse, values, lse_values, memory, seconds)
        lse64 = None if lse_values is None else lse_values.astype(np.float64)
        return Result(values.astype(np.float64), lse64, raw)

    def backward(
        self,
        q: NDArray,
        k: NDArray,
        v: NDArray,
        out: NDArray,
        lse: NDArray | None,
        dout: NDArray,
        *,
        views: str | Mapping[str, str] = "contiguous",
        measure: bool = False,
        headroom: int | None = None,
        **options: Any,
    ) -> Gradients:
        """Call the target's ``backward`` and check what came back.

        ``out`` and ``lse`` as `forward` gave them (float64 is cast back, which is exact), ``dout``
        of q's dtype. ``dbias`` and ``dsinks`` are demanded where the target claims them and None
        otherwise. The rest as in `forward`.
        """
        options = _given(options)
        views = self._views(views)
        outside = self.outside_of(q, k, v, options, views=views, backward=True)
        if not hasattr(self.target, "backward"):
            if self.manifest.claims("backward"):
                raise Decided("claimed_but_refused", "claims 'backward' and has no method backward")
            raise Decided("rejected", "; ".join(outside))
        arrays = self._arrays(q, k, v, options, views)
        packed = "cu_seqlens_q" in options
        arrays["out"] = self._to_target(out.astype(q.dtype), "contiguous", not packed)
        arrays["dout"] = self._to_target(dout, views.get("dout", "contiguous"), not packed)
        wide = np.float64 if q.dtype == np.float64 else np.float32
        arrays["lse"] = (
            None if lse is None else self.kind.make(placement.lay(lse.astype(wide), "contiguous"))
        )
        call = self._call(self.target.backward, arrays, options, ("out", "lse", "dout"))
        returned, memory, _ = self._run(call, outside, measure, headroom)
        if isinstance(returned, tuple) and len(returned) == 3:
            returned = dict(zip(("dq", "dk", "dv"), returned, strict=True))
        if not isinstance(returned, Mapping) or not {"dq", "dk", "dv"} <= set(returned):
            raise Decided(
                "wrong_type",
                f"backward returned {_what(returned)}; wanted: (dq, dk, dv) or a mapping of them",
            )
        paged = "block_table" in options
        wanted = {"dq": (q, not packed), "dk": (k, not packed and not paged)}
        wanted["dv"] = (v, not packed and not paged)
        for name, source, feature in (
            ("dbias", "bias", "backward_bias"),
            ("dsinks", "sinks", "backward_sinks"),
        ):
            if source in options and self.manifest.claims(feature):
                wanted[name] = (options[source], False)
        values = {}
        for name, (source_array, swap) in wanted.items():
            if returned.get(name) is None:
                raise Decided("wrong_type", f"backward returned no {name} although it claims it")
            values[name] = self._from_target(
                name, returned[name], source_array.shape, str(source_array.dtype), swap=swap
            )
            self._outputs.update(np.ascontiguousarray(values[name]).tobytes())
        self._after({"q": q, "k": k, "v": v, "dout": dout, **options}, arrays)
        memory = _without(memory, sum(x.nbytes for x in values.values()), None)
        for name in wanted:
            self._keep(returned[name], values[name])
        wide_values = {name: x.astype(np.float64) for name, x in values.items()}
        return Gradients(
            wide_values["dq"],
            wide_values["dk"],
            wide_values["dv"],
            wide_values.get("dbias"),
            wide_values.get("dsinks"),
            values,
            memory,
        )

    def attempt(self, q: Any, k: Any, v: Any, **options: Any) -> Attempt:
        """Call ``forward`` with arguments that may be wrong, without holding it to the manifest.

        NumPy arrays are placed as they are (in the target's layout where they have four axes);
        other values are handed through. The next well-formed call shows whether it did harm.
        """
        given = {
            name: self._to_target(x, "contiguous", x.ndim == 4 and name in "qkv")
            if isinstance(x, np.ndarray)
            else x
            for name, x in {"q": q, "k": k, "v": v, **options}.items()
        }
        first = [given.pop(name) for name in ("q", "k", "v")]
        try:
            result = self.target.forward(*first, **given)
            self.kind.synchronize()
        except Exception as error:  # noqa: BLE001  the verdict on it is the check's
            return Attempt(None, error)
        return Attempt(result, None)

    @property
    def meter(self) -> meters.Meter:
        """The memory meter that fits the target; `forward(measure=True)` is the usual way."""
        return self._meter

    def traffic(self) -> tuple[int, int] | None:
        """Bytes (loaded, stored) since the last call of it, where the target counts; else None."""
        count = getattr(self.target, "traffic", None)
        if count is None:
            return None
        loaded, stored = count()
        return int(loaded), int(stored)

    def fresh_process(self, case: Case, timeout_s: float = 60.0) -> Outcome:
        """Run ``case`` in a new child process with the same target; mark it in ``params`` so that
        the check does not ask for a process again."""
        from portattn.conformance import isolate

        return isolate.run_alone(self._spec, case, timeout_s, catalogue=self._catalogue)

    @contextmanager
    def limited(self, headroom: int) -> Iterator[None]:
        """No more than ``headroom`` bytes beyond what is in use may be allocated inside."""
        with meters.limit(self.manifest, headroom):
            yield

    # ---- what the request is -------------------------------------------------------------------
    def outside_of(
        self,
        q: NDArray,
        k: NDArray,
        v: NDArray,
        options: Mapping[str, Any],
        *,
        views: Mapping[str, str] | None = None,
        out: bool = False,
        backward: bool = False,
    ) -> tuple[str, ...]:
        """Every way in which this request lies outside the manifest."""
        features = [name for name in _PLAIN_FEATURES if name in options]
        packed, paged = "cu_seqlens_q" in options, "block_table" in options
        heads_q = q.shape[1]
        heads_k = k.shape[1] if packed and not paged else k.shape[2 if paged else 1]
        for name, used in (
            ("seqused_k", "seqused_k" in options and not paged),
            ("packed", packed),
            ("paged", paged),
            ("gqa", heads_q != heads_k),
            ("value_head_dim", q.shape[-1] != v.shape[-1]),
            ("out", out),
            ("strides", any(view != "contiguous" for view in (views or {}).values())),
            ("backward", backward),
        ):
            if used:
                features.append(name)
        return self.manifest.why_not(
            dtype=str(q.dtype),
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            features=features,
            alignment=self._alignment(q, k, options),
            sizes=None if packed or paged else (q.shape[0], q.shape[2], k.shape[2]),
        )

    def _alignment(self, q: NDArray, k: NDArray, options: Mapping[str, Any]) -> str | None:
        """The diagonal that the request depends on; None where all alignments agree."""
        causal = options.get("causal")
        if causal is None and "window" not in options:
            return None
        ragged = {"cu_seqlens_q", "block_table", "seqused_k"} & set(options)
        if not ragged and q.shape[2] == k.shape[2]:
            return None
        return causal if isinstance(causal, str) else "bottom_right"

    # ---- the parts of a call -------------------------------------------------------------------
    def _views(self, views: str | Mapping[str, str]) -> dict[str, str]:
        if isinstance(views, str):
            return {} if views == "contiguous" else dict.fromkeys(("q", "k", "v"), views)
        return {name: view for name, view in views.items() if view != "contiguous"}

    def _arrays(
        self,
        q: NDArray,
        k: NDArray,
        v: NDArray,
        options: Mapping[str, Any],
        views: Mapping[str, str],
    ) -> dict[str, Any]:
        for name in ("q", "k", "v", *ARRAY_OPTIONS):
            array = {"q": q, "k": k, "v": v}.get(name, options.get(name))
            if array is not None:
                self._inputs.update(np.ascontiguousarray(array).tobytes())
        self._inputs.update(repr(_plain_options(options)).encode())
        packed, paged = "cu_seqlens_q" in options, "block_table" in options
        arrays: dict[str, Any] = {}
        if "fused" in views.values():
            layout = "thd" if packed else self.manifest.layout
            parts = (q, k, v) if packed else (self._swap(q), self._swap(k), self._swap(v))
            fused = placement.lay_fused(*parts, layout=layout)
            for name, laid in zip("qkv", fused, strict=True):
                arrays[name] = self.kind.make(laid)
        else:
            for name, x in (("q", q), ("k", k), ("v", v)):
                swap = not packed and not (paged and name != "q")
                arrays[name] = self._to_target(x, views.get(name, "contiguous"), swap)
        for name in ARRAY_OPTIONS:
            if name in options:
                x = np.asarray(options[name])
                view = views.get(name, "contiguous")
                arrays[name] = self.kind.make(placement.lay(x, view))
        return arrays

    def _call(
        self,
        method: Any,
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        positional: tuple[str, ...] = (),
    ) -> Callable[[], Any]:
        given = {name: arrays.get(name, value) for name, value in options.items()}
        if "cu_seqlens_q" in options:
            given["layout"] = "thd"
        if not positional and "out" in arrays:
            given["out"] = arrays["out"]
        first = [arrays[name] for name in ("q", "k", "v", *positional)]
        return lambda: method(*first, **given)

    def _run(
        self,
        call: Callable[[], Any],
        outside: tuple[str, ...],
        measure: bool,
        headroom: int | None,
    ) -> tuple[Any, meters.Memory | None, float]:
        """Call the target under the instruments; every way to fail becomes a `Decided`."""
        self._calls += 1
        self.kind.synchronize()
        watched: meters.Watched | None = None
        beyond = "; ".join(outside)
        with ExitStack() as stack:
            if headroom is not None:
                stack.enter_context(self.limited(headroom))
            if measure:
                watched = stack.enter_context(self._meter.watch())
            started = time.perf_counter()
            try:
                returned = call()
                self.kind.synchronize()
            except REFUSALS as error:
                text = _said(error)
                if outside:
                    raise Decided("rejected", f"{beyond}; refused with {text}") from error
                raise Decided("claimed_but_refused", f"claimed, but refused with {text}") from error
            except Exception as error:
                cause = cause_of(error)
                text = f"{_said(error)}" + (f"; outside its manifest: {beyond}" if outside else "")
                raise Decided(cause, text) from error
            except BaseException as error:  # SystemExit, KeyboardInterrupt and their like
                raise Decided("exited", f"raised {_said(error)}") from error
            seconds = time.perf_counter() - started
        self.outside += [reason for reason in outside if reason not in self.outside]
        return returned, watched.memory if watched else None, seconds

    def _swap(self, x: NDArray) -> NDArray:
        return np.swapaxes(x, 1, 2) if self.manifest.layout == "bshd" and x.ndim == 4 else x

    def _to_target(self, x: NDArray, view: str, swap: bool) -> Any:
        return self.kind.make(placement.lay(self._swap(x) if swap else x, view))

    def _from_target(
        self, name: str, value: Any, shape: tuple[int, ...], dtype: str, *, swap: bool
    ) -> NDArray:
        """The NumPy values of something the target returned, once it is what it must be."""
        if not self.kind.owns(value):
            raise Decided(
                "wrong_type",
                f"{name} is {_what(value)}; wanted: a {self.manifest.array} array",
            )
        got = self.kind.dtype(value)
        if got != dtype:
            raise Decided("wrong_dtype", f"{name} is {got}; wanted: {dtype}")
        if self.kind.device(value) != self.manifest.device:
            raise Decided(
                "wrong_device",
                f"{name} is on {self.kind.device(value)}; wanted: {self.manifest.device}",
            )
        swap = swap and self.manifest.layout == "bshd" and len(shape) == 4
        wanted = (shape[0], shape[2], shape[1], shape[3]) if swap else tuple(shape)
        if tuple(value.shape) != wanted:
            raise Decided("wrong_shape", f"{name} is {tuple(value.shape)}; wanted: {wanted}")
        values = self.kind.values(value)
        return np.swapaxes(values, 1, 2) if swap else values

    def _after(self, given: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Inputs still as they were; earlier outputs too."""
        packed, paged = "cu_seqlens_q" in given, "block_table" in given
        swapped = () if packed else ("q", "dout") if paged else ("q", "k", "v", "dout")
        for name, array in arrays.items():
            source = given.get(name)
            if not isinstance(source, np.ndarray):
                continue
            now = self.kind.values(array)
            if not placement.same_bits(now, self._swap(source) if name in swapped else source):
                raise Decided("wrote_inputs", f"the call changed its input {name}")
        for case_id, array, digest in self._kept:
            if _digest(self.kind.values(array)) != digest:
                self._kept.clear()
                raise Decided(
                    "stale_output", f"the call changed an output that {case_id} had returned"
                )

    def _keep(self, array: Any, values: NDArray) -> None:
        if values.nbytes <= KEPT_BYTES:
            self._kept.append((self.case_id, array, _digest(self.kind.values(array))))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Only what differs from the contract's defaults."""
    unknown = [name for name in options if name not in _KNOWN]
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
    return {
        name: value for name, value in options.items() if value is not None and value is not False
    }


_KNOWN = frozenset(
    (*ARRAY_OPTIONS, "scale", "causal", "window", "softcap", "deterministic", "precision")
)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in sorted(options.items()) if k not in ARRAY_OPTIONS}


def _said(error: BaseException) -> str:
    """The error's class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def cause_of(error: Exception) -> str:
    """Out of memory and a lost device go by many names; anything else has simply raised."""
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY):
        return "oom"
    return "device_lost" if any(sign in text for sign in DEVICE_LOST) else "raised"


def _digest(values: NDArray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).digest()


def _what(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"{type(value).__module__}.{type(value).__name__}"


def _without(
    memory: meters.Memory | None, out_bytes: int, lse: NDArray | None
) -> meters.Memory | None:
    if memory is None:
        return None
    return memory.beyond(out_bytes + (0 if lse is None else lse.nbytes))

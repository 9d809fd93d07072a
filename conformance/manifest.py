"""What a target declares: parsed once, defaults filled in, nonsense refused by name.

The rule kept here: a target is judged on its claims, so a claim must be readable without doubt.
An unknown key, an unknown feature or a wrong type is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

ARRAYS = ("numpy", "torch", "cupy")
DEVICES = ("cpu", "cuda")
DTYPES = ("float16", "bfloat16", "float32", "float64")
FEATURES = (
    "scale",
    "causal",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "seqused_k",
    "gqa",
    "value_head_dim",
    "return_lse",
    "out",
    "deterministic",
    "batch_invariant",
    "strides",
    "packed",
    "paged",
    "backward",
    "backward_bias",
    "backward_sinks",
)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "acc": ("fp32", "fp32-rz", "fp64"),
    "p_storage": ("input", "fp32"),
    "qk_operand": ("input", "tf32"),
    "empty_rows": ("zero", "mean", "nan"),
    "layout": ("bhsd", "bshd"),
}
ALIGNMENTS = ("top_left", "bottom_right")
REQUIRED = ("name", "version", "array", "device", "dtypes", "features")
OPTIONAL = (
    "head_dims",
    "max_head_dim",
    "acc",
    "p_storage",
    "qk_operand",
    "tile",
    "kappa",
    "kappa_backward",
    "causal_alignments",
    "empty_rows",
    "layout",
    "min_sizes",
    "unasked_dtypes",
)


class ManifestError(ValueError):
    """The manifest cannot be used; ``problems`` holds every complaint, the message all of them."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("the target's manifest cannot be used: " + "; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A validated manifest with its defaults filled in; the fields are CONFORMANCE's own names.

    ``kappa`` and ``kappa_backward`` bound workspace over IO. A target that stores the scores says
    null, which is infinite here: it makes no claim on memory, so what asks for one is
    NOT_SUPPORTED. ``causal_alignments`` may be empty: causal is then claimed for equal lengths
    alone. ``min_sizes`` are the smallest batch and the fewest query rows and keys that it
    takes. ``unasked_dtypes`` are
    those that it claims and that the run leaves out (`narrowed`).
    """

    name: str
    version: str
    array: str
    device: str
    dtypes: tuple[str, ...]
    features: frozenset[str]
    head_dims: tuple[int, ...] | None = None
    max_head_dim: int | None = None
    acc: str = "fp32"
    p_storage: str = "input"
    qk_operand: str = "input"
    tile: tuple[int, int] | None = None
    kappa: float = 0.25
    kappa_backward: float = 1.0
    causal_alignments: tuple[str, ...] = ALIGNMENTS
    empty_rows: str = "zero"
    layout: str = "bhsd"
    min_sizes: tuple[int, int, int] = (0, 0, 0)
    unasked_dtypes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, data: Any) -> Manifest:
        """Validate what ``manifest()`` returned. Raises `ManifestError` with every complaint."""
        if not isinstance(data, Mapping):
            raise ManifestError([f"manifest() returned {type(data).__name__}; wanted: a dict"])
        bad: list[str] = []
        known = REQUIRED + OPTIONAL
        bad += [
            f"unknown key {key!r} (known: {', '.join(known)})" for key in data if key not in known
        ]
        bad += [f"{key} is missing" for key in REQUIRED if key not in data]
        for key in ("name", "version"):
            if key in data and not (isinstance(data[key], str) and data[key]):
                bad.append(_wrong(key, data[key], "a text that is not empty"))
        _choose(bad, data, "array", ARRAYS)
        _choose(bad, data, "device", DEVICES)
        dtypes = _names(bad, data, "dtypes", DTYPES, at_least_one=True)
        features = _names(bad, data, "features", FEATURES)
        for key, choices in CHOICES.items():
            _choose(bad, data, key, choices)
        alignments: tuple[str, ...] = ALIGNMENTS
        if "causal_alignments" in data:
            alignments = _names(bad, data, "causal_alignments", ALIGNMENTS)
        unasked = _names(bad, data, "unasked_dtypes", DTYPES)
        bad += [f"{name} is in dtypes and in unasked_dtypes" for name in dtypes if name in unasked]
        if data.get("array") == "numpy" and data.get("device") == "cuda":
            bad.append("array='numpy' with device='cuda'; NumPy arrays live on the CPU")
        if data.get("array") == "cupy" and data.get("device") == "cpu":
            bad.append("array='cupy' with device='cpu'; CuPy arrays live on a GPU")
        head_dims, max_head_dim = _head_dims(bad, data)
        tile = _tile(bad, data.get("tile"))
        least = data.get("min_sizes", (0, 0, 0))
        if not isinstance(least, (list, tuple)) or [type(x) for x in least] != [int] * 3:
            bad.append(_wrong("min_sizes", least, "[batch, query rows, keys]"))
            least = (0, 0, 0)
        for key in ("kappa", "kappa_backward"):
            value = data.get(key, 0)
            if key in data and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                bad.append(
                    _wrong(key, value, "a number of at least 0 (workspace over IO), or null")
                )
        for part, whole in (("backward_bias", "bias"), ("backward_sinks", "sinks")):
            if part in features and not {"backward", whole} <= set(features):
                bad.append(f"feature {part!r} without 'backward' and {whole!r}")
        if bad:
            raise ManifestError(bad)
        given = {key: data[key] for key in CHOICES if key in data}
        for key in ("kappa", "kappa_backward"):
            if key in data:
                given[key] = math.inf if data[key] is None else float(data[key])
        return cls(
            name=data["name"],
            version=data["version"],
            array=data["array"],
            device=data["device"],
            dtypes=dtypes,
            features=frozenset(features),
            head_dims=head_dims,
            max_head_dim=max_head_dim,
            tile=tile,
            causal_alignments=alignments,
            min_sizes=(least[0], least[1], least[2]),
            unasked_dtypes=unasked,
            **given,
        )

    def narrowed(self, dtypes: Iterable[str]) -> Manifest:
        """The same claims for some of the dtypes; the others are remembered as not asked, so that
        nobody takes them for refused. Raises ValueError where one is not claimed."""
        wanted = tuple(dict.fromkeys(dtypes))
        for name in wanted:
            if name not in self.dtypes:
                raise ValueError(
                    f"{self.name} does not claim dtype {name!r}; it claims {', '.join(self.dtypes)}"
                )
        every = (*self.dtypes, *self.unasked_dtypes)
        kept = tuple(name for name in DTYPES if name in wanted)
        left = tuple(name for name in DTYPES if name in every and name not in wanted)
        return replace(self, dtypes=kept, unasked_dtypes=left)

    def claims(self, *features: str) -> bool:
        """Are all of ``features`` claimed?"""
        return self.features.issuperset(features)

    def takes_head_dim(self, head_dim: int) -> bool:
        """Is ``head_dim`` claimed, as listed or up to the maximum?"""
        if self.head_dims is not None:
            return head_dim in self.head_dims
        return 1 <= head_dim <= (self.max_head_dim or 0)

    def why_not(
        self,
        *,
        dtype: str | None = None,
        head_dim: int | None = None,
        head_dim_v: int | None = None,
        features: Iterable[str] = (),
        alignment: str | None = None,
        sizes: tuple[int, int, int] | None = None,
    ) -> tuple[str, ...]:
        """Every way in which a request lies outside the manifest; empty means that it is claimed.

        ``alignment`` is given where the request is causal with unequal lengths; ``sizes`` are
        batch, query rows and keys where all sequences have the same lengths.
        """
        reasons = []
        if dtype is not None and dtype not in self.dtypes:
            reasons.append(f"dtype {dtype} is not claimed")
        for name, dim in (("head dim", head_dim), ("value head dim", head_dim_v)):
            if dim is not None and not self.takes_head_dim(dim):
                reasons.append(f"{name} {dim} is not claimed")
        reasons += [f"feature {name} is not claimed" for name in features if not self.claims(name)]
        if alignment is not None and alignment not in self.causal_alignments:
            reasons.append(f"causal alignment {alignment} is not claimed")
        names = ("batch items", "query rows", "keys")
        for name, size, least in zip(names, sizes or (), self.min_sizes, strict=False):
            if size < least:
                reasons.append(f"fewer than {least} {name} are not claimed")
        return tuple(dict.fromkeys(reasons))

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values, defaults included; `parse` takes it back."""
        data: dict[str, Any] = {
            "name": self.name,
            "version": self.version,
            "array": self.array,
            "device": self.device,
            "dtypes": list(self.dtypes),
            "features": [name for name in FEATURES if name in self.features],
            "acc": self.acc,
            "p_storage": self.p_storage,
            "qk_operand": self.qk_operand,
            "tile": None if self.tile is None else list(self.tile),
            "kappa": None if math.isinf(self.kappa) else self.kappa,
            "kappa_backward": None if math.isinf(self.kappa_backward) else self.kappa_backward,
            "causal_alignments": list(self.causal_alignments),
            "empty_rows": self.empty_rows,
            "layout": self.layout,
            "min_sizes": list(self.min_sizes),
            "unasked_dtypes": list(self.unasked_dtypes),
        }
        if self.head_dims is not None:
            data["head_dims"] = list(self.head_dims)
        else:
            data["max_head_dim"] = self.max_head_dim
        return data


def _wrong(key: str, got: Any, wanted: str) -> str:
    shown = repr(got)
    return f"{key}={shown if len(shown) <= 80 else shown[:77] + '...'}; wanted: {wanted}"


def _choose(bad: list[str], data: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> None:
    if key in data and data[key] not in choices:
        bad.append(_wrong(key, data[key], f"one of {', '.join(choices)}"))


def _names(
    bad: list[str],
    data: Mapping[str, Any],
    key: str,
    choices: tuple[str, ...],
    *,
    at_least_one: bool = False,
) -> tuple[str, ...]:
    value = data.get(key)
    if value is None and key not in data:
        return ()
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        bad.append(_wrong(key, value, f"a list, of {', '.join(choices)}"))
        return ()
    unknown = [item for item in value if item not in choices]
    bad += [_wrong(key, item, f"one of {', '.join(choices)}") for item in unknown]
    if not value and at_least_one:
        bad.append(_wrong(key, value, "at least one"))
    return tuple(name for name in choices if name in value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _head_dims(
    bad: list[str], data: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, int | None]:
    listed, largest = data.get("head_dims"), data.get("max_head_dim")
    if (listed is None) == (largest is None):
        bad.append("wanted: either head_dims (a list) or max_head_dim, and not both")
        return None, None
    if listed is not None:
        if not isinstance(listed, (list, tuple)) or not listed or not all(map(_whole, listed)):
            bad.append(_wrong("head_dims", listed, "a list of whole numbers of at least 1"))
            return None, None
        return tuple(sorted(set(listed))), None
    if not _whole(largest):
        bad.append(_wrong("max_head_dim", largest, "a whole number of at least 1"))
        return None, None
    return None, largest


def _tile(bad: list[str], value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(map(_whole, value)):
        bad.append(_wrong("tile", value, "null or [block_q, block_k]"))
        return None
    return int(value[0]), int(value[1])

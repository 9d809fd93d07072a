"""One attention problem: shapes, dtype, masks, scale; frozen and hashable.

The rule kept here: a `Problem` exists only if its call is valid; both constructors validate
everything (the checks of single arguments are in `arguments`), once, for every backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from portattn.arguments import (
    DTYPE_BYTES,
    Described,
    Operand,
    check_alibi,
    check_bias,
    check_causal,
    check_flag,
    check_heads,
    check_layout,
    check_lengths,
    check_mask,
    check_precision,
    check_rank,
    check_same_place,
    check_scale,
    check_sinks,
    check_softcap,
    check_window,
    whole,
    wrong,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything about a call but the numbers in its arrays.

    Lengths are in tokens. Packed (``layout="thd"``): ``seq_q`` and ``seq_k`` are the longest
    sequence, ``total_q`` and ``total_k`` the packed rows. Paged: ``seq_k`` is the capacity,
    ``max_blocks * block_size``. ``device`` None asks about a backend's own device.
    ``negative_strides`` names the arguments that have some.
    """

    dtype: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    layout: str = "bshd"
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    bias: Operand | None = None
    mask: Operand | None = None
    alibi: Operand | None = None
    sinks: Operand | None = None
    total_q: int | None = None
    total_k: int | None = None
    seqused_k: bool = False
    num_blocks: int | None = None
    block_size: int | None = None
    return_lse: bool = False
    deterministic: bool = False
    precision: str = "ieee"
    backward: bool = False
    device: str | None = None
    family: str = "numpy"
    inner_strided: bool = False
    negative_strides: tuple[str, ...] = ()

    # ---- derived -------------------------------------------------------------------------------
    @property
    def packed(self) -> bool:
        """Queries (and keys, unless paged) of all sequences lie behind one another."""
        return self.layout == "thd"

    @property
    def paged(self) -> bool:
        """Keys and values lie in blocks named by a block table."""
        return self.block_size is not None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_k if self.heads_k else 1

    @property
    def alignment(self) -> str:
        """Where the diagonal lies for causal, window and ALiBi: bottom-right unless said."""
        return self.causal or "bottom_right"

    @property
    def accumulator(self) -> str:
        """float64 for float64 input, float32 for the rest; the dtype of the LSE as well."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of ``out`` in the caller's layout."""
        if self.packed:
            return (self.total_q or 0, self.heads_q, self.head_dim_v)
        if self.layout == "bhsd":
            return (self.batch, self.heads_q, self.seq_q, self.head_dim_v)
        return (self.batch, self.seq_q, self.heads_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq); packed: (Hq, T)."""
        if self.packed:
            return (self.heads_q, self.total_q or 0)
        return (self.batch, self.heads_q, self.seq_q)

    @property
    def empty(self) -> bool:
        """No output element at all: nothing is launched."""
        return 0 in self.out_shape

    def features(self) -> tuple[str, ...]:
        """The optional parts of the contract that this problem uses, by their public names."""
        used = {
            "causal": self.causal is not None,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "bias": self.bias is not None,
            "mask": self.mask is not None,
            "alibi_slopes": self.alibi is not None,
            "sinks": self.sinks is not None,
            "gqa": self.heads_q != self.heads_k,
            "value_head_dim": self.head_dim_v != self.head_dim,
            "packed": self.packed,
            "paged": self.paged,
            "seqused_k": self.seqused_k and not self.paged,
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
            "tf32": self.precision == "tf32",
            "backward": self.backward,
        }
        return tuple(name for name, on in used.items() if on)

    def describe(self) -> str:
        """One line for messages: shapes, dtype and the features in use."""
        heads = f"{self.heads_q}/{self.heads_k}"
        dims = str(self.head_dim)
        if self.head_dim_v != self.head_dim:
            dims += f",{self.head_dim_v}"
        text = (
            f"B={self.batch} Sq={self.seq_q} Sk={self.seq_k} H={heads} D={dims} {self.dtype} "
            f"{self.layout}"
        )
        features = self.features()
        return text + (" " + "+".join(features) if features else "")

    # ---- constructors --------------------------------------------------------------------------
    @classmethod
    def from_numbers(
        cls,
        *,
        head_dim: int,
        dtype: str = "float32",
        batch: int = 1,
        seq_q: int = 1024,
        seq_k: int | None = None,
        heads_q: int = 1,
        heads_k: int | None = None,
        head_dim_v: int | None = None,
        layout: str = "bshd",
        scale: float | None = None,
        causal: Any = False,
        window: Any = None,
        softcap: Any = None,
        bias: bool = False,
        mask: bool = False,
        alibi: bool = False,
        sinks: bool = False,
        seqused_k: bool = False,
        block_size: int | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
        precision: str = "ieee",
        backward: bool = False,
        device: str | None = None,
    ) -> Problem:
        """A problem without arrays, for the query; lengths in tokens, masks and biases dense."""
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise ValueError(wrong("dtype", repr(dtype), f"one of {', '.join(DTYPE_BYTES)}"))
        if not isinstance(device, str | None):
            raise TypeError(wrong("device", repr(device), "a name such as 'cpu' or 'cuda:0'"))
        seq_k = seq_q if seq_k is None else seq_k
        heads_k = heads_q if heads_k is None else heads_k
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        head_dim = whole("head_dim", head_dim, 1)
        head_dim_v = whole("head_dim_v", head_dim_v, 1)
        batch = whole("batch", batch, 0)
        seq_q, seq_k = whole("seq_q", seq_q, 0), whole("seq_k", seq_k, 0)
        heads_q, heads_k = whole("heads_q", heads_q, 1), whole("heads_k", heads_k, 1)
        check_layout(layout)
        check_heads(heads_q, heads_k)
        packed, blocks = layout == "thd", None
        used = check_flag("seqused_k", seqused_k) or block_size is not None
        if block_size is not None:
            block_size = whole("block_size", block_size, 1)
            blocks = -(-seq_k // block_size)
            seq_k = blocks * block_size
        dense = (batch, heads_q, seq_q, seq_k)
        return cls(
            dtype=dtype,
            batch=batch,
            seq_q=seq_q,
            seq_k=seq_k,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            scale=check_scale(scale, head_dim),
            layout=layout,
            causal=check_causal(
                causal, same_lengths=seq_q == seq_k and not used, what=(seq_q, seq_k)
            ),
            window=check_window(window),
            softcap=check_softcap(softcap),
            bias=Operand(dense, dtype) if check_flag("bias", bias) else None,
            mask=Operand(dense, "bool") if check_flag("mask", mask) else None,
            alibi=Operand((heads_q,), "float32") if check_flag("alibi", alibi) else None,
            sinks=Operand((heads_q,), "float32") if check_flag("sinks", sinks) else None,
            total_q=batch * seq_q if packed else None,
            total_k=batch * seq_k if packed and block_size is None else None,
            seqused_k=used,
            num_blocks=None if blocks is None else batch * blocks,
            block_size=block_size,
            return_lse=check_flag("return_lse", return_lse),
            deterministic=check_flag("deterministic", deterministic),
            precision=check_precision(precision, dtype),
            backward=check_flag("backward", backward),
            device=device,
        )

    @classmethod
    def from_arrays(
        cls,
        q: Described,
        k: Described,
        v: Described,
        *,
        layout: Any = "bshd",
        scale: Any = None,
        causal: Any = False,
        window: Any = None,
        softcap: Any = None,
        bias: Described | None = None,
        mask: Described | None = None,
        alibi_slopes: Described | None = None,
        sinks: Described | None = None,
        cu_seqlens_q: Described | None = None,
        cu_seqlens_k: Described | None = None,
        seqused_k: Described | None = None,
        block_table: Described | None = None,
        return_lse: Any = False,
        deterministic: Any = False,
        precision: Any = "ieee",
    ) -> Problem:
        """The problem that these arrays and options state. Raises `TypeError` for a wrong type or
        dtype and `ValueError` for a wrong shape, device or number, before any work."""
        check_layout(layout)
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(
                wrong("q, k, v", f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "one dtype for all")
            )
        if q.dtype not in DTYPE_BYTES:
            raise TypeError(wrong("q", f"dtype {q.dtype}", f"one of {', '.join(DTYPE_BYTES)}"))
        packed, paged = layout == "thd", block_table is not None
        check_rank("q", q, 3 if packed else 4, layout)
        for name, array in (("k", k), ("v", v)):
            check_rank(name, array, 4 if paged or not packed else 3, "paged" if paged else layout)
        others = {
            "k": k,
            "v": v,
            "bias": bias,
            "mask": mask,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_k": seqused_k,
            "block_table": block_table,
        }
        check_same_place(q, others)
        # axes: where the heads stand in q and in k, v
        qh = 1 if packed or layout == "bhsd" else 2
        kh = 2 if paged else qh
        heads_q, heads_k = q.shape[qh], k.shape[kh]
        head_dim, head_dim_v = q.shape[-1], v.shape[-1]
        check_heads(heads_q, heads_k)
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(wrong("v", f"shape {v.shape}", f"{k.shape[:-1]} + (Dv,), as k has"))
        if k.shape[-1] != head_dim:
            raise ValueError(
                wrong("k", f"head dim {k.shape[-1]}", f"{head_dim}, the head dim of q")
            )
        if head_dim == 0 or head_dim_v == 0:
            raise ValueError(
                wrong("q" if head_dim == 0 else "v", "head dim 0", "a head dim of at least 1")
            )
        lengths = check_lengths(
            q, k, qh, layout, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table
        )
        seq_q, seq_k = lengths.seq_q, lengths.seq_k
        if packed and q.device != "cpu":
            # The host cannot read how long the longest sequence is; a mask or bias says it.
            seq_q, seq_k = _longest(seq_q, seq_k, mask, bias)
        dense = (lengths.batch, heads_q, seq_q, seq_k)
        return cls(
            dtype=q.dtype,
            batch=lengths.batch,
            seq_q=seq_q,
            seq_k=seq_k,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            scale=check_scale(scale, head_dim),
            layout=layout,
            causal=check_causal(
                causal, same_lengths=lengths.same, what=(lengths.seq_q, lengths.seq_k)
            ),
            window=check_window(window),
            softcap=check_softcap(softcap),
            bias=check_bias(bias, q.dtype, dense),
            mask=check_mask(mask, dense),
            alibi=check_alibi(alibi_slopes, lengths.batch, heads_q),
            sinks=check_sinks(sinks, q.dtype, heads_q),
            total_q=q.shape[0] if packed else None,
            total_k=k.shape[0] if packed and not paged else None,
            seqused_k=seqused_k is not None,
            num_blocks=k.shape[0] if paged else None,
            block_size=k.shape[1] if paged else None,
            return_lse=check_flag("return_lse", return_lse),
            deterministic=check_flag("deterministic", deterministic),
            precision=check_precision(precision, q.dtype),
            device=q.device,
            family=q.family,
            inner_strided=any(
                a.shape[-1] > 1 and a.strides[-1] != 1 for a in (q, k, v) if 0 not in a.shape
            ),
            negative_strides=_negative({"q": q, **others}),
        )

    def as_backward(self) -> Problem:
        """The backward pass of this problem."""
        return replace(self, backward=True, return_lse=False)

    def with_results(self, **arrays: Described | None) -> Problem:
        """This problem with the caller's own arrays for its results (``out``, ``lse``, ``dout``,
        ``dlse``): how they lie can be a reason against it as well."""
        found = _negative(arrays)
        return replace(self, negative_strides=self.negative_strides + found) if found else self


def _negative(arrays: dict[str, Described | None]) -> tuple[str, ...]:
    """The names of arrays with a negative stride, whatever the length of its axis: some frameworks
    refuse it even there."""
    return tuple(
        name for name, a in arrays.items() if a is not None and any(s < 0 for s in a.strides)
    )


def _longest(seq_q: int, seq_k: int, *operands: Described | None) -> tuple[int, int]:
    """The longest lengths of packed sequences by the last axes of their masks and biases, where
    those do not broadcast; else all rows, which no sequence passes."""
    for operand in operands:
        shape = (1, 1) if operand is None else (1, 1, *operand.shape)
        seq_q = shape[-2] if 1 < shape[-2] <= seq_q else seq_q
        seq_k = shape[-1] if 1 < shape[-1] <= seq_k else seq_k
    return seq_q, seq_k

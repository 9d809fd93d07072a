"""Compiling ahead of time, for architectures that are not here: shared memory, registers, spills.

The rule kept here: what the planner says about a tile is what the compiler said. ``python -m
portattn.backends.triton_jit.ahead`` compiles the shipped tiles that have no bytes yet (``--anew``:
all) and writes the shared memory that the compiler reports into the table; ``--check`` holds the
table to it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from portattn.backends.triton_jit.config import Tile
from portattn.machine import cores

TABLE = Path(__file__).parent / "tuned" / "portable.json"
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_OFF = dict.fromkeys(
    "LEFT RIGHT SOFTCAP BIAS MASK ALIBI SINKS PACKED_Q PACKED_K USED PAGED PACK SPLIT TMA "
    "NEGATIVE EARLY".split(),
    False,
)
_NUMBERS_OF = {  # pointer arguments that are not of the input's dtype
    "lse": "*fp32", "part": "*fp32", "part_lse": "*fp32", "slopes": "*fp32", "sinks": "*fp32",
    "bias": "*fp32", "mask": "*i1", "cu_q": "*i32", "cu_k": "*i32", "used": "*i32", "table": "*i32",
    "flags": "*i32",
}  # fmt: skip
_PRESENT = {
    "bias": "BIAS", "mask": "MASK", "slopes": "ALIBI", "sinks": "SINKS", "cu_q": "PACKED_Q",
    "cu_k": "PACKED_K", "used": "USED", "table": "PAGED", "part": "SPLIT", "part_lse": "SPLIT",
    "k_desc": "TMA", "v_desc": "TMA", "flags": "FLAGS", "lse": "LSE",
}  # fmt: skip

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"RIGHT": True},
    "masked": {
        "RIGHT": True, "LEFT": True, "BIAS": True, "MASK": True, "SOFTCAP": True, "ALIBI": True,
        "SINKS": True,
    },
    "paged": {"RIGHT": True, "PAGED": True, "USED": True, "PACK": True, "SPLIT": True},
    "tma": {"RIGHT": True, "TMA": True},
    "tma masked": {"RIGHT": True, "TMA": True, "BIAS": True, "MASK": True, "SINKS": True},
}  # fmt: skip
"""Sets of flags that between them take every path through the kernel. Rows that are not whole
vectors take less shared memory than these, a launch that repairs takes one loop of several."""


def table_bytes(said: Mapping[str, int]) -> dict[str, int]:
    """What a table keeps of the shared memory of the variants of a tile."""
    plain = [n for name, n in said.items() if "masked" not in name]
    return {"shared_bytes": max(plain), "masked_bytes": max(said.values())}


def forward(
    tile: Tile, dtype: str, head_dim: int, capability: int, flags: Mapping[str, Any]
) -> Any:
    """The compiled forward kernel: ``tile`` at a padded ``head_dim`` for compute ``capability``
    (80, 90, ...)."""
    from portattn.backends.triton_jit.forward import forward_kernel

    short = _SHORT[dtype]
    size = 4 if dtype == "float32" else 2
    constants = {
        **_OFF, "LSE": True, "FLAGS": 0, "INNER": True, "VEC": 16 // size, "PRECISION": "ieee",
        "EVEN_D": True, "EVEN_DV": True, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
        "BLOCK_D": head_dim, "BLOCK_DV": head_dim, **flags,
    }  # fmt: skip
    box = f"tensordesc<{short}[1,1,{tile.block_k},{head_dim}]>"
    own = {"q": f"*{short}", "k": f"*{short}", "v": f"*{short}", "out": f"*{short}"}
    return compile_kernel(
        forward_kernel, {**own, "k_desc": box, "v_desc": box}, constants, tile, capability
    )


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: dict[str, Any], tile: Any, capability: int
) -> Any:
    """``kernel`` with its typed parameters as annotated, ``types`` for the other pointers, and
    what the flags leave out as None."""
    names = [p.name for p in kernel.params]
    signature, fixed = {}, {}
    for p in kernel.params:
        flag = _PRESENT.get(p.name)
        if p.name in constants:
            signature[p.name], fixed[p.name] = "constexpr", constants[p.name]
        elif p.annotation_type:
            signature[p.name] = p.annotation_type
        elif flag is not None and not constants.get(flag, False):
            signature[p.name], fixed[p.name] = "constexpr", None
        else:
            signature[p.name] = types.get(p.name) or _NUMBERS_OF[p.name]
    source = ASTSource(
        kernel, signature, constexprs={(names.index(n),): value for n, value in fixed.items()}
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def resources(compiled: Any, capability: int) -> dict[str, int]:
    """What the assembler says of a compiled kernel: ``registers`` of a thread, ``spilled`` bytes
    of a thread, ``shared`` bytes of a block."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
        done = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", str(source), "-o",
             str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    said = done.stdout + done.stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    return {
        "shared": int(compiled.metadata.shared),
        "registers": max(registers),
        "spilled": max(spilled, default=0),
    }


def variants(capability: int, dtype: str, kind: str) -> Iterable[str]:
    """The sets of flags that a tile can meet."""
    yield from ("plain", "masked")
    if kind in ("rows", "long"):
        yield "paged"
    if capability >= 90 and dtype != "float32":
        yield from ("tma", "tma masked")


def measure(jobs: int = 0, echo: Any = print, *, anew: bool = False) -> dict[str, Any]:
    """The table with what the compiler says of its tiles: of those that have no bytes yet, or
    ``anew`` of all."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    spills = {} if anew else dict(table.get("spilled_bytes", {}))
    tasks: dict[tuple[Any, ...], None] = {}
    for arch, kinds in table["tiles"].items():
        capability = int(arch.removeprefix("sm_"))
        for key, rows in kinds.items():
            kind, size, dim = key.split("/")
            dtype = "float16" if size == "2" else "float32"
            for row in rows:
                if row[4] and not anew:
                    continue
                for name in variants(capability, dtype, kind):
                    tasks[capability, dtype, int(dim), tuple(row[:4]), name] = None
    with ProcessPoolExecutor(jobs or cores()) as pool:
        known = dict(zip(tasks, pool.map(_measured, tasks), strict=True))
    for (capability, dtype, dim, tile, name), said in known.items():
        echo(f"sm_{capability} {dtype} {dim} {tile} {name}: {said}")
        if said["spilled"]:
            spills[_label(capability, dtype, dim, tile, name)] = said["spilled"]
    for arch, kinds in table["tiles"].items():
        capability = int(arch.removeprefix("sm_"))
        for key, rows in kinds.items():
            kind, size, dim = key.split("/")
            dtype = "float16" if size == "2" else "float32"
            for row in rows:
                if row[4] and not anew:
                    continue
                at = (capability, dtype, int(dim), tuple(row[:4]))
                names = variants(capability, dtype, kind)
                row[4:] = table_bytes({n: known[*at, n]["shared"] for n in names}).values()
    table["triton"] = triton.__version__
    table["spilled_bytes"] = dict(sorted(spills.items()))
    return table


def check(jobs: int = 0, echo: Any = print) -> int:
    """Compile every shipped tile once, with flags that take turns, and hold what the compiler says
    to the table: no more shared memory, no more spilled bytes. The number of tiles that need more.
    """
    table = json.loads(TABLE.read_text())
    limits: dict[tuple[Any, ...], tuple[int, int]] = {}
    for arch, kinds in table["tiles"].items():
        for key, rows in kinds.items():
            kind, size, dim = key.split("/")
            dtype = "float16" if size == "2" else "float32"
            for row in rows:
                at = (int(arch.removeprefix("sm_")), dtype, int(dim), tuple(row[:4]), kind)
                limits.setdefault(at, tuple(row[4:]))
    tasks: dict[tuple[Any, ...], int] = {}
    seen = set()
    for turn, ((capability, dtype, dim, tile, kind), limit) in enumerate(limits.items()):
        if (capability, dtype, dim, tile) not in seen:
            seen.add((capability, dtype, dim, tile))
            names = tuple(variants(capability, dtype, kind))
            name = names[turn % len(names)]
            tasks[capability, dtype, dim, tile, name] = limit["masked" in name]
    bad = 0
    with ProcessPoolExecutor(jobs or cores()) as pool:
        for task, said in zip(tasks, pool.map(_measured, tasks), strict=True):
            spilled = table["spilled_bytes"].get(_label(*task), 0)
            if said["shared"] > tasks[task] or said["spilled"] > spilled:
                bad += 1
                echo(f"{_label(*task)}: {said}; the table has {tasks[task]} and {spilled}")
    echo(f"{len(tasks)} tiles compiled, {bad} need more than the table says")
    return bad


def _label(capability: int, dtype: str, dim: int, tile: tuple[int, ...], name: str) -> str:
    q, k, warps, stages = tile
    return f"sm_{capability} {dtype} {dim} {q}x{k} {warps}w{stages}s {name}"


def _measured(task: tuple[int, str, int, tuple[int, int, int, int], str]) -> dict[str, int]:
    capability, dtype, dim, tile, name = task
    made = forward(Tile(*tile, 0, 0), dtype, dim, capability, VARIANTS[name])
    return resources(made, capability)


def write(table: dict[str, Any]) -> None:
    """The table as its file has it: one tile a line."""
    text = json.dumps(table, indent=1)
    text = re.sub(
        r"\[\s+" + r",\s+".join([r"(\d+)"] * 6) + r"\s+\]", r"[\1, \2, \3, \4, \5, \6]", text
    )
    TABLE.write_text(text + "\n")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(check() > 0)
    write(measure(anew="--anew" in sys.argv[1:]))

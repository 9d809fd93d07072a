"""Kernels compiled for GPUs that are not here: what the planner says about a tile is what the
compiler says.

The rule kept here: a spread of the shipped tiles, not all of them (`python -m
portattn.backends.triton_jit.ahead` compiles those); another release of Triton than the table's is
asked in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is there for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from portattn.backends.triton_jit import (
    config,
    hopper_backward_plan,
    hopper_plan,
    hopper_policy,
    planner,
)
from portattn.machine import SHARED_MEMORY, parse_arch
from portattn.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
TABLE = json.loads((ROOT / "backends/triton_jit/tuned/portable.json").read_text())

# (architecture, key of the table, which of its tiles): every variant compiled, bytes equal.
WHOLE = [
    ("sm_80", "prefill/2/64", 1),
    ("sm_80", "prefill/4/64", -1),
    ("sm_90", "rows/2/64", 1),
]
# One variant alone, which must not need more than the table says; bfloat16 stands in no key.
SINGLE = [
    ("sm_80", "rows/2/128", 1, "float16", "paged"),
    ("sm_80", "rows/2/256", -1, "bfloat16", "plain"),
    ("sm_80", "prefill/2/512", -1, "float16", "plain"),
    ("sm_80", "prefill/4/512", -1, "float32", "plain"),
    ("sm_90", "prefill/2/128", 0, "bfloat16", "tma"),
    ("sm_90", "rows/2/256", 0, "float16", "tma"),
    ("sm_90", "prefill/4/32", 0, "float32", "masked"),
]
# Bytes of a thread that the compiler spills, almost all of them once a tile and not in the loop
# over keys. (head dim, consumers, causal); three consumers have 160 registers a thread, four 112.
SPILLED_FORWARD = {(64, 3, True): 100, (64, 3, False): 24, (64, 4, True): 76, (256, 2, True): 44}
SPILLED_HOPPER = {64: (272, 0), 128: (192, 24), 256: (76, 312)}  # (dk and dv, dq)


@pytest.fixture(scope="module", autouse=True)
def cold_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled here is compiled now, and leaves nothing in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@pytest.fixture
def ahead() -> Any:
    """The module, where the kernels are compiled and not interpreted."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.skip("TRITON_INTERPRET is set: kernels are not compiled in this process")
    from portattn.backends.triton_jit import ahead

    return ahead


@pytest.fixture
def known() -> None:
    """The table stands for one release of Triton."""
    here = importlib.metadata.version("triton")
    if here.split("+")[0] != TABLE["triton"].split("+")[0]:
        pytest.skip(f"the table was compiled with Triton {TABLE['triton']!r}, this is {here}")


def dtype_of(key: str) -> str:
    return "float16" if key.split("/")[1] == "2" else "float32"


def compiled(ahead: Any, arch: str, key: str, at: int, dtype: str, variant: str) -> dict[str, int]:
    kind, _, dim = key.split("/")
    capability = int(arch.removeprefix("sm_"))
    assert variant in ahead.variants(capability, dtype, kind)
    made = ahead.forward(
        config.table()[arch][key][at], dtype, int(dim), capability, ahead.VARIANTS[variant]
    )
    return ahead.resources(made, capability)  # type: ignore[no-any-return]


def spilled(arch: str, key: str, at: int, variant: str) -> int:
    """What the table says that a thread of that kernel spills at the most."""
    tile = config.table()[arch][key][at]
    name = f"{arch} {dtype_of(key)} {key.split('/')[2]} {tile.block_q}x{tile.block_k}"
    said = TABLE["spilled_bytes"]
    return max(
        (n for k, n in said.items() if k.startswith(name) and k.endswith(variant)), default=0
    )


# ---- the table -----------------------------------------------------------------------------------
def test_the_table_names_its_triton() -> None:
    """It is one whose Gluon the hopper mechanism speaks."""
    release = tuple(int(x) for x in TABLE["triton"].split(".")[:2])
    assert planner.GLUON[0] <= release < planner.GLUON[1]


def test_spills_are_bounded() -> None:
    """A mask and a bias at once may cost what they cost; the other kernels spill little."""
    for name, size in TABLE["spilled_bytes"].items():
        assert size > 0 and (size <= 2048 or name.endswith("masked")), name


# ---- portable ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("arch", "key", "at"), WHOLE)
def test_bug_039_reported_against_compiled(
    ahead: Any, known: None, arch: str, key: str, at: int
) -> None:
    """The bytes of a tile are those of the variant that needs most, to the byte."""
    capability, dtype = int(arch.removeprefix("sm_")), dtype_of(key)
    tile = config.table()[arch][key][at]
    found = {
        name: compiled(ahead, arch, key, at, dtype, name)
        for name in ahead.variants(capability, dtype, key.split("/")[0])
    }
    said = {name: x["shared"] for name, x in found.items()}
    assert ahead.table_bytes(said) == {
        "shared_bytes": tile.shared_bytes,
        "masked_bytes": tile.masked_bytes,
    }, found
    for name, x in found.items():
        assert x["spilled"] <= spilled(arch, key, at, name), name


@pytest.mark.parametrize(("arch", "key", "at", "dtype", "variant"), SINGLE)
def test_no_variant_needs_more_than_its_tile_says(
    ahead: Any, known: None, arch: str, key: str, at: int, dtype: str, variant: str
) -> None:
    tile = config.table()[arch][key][at]
    said = compiled(ahead, arch, key, at, dtype, variant)
    assert said["shared"] <= tile.needs("masked" in variant)
    assert said["shared"] <= SHARED_MEMORY[parse_arch(arch)]
    if dtype == dtype_of(key):
        assert said["spilled"] <= spilled(arch, key, at, variant)


def test_a_row_needs_at_least_its_tile(known: None) -> None:
    """A lower bound that no compiler goes below: one tile of keys of the 16-bit kernels."""
    for arch, kinds in config.table().items():
        for key, rows in kinds.items():
            _, size, dim = key.split("/")
            for tile in rows:
                assert tile.shared_bytes >= tile.block_k * int(dim) * int(size) // 2, (arch, key)


def asked(dim: int, causal: bool) -> Problem:
    return Problem.from_numbers(
        head_dim=dim, dtype="bfloat16", seq_q=4096, causal=causal, backward=True
    )


# ---- hopper --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dim", "at", "dtype", "causal"),
    [
        (64, 0, "bfloat16", True),
        (64, 1, "bfloat16", False),
        (64, 1, "bfloat16", True),
        (128, 0, "bfloat16", True),
        (128, 1, "bfloat16", True),
        (128, 1, "float16", False),
        (256, 0, "bfloat16", True),
    ],
)
def test_hopper_forward(
    ahead: Any, known: None, dim: int, at: int, dtype: str, causal: bool
) -> None:
    from portattn.backends.triton_jit import hopper_forward

    (block_k, stages, consumers), _ = hopper_plan.FORWARD_TILES[dim][at]
    tile = hopper_policy.ForwardTile(dim, block_k, stages, consumers)
    made = hopper_forward.compile_ahead(
        tile, dtype, causal=causal, with_lse=True, with_flags=causal
    )
    said = ahead.resources(made, 90)
    want = hopper_plan.forward_shared_bytes(dim, block_k, stages, 2, consumers)
    assert said["shared"] == want == tile.shared_bytes <= hopper_plan.SHARED_LIMIT
    assert said["spilled"] <= SPILLED_FORWARD.get((dim, consumers, causal), 0)
    assert said["registers"] <= tile.maxnreg


@pytest.mark.parametrize(
    ("dim", "dtype", "causal", "flags"),
    [
        (64, "bfloat16", True, True),
        (128, "bfloat16", True, True),
        (256, "bfloat16", True, True),
    ],
)
def test_hopper_backward(
    ahead: Any, known: None, dim: int, dtype: str, causal: bool, flags: bool
) -> None:
    from portattn.backends.triton_jit import hopper_backward

    tiles = hopper_backward_plan.BACKWARD_TILES[dim][0]
    kernels = hopper_backward.compile_ahead(tiles, dtype, causal=causal, flags=flags)
    want = (
        hopper_backward_plan.dkdv_shared_bytes(tiles, causal=causal, flags=flags),
        hopper_backward_plan.dq_shared_bytes(tiles, causal=causal, flags=flags),
    )
    said = [ahead.resources(kernel, 90) for kernel in kernels]
    assert tuple(x["shared"] for x in said) == want
    planned = hopper_policy.backward_bytes(tiles, asked(dim, causal))
    assert max(want) <= planned <= hopper_plan.SHARED_LIMIT
    for x, most in zip(said, SPILLED_HOPPER[dim], strict=True):
        assert x["spilled"] <= most


def test_every_hopper_tile_that_is_planned_fits() -> None:
    for dim, tiles in hopper_plan.FORWARD_TILES.items():
        for tile in (hopper_policy.ForwardTile(dim, *shape) for shape, _ in tiles):
            assert tile.shared_bytes <= hopper_plan.SHARED_LIMIT
    for dim, choices in hopper_backward_plan.BACKWARD_TILES.items():
        for tiles in choices:
            for causal in (False, True):
                size = hopper_policy.backward_bytes(tiles, asked(dim, causal))
                assert size <= hopper_plan.SHARED_LIMIT


# ---- another Triton ------------------------------------------------------------------------------
NEWEST = [
    ("sm_80", "prefill/2/64", 0, "bfloat16", "plain"),
    ("sm_80", "rows/2/128", 1, "float16", "paged"),
    ("sm_90", "prefill/2/128", 0, "bfloat16", "tma"),
    ("sm_90", "prefill/4/64", 0, "float32", "plain"),
]
PROGRAM = """
import json, sys
import triton
from portattn.backends.triton_jit import ahead, config
found = {"triton": triton.__version__, "tiles": []}
for arch, key, at, dtype, variant in json.loads(sys.argv[1]):
    tile, capability = config.table()[arch][key][at], int(arch.removeprefix("sm_"))
    try:
        made = ahead.forward(
            tile, dtype, int(key.split("/")[2]), capability, ahead.VARIANTS[variant]
        )
        said = {"shared": int(made.metadata.shared)}
    except Exception as error:
        said = {"failure": f"{type(error).__name__}: {error}"[:2000]}
    found["tiles"].append(said)
print(json.dumps(found))
"""


def test_the_newest_triton_compiles_the_portable_kernels(
    tmp_path: Path, record_property: Any
) -> None:
    """PORTATTN_TRITON_NEWEST names the folder of another release. A tile may come to other bytes
    there, which is printed; it may not come to more than the device of its architecture has."""
    folder = os.environ.get("PORTATTN_TRITON_NEWEST")
    if not folder:
        pytest.skip("PORTATTN_TRITON_NEWEST names no folder with another release of Triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(NEWEST)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((folder, str(ROOT))),
            "TRITON_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("triton", found["triton"])
    print(f"\nTriton {found['triton']} against the table of {TABLE['triton']}:")
    for (arch, key, at, dtype, variant), said in zip(NEWEST, found["tiles"], strict=True):
        tile = config.table()[arch][key][at]
        print(f"  {arch} {key} {dtype} {variant}: {said}, the table has {tile.shared_bytes}")
        assert "failure" not in said, said["failure"]
        record_property(f"{arch} {key} {dtype} {variant}", said["shared"] - tile.shared_bytes)
        assert said["shared"] <= SHARED_MEMORY[parse_arch(arch)]

"""The machine is asked in child processes: whatever is broken there becomes a reason, within two
seconds, and never an exception here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portattn import machine as machine_module
from portattn.contract import cuda_reasons
from portattn.machine import Cuda, Device, Machine, parse_arch

SECONDS = 2.0  # what one backend's answer may take

# Asks every backend about this machine and prints (name, seconds, reasons).
ASK = """
import json, time
from portattn.machine import Machine
from portattn.registry import find_backends
answers = {}
for name, found in find_backends().items():
    start = time.perf_counter()
    reasons = found.backend.why_not(None, Machine.here())
    answers[name] = (time.perf_counter() - start, [r.to_json() for r in reasons])
import portattn
assert {info.name for info in portattn.list_backends()} == set(answers)
print(json.dumps(answers))
"""
GPU_BACKENDS = {"triton": "triton", "cupy": "cupy", "numba": "numba.cuda"}


def ask(fresh: Callable[..., Any], **environment: str | None) -> dict[str, list[dict[str, Any]]]:
    """The reasons of each backend in a fresh process, by name; no answer may be late."""
    answers = json.loads(fresh(ASK, **environment).stdout.splitlines()[-1])
    late = {name: seconds for name, (seconds, _) in answers.items() if seconds >= SECONDS}
    assert not late
    return {name: reasons for name, (_, reasons) in answers.items()}


def codes(reasons: list[dict[str, Any]]) -> set[str]:
    return {reason["code"] for reason in reasons}


# ---- drivers that are missing, stubs, or broken --------------------------------------------------
SYMBOLS = """
int cuDriverGetVersion(int *v) {{ *v = 13010; return 0; }}
int cuInit(unsigned flags) {{ {init} }}
int cuDeviceGetCount(int *n) {{ *n = {count}; return {count_status}; }}
int cuDeviceGet(int *device, int ordinal) {{ *device = ordinal; return 0; }}
int cuDeviceGetName(char *name, int n, int device) {{
    __builtin_strcpy(name, "Stub GPU");
    return 0;
}}
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) {{ *bytes = 1UL << 34; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
    *value = attribute == 75 ? {major} : attribute == 76 ? {minor} : attribute == 97 ? 101376 : 76;
    return 0;
}}
"""


@pytest.fixture(scope="session")
def stub_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A folder for LD_LIBRARY_PATH that holds a libcuda.so.1 made from these parts."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to make a stub libcuda")

    def build(source: str | None = None, **parts: Any) -> str:
        if source is None:
            defaults = {"init": "return 0;", "count": 1, "count_status": 0, "major": 8, "minor": 9}
            source = SYMBOLS.format(**{**defaults, **parts})
        folder = tmp_path_factory.mktemp("driver")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", "-x", "c", "-"],
            input=source,
            text=True,
            check=True,
        )
        return str(folder)

    return build


def test_a_library_that_cannot_be_loaded_bug_091(fresh, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    for name, reasons in ask(fresh, LD_LIBRARY_PATH=str(tmp_path)).items():
        if name in GPU_BACKENDS:
            (driver,) = [r for r in reasons if r["code"] == "driver_missing"]
            assert "libcuda.so.1 cannot be loaded" in driver["got"]
            assert "install the NVIDIA driver" in driver["hint"]
            assert driver["source"] == "probed"
        else:
            assert not reasons, "a host backend does not care"


STUBS: list[tuple[str, dict[str, Any], dict[str, str | None], str, str]] = [
    ("no symbols", {"source": "int nothing;"}, {}, "driver_error", "not a CUDA driver"),
    ("no device", {"init": "return 100;"}, {}, "no_device", "no device"),
    ("zero devices", {"count": 0}, {}, "no_device", "no device"),
    ("init fails", {"init": "return 803;"}, {}, "driver_error", "803"),
    ("count fails", {"count_status": 999}, {}, "driver_error", "999"),
    ("aborts", {"init": "__builtin_trap();"}, {}, "driver_error", "the probe ended with"),
    ("exits", {"init": "_exit(0);"}, {}, "driver_error", "the probe ended with"),
    (
        "all hidden",
        {"init": "return 100;"},
        {"CUDA_VISIBLE_DEVICES": ""},
        "devices_hidden",
        "CUDA_VISIBLE_DEVICES=''",
    ),
]


@pytest.mark.parametrize(
    ("parts", "environment", "code", "text"),
    [case[1:] for case in STUBS],
    ids=[case[0] for case in STUBS],
)
def test_a_driver_that_does_not_serve_bug_091(
    fresh, stub_driver, parts, environment, code: str, text: str
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": None, **environment}
    answers = ask(fresh, LD_LIBRARY_PATH=stub_driver(**parts), **environment)
    for name in GPU_BACKENDS:
        (found,) = [r for r in answers[name] if r["code"] == code]
        assert text in found["got"]
        assert found["hint"]


def test_a_driver_that_serves_is_described(fresh, stub_driver) -> None:
    code = (
        "import dataclasses, json; from portattn.machine import Machine\n"
        "print(json.dumps(dataclasses.asdict(Machine.here().cuda)))"
    )
    environment = {"LD_LIBRARY_PATH": stub_driver(count=2), "CUDA_VISIBLE_DEVICES": None}
    cuda = json.loads(fresh(code, **environment).stdout)
    assert (cuda["code"], cuda["problem"], cuda["driver"]) == ("", "", "13.1")
    assert cuda["devices"][1] == {
        "index": 1,
        "name": "Stub GPU",
        "capability": [8, 9],
        "shared_memory": 101376,
        "multiprocessors": 76,
        "memory": 1 << 34,
    }
    for reasons in ask(fresh, **environment).values():
        assert not codes(reasons) & {"driver_missing", "driver_error", "no_device"}


def test_a_driver_that_hangs_costs_the_time_limit(fresh, stub_driver) -> None:
    code = (
        "from portattn import machine; machine.PROBE_SECONDS = 0.5\n"
        "print(machine.Machine.here().cuda)"
    )
    environment = {"LD_LIBRARY_PATH": stub_driver(init="for (;;) sleep(1);")}
    assert "no answer within" in fresh(code, **environment).stdout


def test_the_driver_is_asked_once(stub_driver, fresh) -> None:
    code = (
        "import subprocess; from portattn.machine import Machine\n"
        "calls = []; run = subprocess.run\n"
        "subprocess.run = lambda *a, **k: calls.append(a) or run(*a, **k)\n"
        "for _ in range(3): Machine.here().cuda\n"
        "assert len(calls) == 1, calls"
    )
    fresh(code, LD_LIBRARY_PATH=stub_driver())


# ---- frameworks that are missing or broken on import ---------------------------------------------
BROKEN = [
    ("raises", "raise RuntimeError('no good today')", "no good today"),
    ("import error", "import portattn_no_such_module", "portattn_no_such_module"),
    ("exits", "import sys; sys.exit(3)", "status 3"),
    ("exits quietly", "import sys; sys.exit(0)", "status 0"),
    ("leaves at once", "import os; os._exit(0)", "status 0"),
    ("segfaults", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    ("syntax", "def f(:", "SyntaxError"),
    ("prints rubbish", "import os; os.write(2, bytes(range(256))); raise OSError('x')", "OSError"),
]


def fake_frameworks(folder: Path, body: str) -> None:
    for name in ("triton", "cupy", "numba"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("" if name == "numba" else body)
    (folder / "numba" / "cuda.py").write_text(body)


@pytest.mark.parametrize(("body", "text"), [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN])
def test_a_framework_that_breaks_on_import(fresh, tmp_path: Path, body: str, text: str) -> None:
    fake_frameworks(tmp_path, body)
    answers = ask(fresh, PYTHONPATH=str(tmp_path))
    for name, module in GPU_BACKENDS.items():
        (found,) = [r for r in answers[name] if r["code"] == "package_broken"]
        assert text in found["got"]
        assert module in found["hint"]
        assert found["source"] == "probed"
    assert not answers.get("numpy")


def test_a_framework_that_imports_is_no_reason(fresh, tmp_path: Path) -> None:
    fake_frameworks(tmp_path, "print('hello')")
    for reasons in ask(fresh, PYTHONPATH=str(tmp_path)).values():
        assert not codes(reasons) & {"package_broken", "package_missing"}


def test_looking_for_a_submodule_does_not_import_its_parent(fresh, tmp_path: Path) -> None:
    """A parent package that kills its process would otherwise take the caller with it."""
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("import os; os._exit(7)")
    reasons = ask(fresh, PYTHONPATH=str(tmp_path))["numba"]
    assert "package_missing" in codes(reasons)
    (tmp_path / "numba" / "cuda.py").write_text("")
    (found,) = [
        r for r in ask(fresh, PYTHONPATH=str(tmp_path))["numba"] if r["code"] == "package_broken"
    ]
    assert "status 7" in found["got"]


def test_a_framework_that_hangs_on_import(fresh, tmp_path: Path) -> None:
    fake_frameworks(tmp_path, "import time; time.sleep(60)")
    code = (
        "from portattn import machine; machine.PROBE_SECONDS = 0.5\n"
        "print(machine.Machine.here().import_error('triton'))"
    )
    assert "did not end" in fresh(code, PYTHONPATH=str(tmp_path)).stdout


def test_a_missing_package_says_what_to_install() -> None:
    bare = Machine(cuda_state=Cuda(code="no_device", problem="none"), packages={}, imports={})
    reasons = cuda_reasons(bare, "cupy", "cupy", "cupy")
    assert [r.code for r in reasons] == ["package_missing", "no_device"]
    assert reasons[0].hint == 'pip install "portattn[cupy]"'


def test_what_is_not_listed_is_neither_findable_nor_imported() -> None:
    here = Machine.here()
    assert here.findable("json.decoder")
    assert here.findable("numpy.linalg")
    assert not here.findable("portattn_no_such_module")
    assert not here.findable("json.no_such_module")
    assert not here.findable("numpy.version.deeper")
    assert here.import_error("colorsys") is None
    assert here.version("numpy")
    assert here.version("portattn-no-such-distribution") is None


# ---- fork ----------------------------------------------------------------------------------------
def test_a_child_forked_after_cuda_was_used_says_so_bug_092(fresh) -> None:
    """The host backend works there; every GPU backend refuses; the parent is as it was."""
    code = textwrap.dedent(
        """
        import os, sys
        import portattn
        from portattn import machine
        machine._cuda_in_use = lambda: True       # stands for a framework that used the GPU
        before = machine.Machine.here().cuda
        pid = os.fork()
        if pid == 0:
            ok = machine.Machine.here().cuda.code == "cuda_lost_in_fork"
            for info in portattn.list_backends():
                codes = [r.code for r in info.reasons]
                ok &= ("cuda_lost_in_fork" in codes) == (info.name in ("triton", "cupy", "numba"))
                ok &= all("before fork" in str(r) for r in info.reasons if "fork" in r.code)
            os._exit(0 if ok else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert machine.Machine.here().cuda == before
        """
    )
    fresh(code)


def test_a_child_forked_without_cuda_is_no_different(fresh) -> None:
    code = (
        "import os; from portattn.machine import Machine\n"
        "before = Machine.here().cuda.code\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(Machine.here().cuda.code != before)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0"
    )
    fresh(code)


# ---- pretended machines --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("device", "capability", "shared_memory"),
    [
        ("sm_70", (7, 0), 98_304),
        ("sm_75", (7, 5), 65_536),
        ("sm_80", (8, 0), 166_912),
        ("sm_86", (8, 6), 101_376),
        ("sm_89", (8, 9), 101_376),
        ("sm_90", (9, 0), 232_448),
        ("sm_90a", (9, 0), 232_448),
        ("sm_100", (10, 0), 232_448),
        ("sm_120", (12, 0), 101_376),
        ("8.9", (8, 9), 101_376),
        ("SM89", (8, 9), 101_376),
        ("sm_99", (9, 9), 49_152),  # unknown: what every device grants
    ],
)
def test_pretended_devices(device: str, capability: tuple[int, int], shared_memory: int) -> None:
    (made,) = Machine.pretend(device).cuda.devices
    assert (made.capability, made.shared_memory) == (capability, shared_memory)
    assert made.arch == f"sm_{capability[0]}{capability[1]}"
    assert not cuda_reasons(Machine.pretend(device), "triton", "triton", "triton")


def test_a_pretended_limit() -> None:
    assert Machine.pretend("sm_90", 65_536).cuda.devices[0].shared_memory == 65_536
    assert Machine.pretend(None, 49_152).cuda.devices[0].shared_memory == 49_152


@pytest.mark.parametrize("text", ["", "sm_", "sm_9", "h200", "gpu", "sm_1234", "9,0", "sm_90b"])
def test_unknown_architectures_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"device: got .*sm_89"):
        parse_arch(text)


# ---- the fingerprint -----------------------------------------------------------------------------
def test_the_fingerprint_is_flat_json() -> None:
    card = Device(0, "Card", (9, 0), 232_448)
    parts = Machine(cuda_state=Cuda(driver="13.0", devices=(card,))).fingerprint()
    assert parts["driver"] == "13.0"
    assert parts["gpus"] == ["Card (sm_90)"]
    assert parts["cores"] == len(os.sched_getaffinity(0))
    assert json.loads(json.dumps(parts)) == parts


def test_a_machine_is_frozen_and_hashable() -> None:
    assert hash(Machine.pretend("sm_90")) == hash(Machine.pretend("sm_90"))
    assert Machine.here() is machine_module.Machine.here()
    with pytest.raises(AttributeError):
        Machine.here().pretended = True  # type: ignore[misc]

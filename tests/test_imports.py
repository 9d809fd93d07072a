"""Layering: what may import what, checked in the text of every file and in fresh processes.

ARCHITECTURE: problem, machine <- contract, tuning <- registry <- select <- api <- conformance.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each line may import from itself and from the lines above it.
LAYERS = (
    ("arguments", "arrays", "records"),
    ("problem", "machine"),
    ("contract", "tuning", "traffic"),
    ("certificate",),
    ("registry",),
    ("select",),
    ("merging", "api"),
    ("torch", "distributed"),
    ("compat",),
    ("report",),
    ("conformance", "bench", "tune_command"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
LEFT_OF_REGISTRY = {name for name in RANK if RANK[name] < RANK["certificate"]}

# api reaches the torch face only from inside a call that carries a gradient or is traced.
LATE = {("api", "torch")}

FRAMEWORKS = ("torch", "triton", "cupy", "numba", "cuda", "jax", "transformers")
THIRD_PARTY = (*FRAMEWORKS, "numpy", "ml_dtypes", "threadpoolctl", "rich", "click", "platformdirs")

IN_TREE = sorted(p.parent.name for p in ROOT.glob("backends/*/__init__.py"))


def module_name(path: Path) -> str:
    """``backends/x/launch.py`` -> ``portattn.backends.x.launch``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "portattn":
        parts.insert(0, "portattn")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("portattn", "backends", "conformance")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(name: str, *, at_import_only: bool = False) -> set[str]:
    """Full names of what a module imports at run time (`TYPE_CHECKING` blocks do not count).

    ``at_import_only`` leaves out what stands inside functions.
    """
    found: set[str] = set()
    package = name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other)
            return
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            # `from portattn import select` names a module, `from portattn.select import x` does not
            found.update(
                f"{base}.{a.name}" if f"{base}.{a.name}" in SOURCES else base for a in node.names
            )
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(SOURCES[name].read_text()))
    return found


def part(module: str) -> str:
    """The part of the house that a module belongs to: ``portattn.torch.ops`` -> ``torch``."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "portattn"


CORE = [m for m in SOURCES if part(m) not in ("backends", "conformance", "portattn")]


# ---- in the text ---------------------------------------------------------------------------------
@pytest.mark.parametrize("module", CORE)
def test_core_imports_point_left(module: str) -> None:
    here = part(module)
    if here.startswith("_") and here != "__main__":  # programs of their own, run as files
        assert not {m for m in imports(module) if m.startswith("portattn")}
        return
    assert here in RANK, f"portattn/{here} stands in no layer: give it a line in LAYERS"
    for target in imports(module):
        if not target.startswith("portattn."):
            continue
        there = part(target)
        assert there != "backends", f"{module} names a backend: {target}"
        assert there in RANK, f"{module} imports {target}, which stands in no layer"
        if (here, there) not in LATE:
            assert RANK[there] <= RANK[here], f"{module} imports {target}, which stands right of it"


@pytest.mark.parametrize(("here", "there"), sorted(LATE))
def test_late_imports_stand_inside_functions(here: str, there: str) -> None:
    at_import = imports(f"portattn.{here}", at_import_only=True)
    everywhere = imports(f"portattn.{here}")
    assert not any(part(m) == there for m in at_import if m.startswith("portattn."))
    assert any(part(m) == there for m in everywhere if m.startswith("portattn."))


@pytest.mark.parametrize("module", [m for m in SOURCES if m.startswith("portattn.backends")])
def test_backends_import_only_what_stands_left_of_the_registry(module: str) -> None:
    own = ".".join(module.split(".")[:3])
    for target in imports(module):
        if target == own or target.startswith(f"{own}."):
            continue
        if target.startswith("portattn"):
            assert part(target) in LEFT_OF_REGISTRY, f"{module} imports {target}"


@pytest.mark.parametrize("folder", IN_TREE)
def test_backend_entry_imports_stdlib_and_portattn_only(folder: str) -> None:
    for target in imports(f"portattn.backends.{folder}", at_import_only=True):
        top = target.split(".")[0]
        assert top in ("portattn", "__future__") or top in sys.stdlib_module_names, target


def test_the_core_reaches_backends_through_one_string_in_the_registry() -> None:
    for module in CORE:
        text = SOURCES[module].read_text()
        if part(module) == "registry":
            assert 'IN_TREE = "portattn.backends"' in text
        for folder in IN_TREE:
            assert f"portattn.backends.{folder}" not in text, f"{module} names {folder}"


def test_the_oracle_imports_no_backend_and_nothing_of_the_interface() -> None:
    seen, todo = set(), ["portattn.conformance.reference"]
    while todo:
        module = todo.pop()
        for target in imports(module):
            if target.startswith("portattn.") and target not in seen:
                seen.add(target)
                todo.append(target)
    assert not {m for m in seen if part(m) != "conformance"}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_every_module_states_its_rule(module: str) -> None:
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text())), f"{module} has no docstring"


# ---- in fresh processes --------------------------------------------------------------------------
def loaded(fresh, code: str, **environment: str | None) -> set[str]:
    """Names in ``sys.modules`` after ``code``, those of the interpreter's start taken off."""
    program = (
        "import json, sys; before = set(sys.modules)\n"
        f"{code}\n"
        "import json as j; print(j.dumps(sorted(set(sys.modules) - before)))"
    )
    return set(json.loads(fresh(program, **environment).stdout.splitlines()[-1]))


def foreign(modules: set[str]) -> set[str]:
    """Top-level names that are neither the standard library's nor ours."""
    tops = {m.split(".")[0] for m in modules}
    return {t for t in tops if t not in sys.stdlib_module_names and t != "portattn"}


@pytest.mark.parametrize(
    "code",
    [
        "import portattn",
        "import portattn; dir(portattn); portattn.__version__",
        *(
            f"import portattn.{module}"
            for module in ("problem", "machine", "contract", "registry", "certificate", "select")
        ),
        "import portattn.api",
        "import portattn.backends",
        "from portattn.registry import find_backends; find_backends()",
    ],
)
def test_importing_loads_the_standard_library_only(fresh, code: str) -> None:
    assert not foreign(loaded(fresh, code))


def test_the_package_alone_loads_none_of_its_modules(fresh) -> None:
    assert {m for m in loaded(fresh, "import portattn") if m.startswith("portattn")} == {"portattn"}


@pytest.mark.parametrize("name", ["problem", "machine", "contract", "registry", "select"])
def test_a_layer_loads_nothing_to_its_right(fresh, name: str) -> None:
    parts = {part(m) for m in loaded(fresh, f"import portattn.{name}") if m.startswith("portattn.")}
    right = {p for p in parts if p in RANK and RANK[p] > RANK[name]}
    assert not right


@pytest.mark.parametrize("folder", IN_TREE)
def test_a_backend_loads_no_other_and_no_framework(fresh, folder: str) -> None:
    modules = loaded(fresh, f"import portattn.backends.{folder}")
    others = {m for m in modules if m.startswith("portattn.backends.") and folder not in m}
    assert not others
    assert not foreign(modules)


def test_the_oracle_loads_numpy_and_no_backend(fresh) -> None:
    modules = loaded(fresh, "import portattn.conformance.reference")
    assert foreign(modules) <= {"numpy", "ml_dtypes"}
    assert not {m for m in modules if m.startswith(("portattn.backends", "portattn.api"))}


def test_asking_which_backends_there_are_loads_no_framework(fresh) -> None:
    modules = loaded(
        fresh, "import portattn; portattn.list_backends(); portattn.query(head_dim=64)"
    )
    assert not foreign(modules) & set(FRAMEWORKS)


def test_a_numpy_call_loads_no_framework(fresh) -> None:
    code = (
        "import numpy as np, portattn\n"
        "x = np.ones((1, 3, 1, 4), 'float32'); portattn.attention(x, x, x)"
    )
    assert not foreign(loaded(fresh, code)) & set(FRAMEWORKS)


def test_import_and_query_write_no_file_and_open_no_device(fresh, tmp_path: Path) -> None:
    """The home is empty and stays so; the driver library is never mapped into the process."""
    code = (
        "import sys\n"
        "def watch(event, args):\n"
        "    writes = event == 'open' and args[1] and set(str(args[1])) & set('wax+')\n"
        "    if writes and '/dev/null' not in str(args[0]):\n"
        "        print('WRITES', args)\n"
        "    if event in ('os.mkdir', 'os.rename', 'ctypes.dlopen'):\n"
        "        print('DOES', event, args)\n"
        "sys.addaudithook(watch)\n"
        "import portattn\n"
        "portattn.list_backends()\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    done = fresh(
        code,
        HOME=str(tmp_path),
        XDG_CACHE_HOME=None,
        XDG_DATA_HOME=None,
        PORTATTN_DATA_DIR=None,
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert "WRITES" not in done.stdout
    assert "dlopen" not in done.stdout
    assert "DOES" not in done.stdout
    assert not list(tmp_path.iterdir())

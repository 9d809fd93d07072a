"""Somebody else's mutants: ``package.module:object`` with ``mutants() -> (name, target) pairs``.

The rule kept here: their code runs in child processes alone. A child lists the names; another
loads one of them by an attribute of this module that spells ``package/module|object|name``.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

from portattn.conformance.isolate import Setup
from portattn.conformance.mutants.seeds import Mutant
from portattn.conformance.targets import TargetError

LIST_SECONDS = 300.0


def find(spec: str) -> tuple[str | None, dict[str, Mutant]]:
    """The correct target, where the object is one itself, and its mutants. Raises `TargetError`."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise TargetError(f"mutants {spec!r}; wanted: package.module:object")
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, spec],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIST_SECONDS,
            env=Setup(spec).environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"mutants {spec!r}: no list within {LIST_SECONDS:g} s") from error
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TargetError(f"mutants {spec!r} cannot be listed: {why}")
    told = json.loads(last)
    prefix = "|".join((module.replace(".", "/"), name.replace(".", "/")))
    return spec if told["correct"] else None, {
        each: Mutant(each, "", "foreign", None, (), f"{__name__}:{prefix}|{_spelt(each)}")
        for each in told["names"]
    }


def holder(module: str, name: str) -> Any:
    """The object that has the mutants."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # the caller's folder, as `python -m` has it
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found() if isinstance(found, type) else found


def _spelt(name: str) -> str:
    return name.replace(".", "/")


def __getattr__(attribute: str) -> Any:
    module, _, rest = attribute.partition("|")
    name, bar, mutant = rest.partition("|")
    if not bar:
        raise AttributeError(attribute)
    for each, target in holder(module.replace("/", "."), name.replace("/", ".")).mutants():
        if _spelt(str(each)) == mutant:
            return target
    raise AttributeError(attribute)


def main(spec: str) -> None:
    """One JSON line: the names, and whether the object is a target itself."""
    module, _, name = spec.partition(":")
    found = holder(module, name)
    names = [str(each) for each, _ in found.mutants()]
    spelt = [_spelt(each) for each in names]
    if len(set(spelt)) < len(spelt):
        twice = next(each for each in spelt if spelt.count(each) > 1)
        raise ValueError(f"two mutants are called {twice!r}")
    correct = all(callable(getattr(found, member, None)) for member in ("manifest", "forward"))
    print(json.dumps({"names": names, "correct": correct}))


if __name__ == "__main__":
    main(sys.argv[1])

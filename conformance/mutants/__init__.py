"""Seeded defects: the suite is held to what it claims to catch.

The rule kept here: a check is worth the defects that do not get past it. `tiled` is a correct
implementation, `catalogue` holds its mutants, `score` asks the suite about each.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``command``, imported when asked for: the children that load a mutant need no click."""
    if name != "command":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from portattn.conformance.mutants.cli import command

    return command

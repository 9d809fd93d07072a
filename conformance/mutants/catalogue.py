"""All seeded defects by id, in the order of their families.

The rule kept here: every family of defects that attention kernels have been reported with has its
mutants, and each names the checks that must not pass it.
"""

from __future__ import annotations

from collections.abc import Mapping

from portattn.conformance.mutants import (
    arithmetic,
    backward,
    calls,
    masks,
    memory,
    routing,
    serving,
    softmax,
)
from portattn.conformance.mutants.seeds import Mutant, collect

CORRECT = "portattn.conformance.mutants.tiled:Tiled"
"""What the defects are seeded into; must pass everything."""

MUTANTS: Mapping[str, Mutant] = collect(
    softmax, arithmetic, masks, routing, calls, memory, backward, serving
)

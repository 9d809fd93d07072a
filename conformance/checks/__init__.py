"""The catalogue: every check of the suite, by id, in order.

The rule kept here: the table is explicit. A check exists where its module is listed; ids are never
reused, and a retired one stays free.
"""

from __future__ import annotations

from portattn.conformance.case import GROUPS, Check, collect
from portattn.conformance.checks import (
    backward,
    determinism,
    dtypes,
    edges,
    errors,
    exact,
    forward,
    head_dim,
    masks,
    memory,
    metamorphic,
    traffic,
)

MODULES = (
    forward,
    exact,
    head_dim,
    masks,
    edges,
    metamorphic,
    backward,
    determinism,
    memory,
    traffic,
    errors,
    dtypes,
)

CATALOGUE: dict[str, Check] = dict(
    sorted(collect(*MODULES).items(), key=lambda item: (list(GROUPS).index(item[0][0]), item[0]))
)
"""By group, then by number."""

"""portattn: exact attention on four backends, with evidence for what each one does here.

Importing this package imports nothing but the standard library: every public name is looked up
on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from portattn.api import Gradients, attention, attention_backward, explain, merge
    from portattn.contract import Plan, Reason, Unsupported
    from portattn.problem import Problem
    from portattn.select import BackendInfo, Candidate, Decision, list_backends, query

_HOME = {
    "attention": "api",
    "attention_backward": "api",
    "explain": "api",
    "merge": "api",
    "Gradients": "api",
    "Plan": "contract",
    "Reason": "contract",
    "Unsupported": "contract",
    "Problem": "problem",
    "BackendInfo": "select",
    "Candidate": "select",
    "Decision": "select",
    "list_backends": "select",
    "query": "select",
}

__all__ = [
    "BackendInfo",
    "Candidate",
    "Decision",
    "Gradients",
    "Plan",
    "Problem",
    "Reason",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "explain",
    "list_backends",
    "merge",
    "query",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'portattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"portattn.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

"""The child: loads one target, answers cases one by one over its own pipe.

The rule kept here: whatever a target does (raise, exit, fork, print, fail to load) becomes one
JSON line; only what takes the process with it is left to the parent to see. stdout and stderr
belong to the target; answers go over a file descriptor that it does not know of.

Lines to the child: ``{"load": spec, "catalogue": "module:NAME", "memory": bytes or null,
"manifest": known or null}`` first, then ``{"case": {...}}`` as often as wanted. Each is answered by
one line.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from portattn.conformance import meters, targets
from portattn.conformance.case import Case, Check, Outcome
from portattn.conformance.context import Context, Decided
from portattn.conformance.manifest import Manifest, ManifestError
from portattn.conformance.verdicts import Verdict

_PR_SET_PDEATHSIG = 1


def main(request_fd: int, answer_fd: int) -> int:
    """Serve until the parent closes the request pipe; the exit status is 0 then."""
    _die_with_parent()
    own = os.getpid()
    forks: list[int] = []
    os.register_at_fork(after_in_parent=lambda: forks.append(1))
    with os.fdopen(request_fd) as requests, os.fdopen(answer_fd, "w") as answers:
        ctx: Context | None = None
        catalogue: Mapping[str, Check] = {}
        for line in requests:
            request = json.loads(line)
            if "load" in request:
                ctx, answer = _load(request)
                module, _, name = request["catalogue"].partition(":")
                catalogue = getattr(importlib.import_module(module), name)
            else:
                assert ctx is not None
                forks.clear()
                case = Case.from_json(request["case"])
                started = time.perf_counter()
                outcome = _run(ctx, catalogue[case.check], case)
                if os.getpid() != own:
                    os._exit(0)  # a copy that the target forked; the original answers
                if forks and outcome.verdict is Verdict.PASS:
                    outcome = replace(
                        outcome, cause="forked", message="the target forked its process"
                    )
                answer = {
                    "outcome": outcome.to_json(),
                    "seconds": time.perf_counter() - started,
                    "restart": outcome.cause in ("device_lost", "oom"),
                }
            if os.getpid() != own:
                os._exit(0)
            _send(answers, answer)
    return 0


def _load(request: Mapping[str, Any]) -> tuple[Context | None, dict[str, Any]]:
    """The context, and what the parent wants to know of the target."""
    spec = request["load"]
    try:
        target = targets.load(spec)
        manifest = Manifest.parse(request.get("manifest") or target.manifest())
        ctx = Context(target, manifest, spec, request["catalogue"])
    except (targets.TargetError, ManifestError) as error:
        return None, {"error": str(error)}
    except BaseException as error:  # noqa: BLE001  a target may do anything here; the parent must hear of it
        return None, {"error": f"loading {spec!r} ended with {_name(error)}: {error}"}
    if request.get("memory") and manifest.device == "cpu":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = meters.status_bytes("VmSize") + int(request["memory"])
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return ctx, {
        "manifest": manifest.to_json(),
        "simulated": bool(getattr(target, "simulated", False)),
        "source": _source_hash(target),
        "packages": sorted(getattr(target, "packages", ())),
        "states": sorted(getattr(target, "states", ())),
    }


def _run(ctx: Context, check: Check, case: Case) -> Outcome:
    """One case; every way in which it can end without ending the process."""
    ctx.begin(case.id)
    try:
        outcome = check.run(ctx, case)
        # Decide now: a check that names an unknown cause is our fault, not the record's.
        verdict = outcome.verdict
    except Decided as decided:
        outcome = Outcome(cause=decided.cause, message=str(decided))
    except BaseException as error:  # noqa: BLE001  neither the target's nor ours to raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(
            cause="harness_error",
            message=f"{_name(error)}: {error} ({Path(where.filename).name}:{where.lineno})",
        )
    else:
        if ctx.outside:
            beyond = "; ".join(ctx.outside)
            if verdict in (Verdict.PASS, Verdict.QUALITY_WARNING):
                text = f"claim too narrow: {beyond}, and yet it is right"
                outcome = replace(outcome, cause="narrow_claim", message=text)
            elif verdict is not Verdict.NOT_RUN:
                text = f"accepted although {beyond}, and wrong: {outcome.message}"
                outcome = replace(outcome, message=text)
    if not outcome.digests:
        outcome = replace(outcome, digests=ctx.digests)
    return outcome


def _send(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer, default=_plain) + "\n")
    answers.flush()


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays in a check's ``worst`` as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _name(error: BaseException) -> str:
    return type(error).__name__


def _source_hash(target: Any) -> str:
    """A hash of what the target is made of: its own ``source_hash()``, else its module's file."""
    own = getattr(target, "source_hash", None)
    if own is not None:
        return str(own())
    module = sys.modules.get(getattr(target, "__module__", type(target).__module__))
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""


def _die_with_parent() -> None:
    """A killed parent takes its children with it, hung ones too (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

"""Waivers: known failures that somebody answers for, until a day.

The rule kept here: a waiver never hides anything. The outcome stays in the record beside who waived
it; one without a link and an end is refused, and one past its end is an error of its own.

A waiver file is TOML (``[[waiver]]`` tables) or JSON (a list), each with ``id`` (a check or a case,
``*`` allowed), ``url``, ``expires`` (a date) and ``device`` (part of the name of the GPU or CPU,
``*`` for any); ``reason`` may follow.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_KEYS = {"id", "url", "expires", "device", "reason"}


class WaiverError(ValueError):
    """The file cannot be used; the message names the entry and what is wanted."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """One known failure."""

    id: str
    url: str
    expires: date
    device: str
    reason: str = ""

    def covers(self, case_id: str, device: str) -> bool:
        """Does it speak of this case (by itself or by its check) on this device?"""
        check_id = case_id.partition("/")[0]
        named = fnmatchcase(case_id, self.id) or fnmatchcase(check_id, self.id)
        return named and (self.device == "*" or self.device.lower() in device.lower())

    def to_json(self) -> dict[str, str]:
        """As it stands in the record."""
        return {
            "id": self.id,
            "url": self.url,
            "expires": self.expires.isoformat(),
            "device": self.device,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "waiver") -> Waiver:
        """Validate one entry. Raises `WaiverError`."""
        if not isinstance(data, Mapping):
            raise WaiverError(f"{where}: {data!r}; wanted: a table with {', '.join(sorted(_KEYS))}")
        unknown, missing = set(data) - _KEYS, _KEYS - {"reason"} - set(data)
        if unknown or missing:
            raise WaiverError(
                f"{where}: unknown {sorted(unknown)}, missing {sorted(missing)}; wanted: id, url, "
                "expires, device, and reason if you like"
            )
        expires = data["expires"]
        if not isinstance(expires, date):
            try:
                expires = date.fromisoformat(str(expires))
            except ValueError as error:
                raise WaiverError(f"{where}: expires={expires!r}; wanted: 2027-01-31") from error
        texts = {key: data.get(key, "") for key in ("id", "url", "device", "reason")}
        for key, text in texts.items():
            if not isinstance(text, str) or (not text and key != "reason"):
                raise WaiverError(f"{where}: {key}={text!r}; wanted: a text that is not empty")
        return cls(expires=expires, **texts)


def read(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file. Raises `WaiverError`."""
    try:
        text = path.read_text()
        if path.suffix == ".json":
            entries = json.loads(text)
        else:
            table = tomllib.loads(text)
            if set(table) - {"waiver"}:
                raise WaiverError(f"{path}: unknown {sorted(set(table) - {'waiver'})}")
            entries = table.get("waiver", [])
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise WaiverError(f"{path}: {error}") from error
    if not isinstance(entries, list):
        raise WaiverError(f"{path}: wanted: a list of waivers")
    return tuple(
        Waiver.from_json(entry, f"{path}, waiver {n}") for n, entry in enumerate(entries, 1)
    )


def matching(waivers: Iterable[Waiver], case_id: str, device: str) -> Waiver | None:
    """The first waiver that covers the case."""
    return next((waiver for waiver in waivers if waiver.covers(case_id, device)), None)

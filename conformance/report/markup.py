"""HTML by functions: what is not markup already is escaped.

The rule kept here: a record is someone else's text. Strings become part of a page through `text`
alone, and only what `element` built is taken as it stands, so that no name and no message of a
target can open a tag or turn the direction of the line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

# Controls, bidirectional overrides, and surrogates, which no encoding can write.
_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_ALONE = frozenset(("meta", "link", "input", "br"))


class Markup(str):
    """HTML that is safe to put into a page."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """``value`` as text: escaped, and a replacement character for what cannot be seen."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNSEEN.sub("\ufffd", str(value))))


def join(parts: Iterable[Any], between: str = "") -> Markup:
    """The parts one behind the other, strings escaped; None is left out."""
    return Markup(text(between).join(text(part) for part in parts if part is not None))


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """``<name attributes>children</name>``. ``class_`` stands for class and ``data_x`` for data-x;
    True is an attribute without a value, None and False are none at all."""
    given = "".join(
        f" {_attribute(key)}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _ALONE:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")

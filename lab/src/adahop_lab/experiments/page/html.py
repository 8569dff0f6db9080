"""HTML by hand: what is not HTML already is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *inside: Any, **attributes: Any) -> Html:
    """<name attributes>inside</name>; `class_` is class, `data_label` data-label; None and False are left out.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    parts = [name]
    for key, value in attributes.items():
        word = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(word)
        elif value is not None and value is not False:
            parts.append(f'{word}="{escape(str(value))}"')
    return Html(f"<{' '.join(parts)}>{join(*inside)}</{name}>")


def join(*parts: Any) -> Html:
    """Parts one after another; lists are their items, None is nothing."""
    out = []
    for part in parts:
        if isinstance(part, Html):
            out.append(str(part))
        elif isinstance(part, list | tuple):
            out.append(str(join(*part)))
        elif part is not None:
            out.append(escape(str(part), quote=False))
    return Html("".join(out))


def wide(heads: Sequence[str], rows: list[Html], what: str, **attributes: Any) -> Html:
    """A table with a head that may be scrolled sideways, by keyboard too."""
    head = tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads]))
    return scrolled(tag("table", head, tag("tbody", rows), **attributes), what)


def scrolled(table: Html, what: str) -> Html:
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=what)

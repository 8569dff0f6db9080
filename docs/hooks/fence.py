"""For the API pages: a docstring's example (lines from >>> to the next blank one) as a code block."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Fence(griffe.Extension):
    """Markdown would read >>> as a quotation of a quotation of a quotation."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if not obj.is_alias and obj.docstring and "```" not in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```", obj.docstring.value)

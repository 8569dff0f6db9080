"""Cell files are YAML of one plain kind: `key: value` lines, so that no YAML package is needed to read them.

A value is a number, true, false, null, a [list] or {"map": 1} as in JSON, or words. `key: >-` is followed by indented
lines that are one text. Whatever this reads, a YAML reader reads alike; what it could read differently is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from adahop.checks import InputError

KEY = re.compile(r"([a-z_]+):(?: (.*))?")
WORDS = re.compile(r"[A-Za-z](?!.*(: | #|:$)).*")
ELSE = {
    "yes",
    "no",
    "on",
    "off",
    "y",
    "n",
    "true",
    "false",
    "null",
}  # YAML 1.1 takes these, in any case, for other things


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a cell file."""
    found: dict[str, Any] = {}
    open_key = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if open_key and line.startswith("  "):
            found[open_key] = f"{found[open_key]} {line.strip()}".strip()
            continue
        if not line.strip() or line.startswith("#"):
            continue
        match = KEY.fullmatch(line.rstrip())
        if match is None or match[1] in found:
            raise InputError(f"line {number} of {path} must be `key: value` with a new key, got '{line}'")
        key, text = match[1], (match[2] or "").strip()
        open_key = key if text == ">-" else ""
        found[key] = "" if open_key else value(text, f"line {number} of {path}")
    return found


def value(text: str, where: str) -> Any:
    """A number, list, map or words."""
    try:
        return json.loads(text)
    except ValueError:
        if WORDS.fullmatch(text) and text.lower() not in ELSE:
            return text
        raise InputError(f"{where} must hold a JSON value or plain words, got '{text}'") from None

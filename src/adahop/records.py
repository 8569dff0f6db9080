"""What a run leaves on disk: config, metrics as they come, the best checkpoint. Files are whole or absent."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import torch

from adahop.checks import InputError


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, path)
    except OSError as e:
        raise InputError(f"{path} must be writable, got {e.strerror or e}") from None
    finally:
        beside.unlink(missing_ok=True)


class Records:
    """A folder for one command's runs."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise InputError(f"`out` must be a folder that can be written, got {folder} ({e.strerror})") from None

    def json(self, name: str, value: Any) -> None:
        write_whole(self.folder / name, (json.dumps(value, indent=2) + "\n").encode())

    def row(self, name: str, value: dict[str, Any]) -> None:
        """One more line of a JSONL file."""
        with open(self.folder / name, "a") as f:
            f.write(json.dumps(value) + "\n")

    def fresh(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def tensors(self, name: str, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.folder / name, buffer.getvalue())

"""`adahop train --resume DIR`: settings from the folder, flags that may be given with it, and rows to keep."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from adahop.checkpoint import Checkpoints
from adahop.checks import InputError, count
from adahop.cli import levels, numbers, pairs
from adahop.config import Config, as_said
from adahop.records import Records, sweep

CHECKPOINTS = "checkpoints"
FREE = ("context", "resume", "checkpoint_every", "as_json")  # flags that do not change the run

READ: dict[str, Callable[[Any], Any]] = {  # flags whose text may say the same in several ways
    "noise": levels,
    "sizes": lambda text: numbers(text, "sizes"),
    "options": lambda texts: pairs(texts, "option"),
    "out": lambda folder: Path(folder).resolve(),
}


class Stopped:
    """The settings of a run that was stopped, from its config.json."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        settings = read_json(self.folder / "config.json", "`resume` must be a folder that `adahop train --out` wrote")
        try:
            self.dataset, seeds = settings.pop("dataset"), settings.pop("seeds")
            self.log_variance = count(settings.pop("log_variance", 0), 0, "log_variance")
            self.seeds = range(count(seeds[0], 0, "seeds"), seeds[-1] + 1)
            if not isinstance(self.dataset, str) or list(self.seeds) != seeds:
                raise InputError(f"`seeds` must be counted up, got {seeds}")
            self.config = Config(**as_said(settings))
        except InputError as e:
            raise InputError(f"in {self.folder / 'config.json'}, {e}") from None
        except (TypeError, KeyError, IndexError, AttributeError) as e:
            raise InputError(
                f"{self.folder / 'config.json'} must hold the settings of `adahop train`, got {type(e).__name__}: {e}"
            ) from None
        sweep(self.folder / CHECKPOINTS)

    def agrees(self, context: typer.Context) -> None:
        """InputError if a flag on the command line differs from the folder's settings."""
        for name, value in context.params.items():
            source = context.get_parameter_source(name)
            if name in FREE or source is None or source.name != "COMMANDLINE":
                continue
            if _meant(name, value) != _meant(name, self.flag(name)):
                flag = {"options": "option"}.get(name, name)
                raise InputError(
                    f"`{flag}` must be {self.flag(name)} or left out, as in {self.folder / 'config.json'}, got {value}"
                )

    def flag(self, name: str) -> Any:
        """The value of a flag."""
        known = {
            "dataset": self.dataset, "seed": self.seeds[0], "runs": len(self.seeds), "out": str(self.folder),
            "sizes": ",".join(map(str, self.config.sizes)), "log_variance": self.log_variance,
            "noise": str(self.config.noise).strip("()").replace(" ", ""),
            "options": [f"{k}={_word(v)}" for k, v in self.config.method_options.items()],
        }  # fmt: skip
        if name in known:
            return known[name]
        return getattr(self.config, name, self.config.model_options.get(name))


def _meant(name: str, value: Any) -> Any:
    """What the text of a flag says: 0 is 0.0, and a folder is the same with a slash behind it."""
    return READ.get(name, str)(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_json(path: Path, must: str = "") -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise InputError(
            f"{must or f'{path} must be readable'}, got {path.parent} ({path.name}: {e.strerror})"
        ) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} must be a JSON object, got something else")
    return found


def restarted(out: str | None) -> str | None:
    """The folder to resume when torchrun has restarted the same command after a failure."""
    again = out is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return out if again and (Path(str(out)) / "config.json").is_file() else None


def checkpoints(records: Records, seed: int, every: str, rank: int | None = None) -> Checkpoints:
    """The checkpoints of a seed's run, or of one rank's part of it.

    Rows of metrics.jsonl after the last checkpoint are deleted, since they will be written again.
    """
    name = f"seed{seed}" if rank is None else f"seed{seed}-rank{rank}"
    kept = Checkpoints(records.folder / CHECKPOINTS, every, name, lambda s: print(f"adahop: {s}", file=sys.stderr))
    state = kept.last()
    done = {"epochs": 0, "steps": 0} if state is None else state["result"]
    seen = ((state or {}).get("race") or {}).get("evaluations", 0)
    if state is not None:
        print(f"seed {seed} continues after step {done['steps']}, epoch {done['epochs']}", file=sys.stderr)

    def stays(row: dict[str, Any]) -> bool:
        if row.get("seed") != seed:
            return True
        if "evaluation" in row:
            return row["evaluation"] <= seen
        return row["epoch"] <= done["epochs"] if "epoch" in row else row.get("step", 0) <= done["steps"]

    records.keep("metrics.jsonl", stays)
    kept.writes = records.writes or rank is not None  # only a part's own rank has its state
    return kept

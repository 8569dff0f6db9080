"""Train, kill with SIGKILL at random moments, resume, and compare the end with that of an undisturbed run, bit by bit.

    python lab/benchmarks/soak.py --minutes 15 --kills 200 --out lab/benchmarks/results/soak.json

One warm process forks every run, so that a kill does not cost an import. Each run is `adahop train` as a user types
it, first with `--out` and after a kill with `--resume`. Counted: kills, ends of killed runs, ends that are the
same to the last bit (model, policy, memory, rows of metrics.jsonl, best checkpoint), files left over.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from adahop import cli
from adahop.methods import METHODS

DATA = [
    "--dataset",
    "synthetic:240,2400,8,3",
    "--hidden",
    "8",
    "--batch-size",
    "32",
    "--epochs",
    "4",
    "--dropout",
    "0.3",
]
NAMES = {"config.json", "metrics.jsonl", "result.json", "best-seed0.pt"}


def plans(methods: list[str]) -> list[list[str]]:
    """Every method drawn in step and ahead, and every kind of memory."""
    found = []
    for name in methods:
        sizes = "60,60" if METHODS[name].family == "layer-wise" else "3,3"
        found += [["--method", name, "--sizes", sizes, "--prefetch", p] for p in ("0", "2")]
    if "adahop" in methods:  # what the preset takes for attention, and a budget
        more = ("--model gat", "--model gat --heads 2 --prefetch 2", "--estimator plain --option budget=true")
        sizes = ("3,3", "3,3", "200,100")
        found += [["--method", "adahop", "--sizes", k, *text.split()] for k, text in zip(sizes, more, strict=True)]
    if "bs" in methods:
        more = ("--estimator exact+history", "--estimator snapshot --average 0.9", "--estimator history --model gat",
                "--option policy=tracked --prefetch 1", "--model geniepath", "--checkpoint-every auto")  # fmt: skip
        found += [["--method", "bs", "--sizes", "3,3", *text.split()] for text in more]
    return found


def child(args: list[str], end: Path, log: Path) -> None:
    """The command, in a process of its own; what the run holds at its end goes to `end`."""
    from adahop.cli import train

    fit = train.fit

    def noted(*given: Any, **named: Any) -> Any:
        result = fit(*given, **named)
        memory = {name: dict(m.state()) for name, m in result.model.memories.items()}
        state = {"model": result.model.state_dict(), "sampler": result.sampler.state_dict(), "memory": memory}
        torch.save(state, end)
        return result

    train.fit = noted  # type: ignore[assignment]
    with open(log, "w") as text, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        cli.main(args)


def run(args: list[str], end: Path, log: Path, after: float | None = None) -> int:
    """Fork and wait, or kill `after` so many seconds; the exit status, -9 where it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            child(args, end, log)
        except SystemExit as e:
            code = int(e.code or 0)
        except BaseException:  # nothing of the parent may run on in here
            import traceback

            with open(log, "a") as text:
                traceback.print_exc(file=text)
        os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def summary(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    return {**result, "runs": [{k: v for k, v in r.items() if k != "seconds"} for r in result["runs"]]}


def same(a: Any, b: Any) -> bool:
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def equal(one: Path, other: Path) -> bool:
    """Whether two runs ended alike: `<folder>` and `<folder>.end` of each."""
    load = lambda path: torch.load(path, weights_only=True)  # noqa: E731
    ends = same(load(f"{one}.end"), load(f"{other}.end"))
    best = same(load(one / "best-seed0.pt"), load(other / "best-seed0.pt"))
    return ends and best and rows(one) == rows(other) and summary(one) == summary(other)


class Soak:
    """Counts of what happened, and the undisturbed runs to compare with."""

    def __init__(self, home: Path, seed: int):
        self.home, self.random, self.count, self.by = home, random.Random(seed), Counter(), Counter()
        self.whole: dict[str, tuple[Path, float]] = {}
        self.wrong: list[dict[str, Any]] = []

    def undisturbed(self, plan: list[str]) -> tuple[Path, float]:
        name = " ".join(plan)
        if name not in self.whole:
            folder = self.home / f"whole{len(self.whole)}"
            for _ in range(2):  # the second is timed: the first may compile
                began = time.perf_counter()
                args = ["train", *DATA, "--checkpoint-every", "1", *plan, "--out", str(folder)]
                code = run(args, Path(f"{folder}.end"), Path(f"{folder}.log"))
                if code:
                    raise SystemExit(f"{name} ended with {code}: {Path(f'{folder}.log').read_text()[-2000:]}")
            self.whole[name] = folder, time.perf_counter() - began
        return self.whole[name]

    def once(self, plan: list[str]) -> None:
        """One run, killed once or twice, resumed until it ends."""
        reference, seconds = self.undisturbed(plan)
        folder = self.home / "run"
        shutil.rmtree(folder, ignore_errors=True)
        end, log = Path(f"{folder}.end"), Path(f"{folder}.log")
        end.unlink(missing_ok=True)
        begin = ["train", *DATA, "--checkpoint-every", str(self.random.choice([1, 2, 5])), *plan, "--out", str(folder)]
        kills, left = 0, set()
        for _ in range(self.random.choice([1, 1, 2])):
            code = run(self.next(begin, folder), end, log, self.random.uniform(0.0, seconds))
            kills += code == -9
            self.count["half-written, to be swept"] += len(list(folder.rglob(".*.part")))
            if code == 0:
                break
        self.count["kills"] += kills
        self.by[plan[1]] += kills
        if code:
            code = run(self.next(begin, folder), end, log)
        if not code:
            left = {p.name for p in folder.iterdir()} ^ NAMES
        good = not code and not left and equal(folder, reference)
        self.count["left over or lost"] += len(left)
        if kills:
            self.count["ends of killed runs"] += 1
            self.count["identical"] += good
        if not good:
            self.wrong.append({"plan": plan, "code": code, "left": sorted(left), "log": log.read_text()[-500:]})

    def next(self, begin: list[str], folder: Path) -> list[str]:
        return ["train", "--resume", str(folder)] if (folder / "config.json").exists() else begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--kills", type=int, default=200, help="stop after so many, if the minutes allow")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warm = io.StringIO()
    with contextlib.redirect_stdout(warm), contextlib.redirect_stderr(warm), contextlib.suppress(SystemExit):
        cli.main(["list"])
    todo = plans(list(METHODS) if given.methods == "all" else given.methods.split(","))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        soak, at = Soak(Path(home), given.seed), 0
        while soak.count["ends of killed runs"] < given.kills and time.monotonic() - began < 60 * given.minutes:
            soak.once(todo[at % len(todo)])
            at += 1
    report = {
        **soak.count, "kills by method": dict(soak.by), "minutes": round((time.monotonic() - began) / 60, 2),
        "wrong": soak.wrong, "seed": given.seed, "plans": len(todo),
    }  # fmt: skip
    text = json.dumps(report, indent=2)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    raise SystemExit(bool(soak.wrong))


if __name__ == "__main__":
    main()

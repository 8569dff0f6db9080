"""`adahop advise`: what to train one's own graph with."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adahop.checks import count
from adahop.cli.tables import show_table
from adahop.config import Config
from adahop.datasets import load
from adahop.diagnostics.advise import advise as measured
from adahop.diagnostics.advise import in_words
from adahop.records import json_text


def start(dataset: str, minutes: float, layers: int, seed: int, as_json: bool, **rest: Any) -> None:
    """Race and recommend; `rest` are settings of every candidate."""
    config = Config(sizes=(2,) * count(layers, 1, "layers"), **rest)
    data = load(dataset)
    console = Console(stderr=as_json)
    found = measured(data, config, minutes, count(seed, 0, "seed"), lambda sentence: print(sentence, file=sys.stderr))
    found = {"dataset": dataset, **found}
    found["recommended"]["command"] = command(dataset, found["recommended"], config)
    show(console, found)
    if as_json:
        print(json_text(found))


def command(dataset: str, chosen: dict[str, Any], config: Config) -> str:
    """`adahop train` with the settings that were raced; what is a default is left out."""
    usual = Config()
    words = ["adahop", "train", "--dataset", dataset, "--method", chosen["method"]]
    words += ["--sizes", ",".join(map(str, chosen["sizes"]))]
    for name in ("model", "arch", "hidden", "lr", "dropout", "batch_size", "device"):
        if getattr(config, name) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    return shlex.join(words)


def show(console: Console, found: dict[str, Any]) -> None:
    g = found["graph"]
    degree = g["degree"]
    same = "unknown" if g["homophily"] is None else f"{g['homophily']:.2f} ({g['homophily_by_chance']:.2f} by chance)"
    console.print(f"[bold]{escape(found['dataset'])}[/]: {g['nodes']:,} nodes, {g['edges']:,} edges")
    console.print(
        f"{g['training']:,} nodes to train on; degree: mean {degree['mean']:.1f}, median {degree['median']:.0f}, "
        f"maximum {degree['most']:,}; homophily {same}; {described(g)}"
    )
    room = ", ".join(f"layer {i + 1} {share}" for i, share in enumerate(in_words(found["learning"])))
    console.print(f"learned probabilities can remove at most this share of uniform sampling's variance: {room}")
    table = Table("method", "k", "ms per step", "MB kept", "variance", f"val {g['metric']}", "epochs", "rounds")
    for row in found["candidates"]:
        table.add_row(
            row["method"], str(row["k"]), f"{row['step_ms']:.1f}", f"{row['memory_mb']:.1f}", f"{row['variance']:.2g}",
            f"{row['val']:.4f}", str(row["epochs"]), str(row["rounds"]),
        )  # fmt: skip
    show_table(console, table)
    console.print(f"[bold]{escape(found['recommended']['command'])}[/]", soft_wrap=True)
    console.print(f"because: {escape(found['recommended']['why'])}")
    level = found["recommended"]["as_good"]
    doubt = f"not sure; as good within the error: {'; '.join(map(escape, level))}" if level else "clearly ahead of all"
    console.print(doubt if level or found["recommended"]["sure"] else "not sure: too few epochs")
    console.print("not tried: " + "; ".join(map(escape, found["not_tried"])))


def described(facts: dict[str, Any]) -> str:
    """The features, by node type where there are several."""
    if "relations" not in facts:
        return f"{facts['features']['columns']} features, {facts['features']['not zero']:.0%} not zero"
    each = ", ".join(f"{kind} {of['columns']}" for kind, of in facts["features"].items())
    return f"{len(facts['relations'])} relations; features of {each}"

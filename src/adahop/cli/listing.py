"""`adahop list`: every method, model and data set."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from adahop.cli import app


@app.command("list")
def listing(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """List the methods, models and data sets."""
    from adahop.datasets import DATASETS
    from adahop.methods import METHODS
    from adahop.models import MODELS

    methods = [
        {"name": m.name, "family": m.family, "unbiased": m.unbiased, "state": m.state} for m in METHODS.values()
    ]
    if as_json:
        print(json.dumps({"methods": methods, "models": list(MODELS), "datasets": list(DATASETS)}))
        return
    console = Console()
    table = Table("method", "family", "unbiased", "state kept", title="Methods")
    for m in methods:
        table.add_row(str(m["name"]), str(m["family"]), "yes" if m["unbiased"] else "no", str(m["state"]))
    console.print(table)
    table = Table("model", "what it is", title="Models")
    for name, model in MODELS.items():
        table.add_row(name, (model.__doc__ or "").strip().splitlines()[0])
    console.print(table)
    table = Table("data set", "what it is", title="Data sets")
    for name, about in DATASETS.items():
        table.add_row(name, about)
    console.print(table)

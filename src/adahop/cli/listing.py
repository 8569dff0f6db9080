"""`adahop list`: every method, model and data set."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adahop.cli.tables import show_table
from adahop.datasets import DATASETS, FORMS
from adahop.methods import METHODS
from adahop.models import MODELS


def start(as_json: bool) -> None:
    if as_json:
        facts = ("name", "family", "unbiased", "state")
        methods = [{k: getattr(m, k) for k in facts} for m in METHODS.values()]
        print(json.dumps({"methods": methods, "models": list(MODELS), "datasets": list(DATASETS)}))
        return
    console = Console()
    left_out = {m.name: [name for name in MODELS if name not in m.models] for m in METHODS.values()}
    table = Table("method", "family", "unbiased", "state kept", "not for", title="Methods")
    for m in METHODS.values():
        table.add_row(m.name, m.family, "yes" if m.unbiased else "no", escape(m.state), ", ".join(left_out[m.name]))
    show_table(console, table)
    console.print("In a typed graph, read per (relation, target) or per (relation, source) for per node.")
    for m in METHODS.values():
        if m.why_not:
            console.print(escape(m.why_not))
    about = {name: (model.__doc__ or "").strip().splitlines()[0] for name, model in MODELS.items()}
    for title, column, rows in (
        ("Models", "model", about),
        ("Data sets", "data set", DATASETS),
        ("Your own", "--dataset", FORMS),
    ):
        table = Table(column, "what it is", title=title)
        for name, what in rows.items():
            table.add_row(escape(name), escape(what))  # adahop[ogb] is no markup
        show_table(console, table)

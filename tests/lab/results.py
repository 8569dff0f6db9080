"""A folder of cells and results as `adahop reproduce` leaves them, made up and small, for tests of the report."""

from __future__ import annotations

import random
from pathlib import Path

from adahop_lab.experiments.catalogue import cells_of
from adahop_lab.experiments.store import Store

MADE = {"commit": "0" * 40, "versions": {"adahop": "0.1.0", "torch": "2.13.0"}}
MACHINE = {"system": "Linux", "cores": 2, "jobs": 1, "device": "a processor"}
LEVEL = {"graphsage": 0.6, "fastgcn": 0.8275, "gcn-bs": 0.8552, "gcn-bs-m": 0.8551}


def write_cells(home: Path, note: str = "Told here.") -> Path:
    """Cora with four rows, one of them far from the paper's and with a note; Reddit with one; stars; sample sizes."""
    for place, name, more in (
        ("table2/cora/graphsage", "GraphSAGE", "method: graphsage\n" + (f"note: {note}\n" if note else "")),
        ("table2/cora/fastgcn", "FastGCN", "method: fastgcn\n"),
        ("table2/cora/gcn-bs", "GCN-BS", "method: bs\nchosen: By validation.\n"),
        ("table2/cora/gcn-bs-m", "GCN-BS.M", "method: bs.m\n"),
        ("table2/reddit/gcn-bs", "GCN-BS", "method: bs\n"),
        ("sample-size/ppi_rebuilt_labels/residual-gcn-bs", "GCN-BS", "method: bs\nks: [1, 2, 10]\n"),
        ("sample-size/ppi_rebuilt_labels/residual-ladies", "LADIES", "method: ladies\nks: [1, 2, 10]\n"),
        ("sample-size/ppi_rebuilt_labels/residual-graphsaint", "GraphSAINT", "method: graphsaint\n"),
        ("regret/stars/bs", "BS", "method: bs\ndegree: 50\ndraws: 10\nvisits: 100\n"),
        ("regret/stars/oracle", "oracle <b>", "method: graphsage\ndegree: 50\ndraws: 10\nvisits: 100\n"),
        ("ogb/ogbn-proteins/gp-bs", "GP-BS", "method: bs\nmodel: geniepath\n"),
    ):
        path = home / f"{place}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"name: {name}\n{more}")
    return home


def write_results(cells: Path, out: Path, seeds: int = 3) -> Path:
    """Every cell but Reddit's and ogb's."""
    store, rng = Store(out), random.Random(0)
    for name in ("table2", "sample-size", "regret", "timing"):
        for cell in cells_of(name, cells):
            if cell.dataset in ("reddit", "ogbn-proteins"):
                continue
            for seed in range(seeds):
                found, spent = _run(name, cell.row, seed, cell.k, rng)
                data = {
                    "nodes": 10,
                    "edges": 20,
                    "training": 5,
                    "note": "rebuilt labels" if "ppi" in cell.dataset else "",
                }
                about = {"metric": "accuracy", "data": data, "config": {"arch": "residual"}}
                kept = {**found, "seed": seed, "with": MADE, "about": about, "settings": cell.settings}
                store.keep(cell, f"seed-{seed}", kept, {**spent, "seed": seed, "machine": MACHINE})
            store.join(cell, cell.settings, None)
    return out


def _run(name: str, row: str, seed: int, k: int | None, rng: random.Random) -> tuple[dict, dict]:
    if name == "timing":
        return {"steps": 5, "epochs": 3}, {"seconds": 1.0, "sampling": [0.1] * 3, "model": [0.2] * 3}
    if name == "regret":
        rows = [{"visits": t, "variance": 0.1, "effective": 1.0 + 0.5 / (1 + t)} for t in (0, 1, 10, 100)]
        return {"rows": rows, "mean": 0.5, "least": 0.4, "bound": 110.0}, {"seconds": 1.0}
    score = LEVEL.get(row, 0.7) + 0.001 * rng.random() + 0.0004 * seed
    history = {"val": [score * (1 - 0.5 / (e + 1)) for e in range(20)], "loss": [1.0] * 20}
    found = {"test": score, "val": score, "best_epoch": 20, "epochs": 20, "steps": 100, "history": history}
    if k is not None:
        found["layers"] = [{"layer": 2, "variance": 2.0 / k, "relative": 0.5 / k, "over_uniform": 0.9, "error": 0.0}]
    return found, {"seconds": 2.0, "training": [0.1 * (e + 1) ** 1.5 for e in range(20)]}

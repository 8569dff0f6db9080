"""A small typed graph, models on it, and their sums written out: what tests of typed graphs share."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from adahop import models
from adahop.features import TypedFeatures
from adahop.graph import Graph

COUNTS = {"paper": 40, "author": 25, "venue": 4, "tag": 6}
# two relations between the same types, one from a type to itself, one without edges, a type that nothing points to
RELATIONS = (
    ("author", "writes", "paper"),
    ("author", "reviews", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "by", "author"),
    ("paper", "in", "venue"),
    ("venue", "of", "paper"),
    ("tag", "on", "paper"),
    ("tag", "like", "venue"),
)
WIDTHS = {"paper": 5, "author": 3, "venue": 0, "tag": 4}


def typed_data(bare: bool = False, seed: int = 0) -> SimpleNamespace:
    """A random typed graph with multi-edges and isolated nodes; papers have labels."""
    g = torch.Generator().manual_seed(seed)
    edges = {}
    for r, (s, _, t) in enumerate(RELATIONS):
        many = 0 if r == len(RELATIONS) - 1 else 6 * COUNTS[t]
        src = torch.randint(COUNTS[s], (many,), generator=g)
        dst = torch.randint(max(COUNTS[t] - 3, 1), (many,), generator=g)
        edges[RELATIONS[r]] = torch.stack([src, dst])
    tables = {t: torch.randn(n, WIDTHS[t], generator=g) for t, n in COUNTS.items() if WIDTHS[t]}
    if not bare:
        tables["venue"] = torch.randn(COUNTS["venue"], 2, generator=g)
    n = sum(COUNTS.values())
    y = torch.full((n,), -1)
    y[:40] = torch.randint(3, (40,), generator=g)
    masks = {k: torch.zeros(n, dtype=torch.bool) for k in ("train_mask", "val_mask", "test_mask")}
    for k, part in zip(masks, (slice(0, 20), slice(20, 30), slice(30, 40)), strict=True):
        masks[k][part] = True
    x = TypedFeatures(tables, COUNTS, RELATIONS)
    data = SimpleNamespace(
        graph=Graph._typed(COUNTS, edges), x=x, y=y, classes=3, metric="accuracy", edges=edges, **masks
    )
    data.to = lambda device: data
    return data


def build(name: str, data: SimpleNamespace, **options) -> models.TypedGNN:
    torch.manual_seed(0)
    return models.make(name, data.x.schema, 8, 3, **options)


def batch_of(data: SimpleNamespace, blocks: list) -> SimpleNamespace:
    return SimpleNamespace(x=data.x[blocks[0].n_id], blocks=blocks, y=data.y[blocks[-1].targets])


def dense(data: SimpleNamespace) -> list[torch.Tensor]:
    """[N, N] per relation: the mean over its edges, multi-edges counted."""
    starts, n, out = data.x.schema.starts, len(data.x), []
    for s, name, t in RELATIONS:
        a = torch.zeros(n, n)
        src, dst = data.edges[s, name, t]
        a.index_put_((dst + starts[t], src + starts[s]), torch.ones(len(src)), accumulate=True)
        out.append(a / a.sum(1, keepdim=True).clamp(min=1))
    return out


def encoded(model: models.TypedGNN, data: SimpleNamespace) -> torch.Tensor:
    rows = []
    for (t, n), each in zip(COUNTS.items(), model.encode.each, strict=True):
        x = data.x.tables[t]
        rows.append(each(torch.arange(n)) if x is None else each(x))
    return torch.cat(rows)


def own(maps, h: torch.Tensor) -> torch.Tensor:
    return torch.cat([each(part) for each, part in zip(maps, h.split(list(COUNTS.values())), strict=True)])


def plain_outputs(model, graph, data) -> torch.Tensor:
    """The exact outputs, memories left alone."""
    kept, model.memories = model.memories, torch.nn.ModuleDict()
    out = model.inference(graph, data.x)
    model.memories = kept
    return out

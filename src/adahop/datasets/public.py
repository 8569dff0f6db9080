"""Public data sets through PyG and ogb; a failed download is one sentence."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.datasets import PPI, Flickr, Planetoid, Reddit2
from torch_geometric.utils import to_undirected

from adahop.checks import InputError
from adahop.datasets.base import Dataset, make
from adahop.datasets.typed import TypedDataset, labelled_type, make_typed, with_reverses
from adahop.graph import Graph

SPELT = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed", "reddit": "Reddit2", "flickr": "Flickr"}


def _fetch(name: str, where: Path, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except ImportError as e:
        raise InputError(
            f"data set '{name}' must have the package {e.name}: pip install 'adahop[datasets]', got none"
        ) from None
    except (Exception, SystemExit) as e:  # ogb exits when a download is declined
        why = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise InputError(f"data set '{name}' must lie in {where} or be downloadable, got {why}") from None


def planetoid(name: str, root: Path) -> Dataset:
    """As in FastGCN: trained on all labelled nodes but the last 500; isolated test nodes are in no split."""
    spelt = SPELT[name]
    data = _fetch(name, root / spelt / "raw", lambda: Planetoid(str(root), spelt)[0])
    known = int(data.test_mask.nonzero()[0])  # the labelled nodes come before the first test node
    ids = torch.arange(known)
    splits = {"train": ids[: known - 500], "val": ids[known - 500 :], "test": data.test_mask}
    return make(name, Graph.from_data(data), data.x, data.y, splits)


def ppi(name: str, root: Path) -> Dataset:
    """Twenty training, two validation and two test graphs, as one disconnected graph."""
    home = root / "PPI"
    parts = _fetch(name, home / "raw", lambda: {s: list(PPI(str(home), s)) for s in ("train", "val", "test")})
    graphs = [g for part in parts.values() for g in part]
    offset = np.cumsum([0] + [g.num_nodes for g in graphs]).tolist()
    edges = torch.cat([g.edge_index + at for g, at in zip(graphs, offset[:-1], strict=True)], dim=1)
    x, y = torch.cat([g.x for g in graphs]), torch.cat([g.y for g in graphs])
    sizes = [sum(g.num_nodes for g in part) for part in parts.values()]
    splits = dict(zip(parts, torch.arange(offset[-1]).split(sizes), strict=True))
    return make(name, Graph.from_edge_index(edges, num_nodes=offset[-1]), x, y, splits)


def saint(name: str, root: Path) -> Dataset:
    """Reddit and Flickr as GraphSAINT released them."""
    home = root / SPELT[name]
    kind = {"reddit": Reddit2, "flickr": Flickr}[name]
    data = _fetch(name, home / "raw", lambda: kind(str(home))[0])
    splits = {part: data[f"{part}_mask"] for part in ("train", "val", "test")}
    return make(name, Graph.from_data(data), data.x, data.y, splits)


def ogbn(name: str, root: Path) -> Dataset:
    """Open Graph Benchmark; ogbn-proteins gets the mean of the features of its incoming edges."""
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError:
        raise InputError(f"data set '{name}' must have the package ogb: pip install adahop[ogb], got none") from None

    def build() -> tuple[Any, Any, Any]:
        with _trusted():
            source = NodePropPredDataset(name=name, root=str(root))
            return *source[0], source.get_idx_split()

    raw, y, splits = _fetch(name, root / name.replace("-", "_"), build)
    n, edges, x = int(raw["num_nodes"]), torch.from_numpy(raw["edge_index"]), raw["node_feat"]
    if x is None:
        x = _edge_means(raw["edge_index"][1], raw["edge_feat"], n)
    if name == "ogbn-arxiv":
        edges = to_undirected(edges, num_nodes=n)
    splits = {"train": splits["train"], "val": splits["valid"], "test": splits["test"]}
    metric = "roc-auc" if name == "ogbn-proteins" else None
    return make(name, Graph.from_edge_index(edges, num_nodes=n), x, y, splits, metric=metric)


@contextlib.contextmanager
def _trusted() -> Iterator[None]:
    """ogb caches parsed data as a pickle, which `torch.load` refuses since torch 2.6 without this variable."""
    word = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(word)
    os.environ[word] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f".*{word}")
            yield
    finally:
        os.environ.pop(word)
        os.environ.update({} if before is None else {word: before})


def _edge_means(dst: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Column by column: all edges' features at once would take much memory."""
    degree = np.maximum(np.bincount(dst, minlength=n), 1)
    columns = [np.bincount(dst, weights=values[:, j], minlength=n) / degree for j in range(values.shape[1])]
    return np.stack(columns, 1).astype(np.float32)


def typed(name: str, root: Path) -> TypedDataset:
    """PyG's data sets of several types; relations in one direction only get their reverse."""
    kind, options = KINDS[name]
    home = root / name
    made: Any = importlib.import_module("torch_geometric.datasets")
    data = _fetch(name, home, lambda: getattr(made, kind)(str(home), **options)[0])
    if name == "aminer":  # labels of some authors, and their ids beside
        for store in (data["author"], data["venue"]):
            y = torch.full((store.num_nodes,), -1)
            y[store.y_index] = store.y
            store.y = y
            del store.y_index
    target, splits = labelled_type(data)
    return make_typed(name, with_reverses(data), target, splits)


KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "dblp": ("DBLP", {}),
    "imdb": ("IMDB", {}),
    "ogbn-mag": ("OGB_MAG", {}),
    **{f"hgb-{name}": ("HGBDataset", {"name": name}) for name in ("acm", "dblp", "freebase", "imdb")},
    "aminer": ("AMiner", {}),
    "rcdd": ("RCDD", {}),
    "lastfm": ("LastFM", {}),
    "amazon-book": ("AmazonBook", {}),
    "movielens-100k": ("MovieLens100K", {}),
    "movielens-1m": ("MovieLens1M", {}),
    "taobao": ("Taobao", {}),
}
TYPED = {
    "dblp": "authors (4 classes), papers, terms, conferences; PyG's DBLP",
    "imdb": "movies (3 classes), directors, actors; PyG's IMDB",
    "ogbn-mag": "papers (349 classes), authors, institutions, fields, 1.9 M nodes; features of papers alone",
    "hgb-acm": "papers, authors, subjects, terms; the Heterogeneous Graph Benchmark's ACM",
    "hgb-dblp": "authors, papers, terms, venues; the Heterogeneous Graph Benchmark's DBLP",
    "hgb-freebase": "8 types, 36 relations; the Heterogeneous Graph Benchmark's Freebase",
    "hgb-imdb": "movies (5 labels), directors, actors, keywords; the Heterogeneous Graph Benchmark's IMDB",
    "aminer": "authors (8 areas), papers, venues, no features; PyG's AMiner",
    "rcdd": "items (fraud or not) and six other types, 13.8 M nodes; PyG's RCDD",
    "lastfm": "users, artists, tags, no labels; PyG's LastFM",
    "amazon-book": "users and books, no labels; PyG's AmazonBook",
    "movielens-100k": "users and movies, no labels; PyG's MovieLens100K",
    "movielens-1m": "users and movies, no labels; PyG's MovieLens1M",
    "taobao": "users, items, categories, no labels; PyG's Taobao",
}

SOURCES: dict[str, tuple[Callable[[str, Path], Dataset | TypedDataset], str]] = {
    **{name: (planetoid, "row") for name in ("cora", "citeseer", "pubmed")},
    "ppi": (ppi, "standard"),
    **{name: (saint, "standard") for name in ("reddit", "flickr")},
    **{name: (ogbn, "raw") for name in ("ogbn-proteins", "ogbn-arxiv", "ogbn-products")},
    **{name: (typed, "raw" if name == "ogbn-mag" else "auto") for name in KINDS},
}

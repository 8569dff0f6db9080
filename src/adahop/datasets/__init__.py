"""Data sets by name or path: `load("cora")`, `load("graph.npz")`, `load("synthetic:1000,20000,32,4")`."""

from __future__ import annotations

import os
from pathlib import Path

from torch_geometric.data import Data, HeteroData

from adahop.checks import InputError, KindError, one_of
from adahop.datasets.base import FEATURES, Dataset, prepare, with_own_features
from adahop.datasets.files import READERS, is_folder, of_pyg, open_folder, read
from adahop.datasets.made import digits, synthetic
from adahop.datasets.planted import planted
from adahop.datasets.public import SOURCES, TYPED
from adahop.datasets.texts import texts
from adahop.datasets.typed import TypedDataset, prepare_typed

__all__ = ["DATASETS", "FEATURES", "FORMS", "Dataset", "TypedDataset", "load"]

DATASETS = {
    "digits": "handwritten digits, 1,797 nodes, 10 nearest neighbours; comes along, no download",
    "cora": "citations, 2,708 nodes, 7 classes, full-supervised split 1208/500/1000",
    "citeseer": "citations, 3,327 nodes, 6 classes, full-supervised split 1812/500/1000",
    "pubmed": "citations, 19,717 nodes, 3 classes, full-supervised split 18217/500/1000",
    "ppi": "proteins, 24 disjoint graphs as one, 56,944 nodes, 121 labels, inductive",
    "reddit": "posts, 232,965 nodes, 11.6 M edges, 41 classes (the GraphSAINT release)",
    "flickr": "images, 89,250 nodes, 7 classes (the GraphSAINT release)",
    "ogbn-proteins": "proteins, 132,534 nodes, 39.6 M edges, 112 labels, ROC-AUC; needs adahop[ogb]",
    "ogbn-arxiv": "papers, 169,343 nodes, 40 classes, made undirected; needs adahop[ogb]",
    "ogbn-products": "products, 2,449,029 nodes, 61.9 M edges, 47 classes; needs adahop[ogb]",
    **TYPED,
}

FORMS = {
    "synthetic:N,E,F,C": "N nodes, about E directed edges, F features, C planted classes; a fifth number is the seed",
    "planted:N,E,F,C": "the same, but hard: labels show in the counts of neighbours' types; then signal=, fade=, own=, "
    "shift=, strength=, train=, wrong=, seed=; the best possible score is known",
    "texts:N,E,F,C": "N texts of F words, E links, C labels: sampling noise regularises here; then topics=, signal=, "
    "words=, told=, train=, seed=; the best possible score is bounded",
    "PATH.npz": "arrays indptr, indices, x, y, train_idx, val_idx, test_idx",
    "PATH.npz:SPLIT": "a typed graph: arrays edge__SRC__REL__DST, x__TYPE, y__TYPE, train_SPLIT, ...; counts in meta",
    "FOLDER": "written by `adahop convert --mmap`: mapped, for graphs beyond memory",
    "PATH.pt": "a saved PyG Data with x, y, edge_index, train_mask, val_mask, test_mask; or a HeteroData",
}


def load(
    name_or_path: str | Path | Data | HeteroData, root: str | Path | None = None, features: str = "auto"
) -> Dataset | TypedDataset:
    """A data set by name (see `DATASETS`), path, `synthetic:N,E,F,C`, `planted:N,E,F,C` or `texts:N,E,F,C`; or that of
    a PyG Data or HeteroData with labels and masks.

    Downloads go to `root`, by default the environment's ADAHOP_DATA or ~/.cache/adahop. `features` is what happens
    to x: "row" divides each row by its absolute sum; "standard" gives each column mean 0 and deviation 1 on the
    training nodes; "raw" leaves x unchanged; "auto" does what the papers do for a named set, and for a file decides by
    the data: rows when no entry is negative and there are more than 100 columns (words, counts), else "standard".

    >>> data = load("digits")
    >>> data.num_nodes, data.classes, data.metric
    (1797, 10, 'accuracy')
    """
    one_of(features, FEATURES, "features")
    if isinstance(name_or_path, Data | HeteroData):
        data, own = of_pyg(name_or_path, "data")
        return _prepared(data if (own, features) == ("raw", "auto") else with_own_features(data), own, features)
    if not isinstance(name_or_path, str | Path):
        raise KindError(f"`dataset` must be a name or a path, or a PyG Data, got {type(name_or_path).__name__}")
    if is_folder(Path(name_or_path).expanduser()):
        if features not in ("auto", "raw"):
            raise InputError(f"`features` of a mapped folder must be raw, as they were prepared before, got {features}")
        return open_folder(Path(name_or_path).expanduser())
    return _prepared(*_find(str(name_or_path), root), features)


def _prepared(data: Dataset | TypedDataset, own: str, features: str) -> Dataset | TypedDataset:
    kind = own if features == "auto" else features
    return prepare_typed(data, kind) if isinstance(data, TypedDataset) else prepare(data, kind)


def _find(name: str, root: str | Path | None) -> tuple[Dataset | TypedDataset, str]:
    """The data set with raw features, and how these are prepared by default."""
    if name.startswith("synthetic:"):
        return synthetic(name), "raw"
    if name.startswith("planted:"):
        return planted(name), "raw"
    if name.startswith("texts:"):
        return texts(name), "row"
    path, found, split = name.rpartition(".npz:")
    if found:
        return read(Path(f"{path}.npz").expanduser(), split)
    if Path(name).suffix in READERS or os.sep in name:
        return read(Path(name).expanduser())
    one_of(name.lower(), [*DATASETS, *FORMS], "dataset")
    if name.lower() == "digits":
        return digits(), "raw"
    source, own = SOURCES[name.lower()]
    home = root or os.environ.get("ADAHOP_DATA") or "~/.cache/adahop"
    return source(name.lower(), Path(home).expanduser()), own

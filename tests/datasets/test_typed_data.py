"""Typed data sets: the .npz layout, a saved HeteroData, and PyG's by name from small files in the real layout."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import adahop
from adahop import Graph, InputError
from adahop.datasets import TypedDataset
from adahop.datasets.typed import make_typed, with_reverses

RNG = np.random.default_rng(0)


def arrays(**changes) -> dict[str, np.ndarray]:
    """Papers with sparse features, authors with dense ones, subjects with none; two splits."""
    meta = {"kind": "hetero", "target": "paper", "nodes": {"paper": 20, "author": 9, "subject": 3}, "classes": 3}
    a = {
        "meta": np.array(json.dumps(meta)),
        "edge__paper__pa__author": np.stack([np.arange(20) % 20, np.arange(20) % 9]).astype(np.int32),
        "edge__paper__cites__paper": np.array([[0, 1, 1], [1, 0, 2]]),
        "edge__author__knows__author": np.zeros((2, 0), np.int32),
        "x__paper_indptr": np.arange(21), "x__paper_indices": np.arange(20) % 5, "x__paper_shape": np.array([20, 5]),
        "x__author": RNG.random((9, 4)).astype(np.float32) * 7,
        "y__paper": (np.arange(20) % 3).astype(np.int16),
    }  # fmt: skip
    for split, many in (("5", 5), ("8", 8)):
        a |= {f"train_{split}": np.arange(many), f"val_{split}": np.arange(10, 13), f"test_{split}": np.arange(15, 20)}
    for key, value in changes.items():
        if value is None:
            del a[key]
        else:
            a[key] = value
    return a


@pytest.fixture
def npz(tmp_path):
    def write(**changes):
        np.savez(tmp_path / "small.npz", **arrays(**changes))
        return tmp_path / "small.npz"

    return write


def test_the_typed_layout(npz):
    path = npz()
    data = adahop.load(path, features="raw")
    assert isinstance(data, TypedDataset) and data.target == "paper" and data.classes == 3 and data.name == "small"
    back = [("author", "rev_pa", "paper"), ("paper", "rev_cites", "paper")]
    assert data.edge_types[:3] == [
        ("paper", "pa", "author"),
        ("paper", "cites", "paper"),
        ("author", "knows", "author"),
    ]
    assert data.edge_types[3:] == back  # an empty relation of a type to itself is its own reverse
    assert data["paper"].x.shape == (20, 5) and "x" not in data["subject"] and data["subject"].num_nodes == 3
    assert data.train_idx.tolist() == list(range(8)) and data.y.shape == (32,) and int(data.y[20:].max()) == -1
    assert adahop.load(f"{path}:5").train_idx.tolist() == list(range(5))
    assert data.graph.num_nodes == 32 and tuple(data.edge_types) == data.graph.relations
    assert (data.task, data.metric) == ("multiclass", "accuracy")
    blocks = adahop.make("graphsage", data.graph, [2, 2]).sample(data.train_idx)
    assert blocks[-1].num_dst == 8 and {0, 1}.isdisjoint(blocks[-1].relation.tolist()) is False


def test_features_are_prepared_type_by_type(npz):
    data = adahop.load(npz())
    train = data["paper"].x[:8]
    assert float(train.mean(0).abs().max()) < 1e-6 and float(data["author"].x.mean(0).abs().max()) < 1e-5
    assert torch.allclose(data["author"].x.std(0, correction=0), torch.ones(4), atol=1e-5)


def test_a_directed_file_stays_as_it_is(npz):
    meta = {"nodes": {"paper": 20, "author": 9, "subject": 3}, "directed": True}
    data = adahop.load(npz(meta=np.array(json.dumps(meta))))
    assert len(data.edge_types) == 3 and data.target == "paper"


def test_what_is_there_both_ways_gets_no_reverse():
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 3, 4
    data["a", "to", "b"].edge_index = torch.tensor([[0, 2, 2], [3, 1, 1]])
    data["b", "of", "a"].edge_index = torch.tensor([[1, 3, 1], [2, 0, 2]])
    data["a", "like", "a"].edge_index = torch.tensor([[0, 1], [1, 0]])
    data["b", "like", "b"].edge_index = torch.tensor([[0, 1], [1, 2]])
    data["b", "like", "b"].edge_weight = torch.tensor([2.0, 3.0])
    new = [t for t in with_reverses(data).edge_types if t[1].startswith("rev_")]
    assert new == [("b", "rev_like", "b")] and data[new[0]].edge_index.tolist() == [[1, 2], [0, 1]]
    assert data[new[0]].edge_weight.tolist() == [2.0, 3.0]


MISTAKES = {
    "no counts": ({"meta": np.array("{}")}, "`meta` must have nodes"),
    "an unknown type": ({"edge__papr__x__author": np.zeros((2, 0), np.int32)}, "got 'papr'; did you mean 'paper'"),
    "a bad name": ({"edge__paper__author": np.zeros((2, 0), np.int32)}, "edge__SRC__REL__DST"),
    "an id too large": ({"edge__paper__pa__author": np.array([[0], [9]])}, r"pa.*\[0, 9\).*= 9"),
    "features too short": ({"x__author": np.zeros((8, 4), np.float32)}, r"data\['author'\].x.* 9 in all, got 8"),
    "features of no type": ({"x__autor": np.zeros((9, 4), np.float32)}, "got 'autor'; did you mean 'author'"),
    "labels too short": ({"y__paper": np.zeros(19, np.int16)}, "`y` must have one row per node, 20"),
    "no labels": ({"y__paper": None}, "y__paper"),
    "a seed out of range": ({"train_8": np.full(9, 20)}, r"train_idx.* \[0, 20\)"),
    "a split without a part": ({"val_8": None, "test_5": None}, "train_idx, val_idx and test_idx"),
    "an unreadable matrix": ({"x__paper_indptr": np.arange(20)}, "CSR matrix"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_a_file_is_one_sentence(what, npz):
    changes, words = MISTAKES[what]
    with pytest.raises(InputError, match=words) as told:
        adahop.load(npz(**changes))
    assert "\n" not in str(told.value) and "small.npz" in str(told.value)


def test_an_unknown_split_is_named(npz):
    with pytest.raises(InputError, match="`split` must be one of 5, 8, got '9'"):
        adahop.load(f"{npz()}:9")


# --- .pt ------------------------------------------------------------------------------------------------------------


def hetero() -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.rand(10, 3), 4
    data["a"].y = torch.arange(10) % 2
    data["a"].train_mask = torch.arange(10) < 6
    data["a"].test_mask = torch.arange(10) >= 8
    data["b", "to", "a"].edge_index = torch.tensor([[0, 3], [9, 0]])
    return data


def test_a_saved_hetero_data(tmp_path):
    torch.save(hetero(), tmp_path / "h.pt")
    data = adahop.load(tmp_path / "h.pt", features="raw")
    assert data.edge_types == [("b", "to", "a")] and data.target == "a" and data.test_idx.tolist() == [8, 9]
    assert data.val_idx.numel() == 1 and sorted([*data.train_idx.tolist(), *data.val_idx.tolist()]) == list(range(6))
    torch.save(data, tmp_path / "again.pt")
    again = adahop.load(tmp_path / "again.pt")
    assert torch.equal(again["a"].x, data["a"].x) and again.graph.hash() == data.graph.hash()


def test_a_saved_hetero_data_without_labels_or_splits(tmp_path):
    data = hetero()
    del data["a"].train_mask, data["a"].test_mask
    torch.save(data, tmp_path / "h.pt")
    parts = adahop.load(tmp_path / "h.pt")
    assert [parts.train_idx.numel(), parts.val_idx.numel(), parts.test_idx.numel()] == [6, 2, 2]
    del data["a"].y
    torch.save(data, tmp_path / "h.pt")
    plain = adahop.load(tmp_path / "h.pt")
    assert plain.target is None and plain.graph.num_nodes == 14
    with pytest.raises(InputError, match="must have labels"):
        _ = plain.train_idx

    with pytest.raises(InputError, match="`splits` must have train, val, test, got train"):
        make_typed("h", hetero(), "a", {"train": [0, 1]})
    with pytest.raises(InputError, match="`splits` must have train, val, test, got none"):
        make_typed("h", hetero(), "a")
    wrong = hetero()
    wrong["a"].x = wrong["a"].x.to(torch.complex64)
    with pytest.raises(InputError, match=r"`data\['a'\].x` must hold real numbers, got dtype torch.complex64"):
        make_typed("h", wrong, None)


# --- PyG's by name ----------------------------------------------------------------------------------------------------


def both_ways(counts: dict[str, int], pairs: list[tuple[str, str]], path) -> None:
    """One adjacency matrix over all types, as MAGNN's files have it."""
    import scipy.sparse as sp

    start = dict(zip(counts, np.cumsum([0, *counts.values()]), strict=False))
    a = sp.lil_matrix((sum(counts.values()),) * 2)
    for one, other in pairs:
        for i in range(counts[one]):
            u, v = start[one] + i, start[other] + i % counts[other]
            a[u, v] = a[v, u] = 1
    sp.save_npz(path, a.tocsr())


def magnn(raw, counts: dict[str, int], pairs, features: list[str], target: str) -> None:
    import scipy.sparse as sp

    raw.mkdir(parents=True)
    both_ways(counts, pairs, raw / "adjM.npz")
    for i, kind in enumerate(features):
        sp.save_npz(raw / f"features_{i}.npz", sp.csr_matrix(RNG.random((counts[kind], 6))))
    n = counts[target]
    np.save(raw / "labels.npy", np.arange(n) % 3)
    idx = np.arange(n)
    np.savez(
        raw / "train_val_test_idx.npz", train_idx=idx[: n // 2], val_idx=idx[n // 2 : n - 2], test_idx=idx[n - 2 :]
    )


def test_imdb_and_dblp(tmp_path):
    counts = {"movie": 12, "director": 4, "actor": 7}
    magnn(tmp_path / "imdb" / "raw", counts, [("movie", "director"), ("movie", "actor")], list(counts), "movie")
    data = adahop.load("imdb", root=tmp_path)
    assert data.target == "movie" and data.graph.types.num_nodes == counts and len(data.edge_types) == 4
    assert data.classes == 3 and data.train_idx.numel() == 6
    counts = {"author": 12, "paper": 8, "term": 5, "conference": 2}
    raw = tmp_path / "dblp" / "raw"
    pairs = [("author", "paper"), ("paper", "term"), ("paper", "conference")]
    magnn(raw, counts, pairs, ["author", "paper"], "author")
    np.save(raw / "features_2.npy", RNG.random((5, 6)))
    np.save(raw / "node_types.npy", np.repeat(np.arange(4), list(counts.values())))
    data = adahop.load("dblp", root=tmp_path)
    assert data.target == "author" and len(data.edge_types) == 6 and "x" not in data["conference"]


def test_ogbn_mag(tmp_path):
    pd = pytest.importorskip("pandas")
    raw = tmp_path / "ogbn-mag" / "mag" / "raw"

    def table(name: str, values, header=False) -> None:
        path = raw / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(values).to_csv(path, header=header, index=False, compression="gzip")

    table("node-feat/paper/node-feat", RNG.random((10, 4)).astype(np.float32))
    table("node-feat/paper/node_year", np.full(10, 2015))
    table("node-label/paper/node-label", np.arange(10) % 4)
    table("num-node-dict", {"author": [6], "institution": [2], "field_of_study": [3], "paper": [10]}, header=True)
    ends = {"author___affiliated_with___institution": (6, 2), "author___writes___paper": (6, 10)}
    ends |= {"paper___cites___paper": (10, 10), "paper___has_topic___field_of_study": (10, 3)}
    for relation, (a, b) in ends.items():
        table(f"relations/{relation}/edge", np.stack([np.arange(12) % a, (np.arange(12) * 3 + 1) % b], 1))
    for part, ids in (("train", range(6)), ("valid", (6, 7)), ("test", (8, 9))):
        table(f"split/time/paper/{part}", list(ids))
    data = adahop.load("ogbn-mag", root=tmp_path)
    assert len(data.edge_types) == 8 and data.target == "paper" and data.classes == 4
    assert data.graph.types.num_nodes == {"paper": 10, "author": 6, "institution": 2, "field_of_study": 3}
    assert data.test_idx.tolist() == [8, 9] and data["paper"].x.shape == (10, 4)
    assert ("paper", "rev_writes", "author") in data.edge_types and ("paper", "rev_cites", "paper") in data.edge_types


def test_the_heterogeneous_graph_benchmark(tmp_path):
    raw = tmp_path / "hgb-acm" / "acm" / "raw" / "ACM"
    raw.mkdir(parents=True)
    cites, writes = ({"start": 0, "end": e, "meaning": m} for e, m in ((0, "paper-cite-paper"), (1, "paper-author")))
    info = {
        "node.dat": {"node type": {"0": "paper", "1": "author"}},
        "link.dat": {"link type": {"0": cites, "1": writes}},
        "label.dat": {"node type": {"0": {"0": "a", "1": "b"}}},
    }
    (raw / "info.dat").write_text(json.dumps(info))
    papers = [f"{i}\tp{i}\t0\t{i}.0,1.0" for i in range(10)]
    (raw / "node.dat").write_text("\n".join([*papers, *(f"{i}\ta{i}\t1" for i in range(10, 14))]) + "\n")
    links = [f"{i}\t{(i * 3 + 1) % 10}\t0\t1.0" for i in range(10)] + [f"{i}\t{10 + i % 4}\t1\t1.0" for i in range(10)]
    (raw / "link.dat").write_text("\n".join(links) + "\n")
    (raw / "label.dat").write_text("".join(f"{i}\tp{i}\t0\t{i % 2}\n" for i in range(5)))
    (raw / "label.dat.test").write_text("".join(f"{i}\tp{i}\t0\t{i % 2}\n" for i in range(5, 10)))
    data = adahop.load("hgb-acm", root=tmp_path)
    assert data.target == "paper" and data.test_idx.tolist() == [5, 6, 7, 8, 9] and data.val_idx.numel() == 1
    assert ("author", "rev_to", "paper") in data.edge_types and Graph.from_data(data).hash() == data.graph.hash()


def test_a_set_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch_geometric.datasets.imdb.download_url", lambda *_: (_ for _ in ()).throw(OSError("no net"))
    )
    with pytest.raises(InputError, match=r"data set 'imdb' must lie in .* or be downloadable, got OSError: no net"):
        adahop.load("imdb", root=tmp_path)

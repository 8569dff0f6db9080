"""Data sets: files, made ones, and the public ones read from small files in their raw layout."""

import json
import os
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import PPI, Flickr, Planetoid, Reddit2

import adahop
from adahop.checks import IdError, InputError, KindError
from adahop.datasets import DATASETS, FORMS, Dataset, load

SHARED = Path(__file__).parents[3] / "shared" / "data"  # real graphs, where they lie beside the repository
MANIFEST = json.loads((SHARED / "MANIFEST.json").read_text()) if (SHARED / "MANIFEST.json").is_file() else {}


def sound(data: Dataset) -> Dataset:
    """What holds for every data set."""
    n = data.num_nodes
    assert isinstance(data, Data) and data.graph.num_nodes == n
    assert data.x.dtype == torch.float32 and data.x.shape[0] == n
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool and masks.shape == (3, n) and int(masks.sum(0).max()) == 1
    assert data.train_idx.numel() == int(data.train_mask.sum()) > 0
    if data.task == "multilabel":
        assert data.y.dtype == torch.float32 and data.y.shape == (n, data.classes)
    else:
        assert data.y.dtype == torch.int64 and data.y.shape == (n,) and int(data.y.max()) < data.classes
    assert isinstance(data.note, str) and "edge_index" not in data.keys()  # noqa: SIM118
    return data


def standard(data: Dataset) -> bool:
    x = data.x[data.train_mask]
    ones = (x.std(0, correction=0) - 1).abs() < 1e-2
    return bool((x.mean(0).abs() < 1e-3).all()) and bool((ones | (x.abs().amax(0) < 1e-2)).all())


def rows(data: Dataset) -> bool:
    total = data.x.sum(1)
    return bool(((total - 1).abs() < 1e-3).logical_or(total == 0).all())


def sentence(message: str) -> None:
    assert "\n" not in message and " must " in message and ", got " in message and "Traceback" not in message


# --- the object ----------------------------------------------------------------------------------------------------


def test_edge_index_is_built_at_first_access():
    data = load("digits")
    assert "edge_index" not in data._store and "edge_index" in data
    assert data.num_edges == data.graph.num_edges and "edge_index" not in data._store
    assert torch.equal(data.edge_index, data.graph.edge_index())
    assert data.edge_index is data.edge_index


def test_pyg_reads_edges_without_asking_first():
    assert load("digits").is_undirected() and not load("digits").has_self_loops()


def test_to_moves_the_graph_too():
    data = load("digits").to("meta")
    assert data.x.device.type == data.graph.device.type == data.train_mask.device.type == "meta"
    assert load("digits").cpu().graph.device.type == "cpu"


def test_subgraph_takes_the_graph_along():
    data = load("digits")
    part = data.subgraph(data.train_mask)
    assert part.graph.num_nodes == part.num_nodes == int(data.train_mask.sum())
    inside = data.train_mask[data.edge_index].all(0)
    assert part.graph.num_edges == int(inside.sum()) < data.graph.num_edges


# --- digits and synthetic ------------------------------------------------------------------------------------------


def test_digits():
    data = sound(load("digits"))
    assert (data.num_nodes, data.classes, data.task, data.metric) == (1797, 10, "multiclass", "accuracy")
    assert [m.numel() for m in (data.train_idx, data.val_idx, data.test_idx)] == [1078, 360, 359]
    assert float(data.x.min()) == 0 and float(data.x.max()) == 1
    assert int(data.graph.degree().min()) >= 10
    src, dst = data.edge_index
    assert float((data.y[src] == data.y[dst]).float().mean()) > 0.9
    assert data.graph.hash() == load("digits").graph.hash()


def test_synthetic_has_what_was_asked_for():
    data = sound(load("synthetic:5000,100000,16,8"))
    assert (data.num_nodes, data.x.shape[1], data.classes, data.num_edges) == (5000, 16, 8, 100000)
    assert [m.numel() for m in (data.train_idx, data.val_idx, data.test_idx)] == [3300, 500, 1200]
    src, dst = data.edge_index
    assert bool((src != dst).all())
    assert abs(float((data.y[src] == data.y[dst]).float().mean()) - 0.7) < 0.02
    for degree in (data.graph.degree(), torch.bincount(src, minlength=5000)):  # hubs both ways
        assert int(degree.max()) > 10 * float(degree.float().mean()) > 15 * float(degree.median()) > 0
    pairs = torch.unique(src * 5000 + dst).numel()
    assert pairs > 0.9 * 100000
    assert data.graph.indices.dtype == torch.int32 and torch.equal(data.graph.first, data.graph.indptr[:-1])


def test_synthetic_features_tell_something_but_not_all():
    data = load("synthetic:5000,1000,16,8")
    means = torch.stack([data.x[data.train_mask & (data.y == c)].mean(0) for c in range(8)])
    guess = torch.cdist(data.x, means).argmin(1)
    assert 0.2 < float((guess == data.y)[data.test_mask].float().mean()) < 0.8


def test_synthetic_is_seeded():
    a, b, c = (load(f"synthetic:300,3000,4,3{seed}") for seed in ("", ",0", ",1"))
    assert torch.equal(a.x, b.x) and a.graph.hash() == b.graph.hash() and torch.equal(a.train_mask, b.train_mask)
    assert not torch.equal(a.x, c.x) and a.graph.hash() != c.graph.hash()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_synthetic_chunks_fit_together(monkeypatch, chunk):
    monkeypatch.setattr("adahop.datasets.made.CHUNK", chunk)
    data = sound(load("synthetic:50,400,2,3"))
    assert data.num_edges == 400 and int(data.graph.indices.min()) >= 0 and int(data.graph.indices.max()) < 50


@pytest.mark.parametrize("spec", ["2,2,1,2", "3,6,1,2", "40,1560,2,40", "10,1,1,2"])
def test_synthetic_at_the_edges(spec):
    data = sound(load(f"synthetic:{spec}"))
    assert data.num_edges == int(spec.split(",")[1]) and int(data.graph.degree().max()) <= data.num_nodes


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "a,b,c,d",
        "10,20,3",
        "1,2,3,4,5,6",
        "10,20,3,1",
        "3,2,1,4",
        "10,91,3,2",
        "10,20,0,2",
        "10,-2,3,2",
        "9.5,2,3,2",
    ],
)
def test_a_bad_synthetic_spec_is_one_sentence(spec):
    with pytest.raises(InputError) as e:
        load(f"synthetic:{spec}")
    sentence(str(e.value))
    assert "N,E,F,C" in str(e.value)


# --- names ---------------------------------------------------------------------------------------------------------


def test_names_and_forms_are_described():
    assert {"digits", "cora", "ppi", "reddit", "ogbn-products"} <= set(DATASETS) and len(FORMS) == 7
    assert all(line and "\n" not in line for line in [*DATASETS.values(), *FORMS.values()])


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(InputError, match="did you mean 'citeseer'"):
        load("citeser")
    with pytest.raises(InputError, match="`features` must be one of auto, row, standard, raw, got 'rows'"):
        load("digits", features="rows")
    with pytest.raises(KindError, match="must be a name or a path, or a PyG Data, got int"):
        load(3)


@pytest.mark.parametrize("name", ["nowhere.npz", "nowhere.pt", "some/where", "table.csv/"])
def test_a_missing_file_is_one_sentence(name):
    with pytest.raises(InputError, match=r"must be a known name or an existing \.npz or \.pt file, got"):
        load(name)


# --- .npz ----------------------------------------------------------------------------------------------------------


def arrays(**change) -> dict:
    """A ring of six nodes; None removes an array."""
    a = {
        "indptr": np.arange(0, 13, 2),
        "indices": np.array([1, 5, 0, 2, 1, 3, 2, 4, 3, 5, 0, 4], np.int32),
        "x": np.arange(12, dtype=np.float32).reshape(6, 2),
        "y": np.array([0, 1, 2, 0, 1, 2], np.int16),
        "train_idx": np.array([0, 1, 2]),
        "val_idx": np.array([3]),
        "test_idx": np.array([4, 5]),
    }
    return {k: v for k, v in (a | change).items() if v is not None}


def ring(tmp_path, **change) -> Path:
    np.savez_compressed(tmp_path / "ring.npz", **arrays(**change))
    return tmp_path / "ring.npz"


def test_npz_dense(tmp_path):
    data = sound(load(str(ring(tmp_path))))
    assert (data.name, data.classes, data.num_edges, data.note) == ("ring", 3, 12, "")
    assert data.test_idx.tolist() == [4, 5] and standard(data)
    assert torch.equal(load(ring(tmp_path), features="raw").x, torch.arange(12.0).reshape(6, 2))


def test_npz_sparse_and_packed(tmp_path):
    x = sp.random(6, 150, 0.2, format="csr", random_state=0, dtype=np.float32)
    y = np.random.default_rng(0).random((6, 11)) < 0.5
    sparse = {"x": None, "x_indptr": x.indptr, "x_indices": x.indices, "x_shape": np.array(x.shape)}
    packed = {"y": None, "y_packed": np.packbits(y, axis=1), "y_shape": np.array(y.shape)}
    path = ring(tmp_path, **sparse, **packed, x_data=x.data, meta=json.dumps({"name": "six", "note": "rebuilt"}))
    data = sound(load(path))
    assert (data.name, data.task, data.metric, data.classes) == ("six", "multilabel", "micro-f1", 11)
    assert data.note == "rebuilt labels" and rows(data)
    assert np.array_equal(data.y.numpy(), y) and np.allclose(load(path, features="raw").x, x.toarray())
    assert set(load(ring(tmp_path, **sparse), features="raw").x.unique().tolist()) == {0.0, 1.0}


def test_the_rule_for_features(tmp_path):
    wide = np.random.default_rng(0).random((6, 101)).astype(np.float32)
    assert rows(load(ring(tmp_path, x=wide)))
    assert standard(load(ring(tmp_path, x=wide[:, :100])))
    assert standard(load(ring(tmp_path, x=wide - 0.5)))
    assert standard(load(ring(tmp_path, x=wide), features="standard"))


def test_constant_columns_and_empty_rows_stay_finite(tmp_path):
    x = np.full((6, 2), 0.1, np.float32)
    assert float(load(ring(tmp_path, x=x)).x.abs().max()) < 1e-6
    assert float(load(ring(tmp_path, x=0 * x), features="row").x.abs().max()) == 0


def test_unlabelled_nodes_may_lie_outside_the_splits(tmp_path):
    path = ring(tmp_path, y=np.array([0, 1, 2, 0, 1, -1]), test_idx=np.array([4]))
    assert load(path).classes == 3
    path = ring(tmp_path, y=np.array([0, 1, 2, 0, 1, np.nan]), test_idx=np.array([4]))
    assert load(path).y.tolist() == [0, 1, 2, 0, 1, -1]
    for none in (-1.0, np.nan):
        labels = np.array([[0.0, 1], [1, 1], [1, 0], [0, 0], [0, 1], [none, none]])
        data = load(ring(tmp_path, y=labels, test_idx=np.array([4])))
        assert data.classes == 2 and data.y[5].tolist() == [-1, -1]
        with pytest.raises(InputError, match=r"a label for every node of a split, got y\[5\] without one"):
            load(ring(tmp_path, y=labels))


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", ">i2", ">u4"])
def test_whole_numbers_of_any_kind(tmp_path, kind):
    """torch compares no unsigned numbers of 16 bits or more, and knows the machine's own byte order alone."""
    ids = {name: np.array(at, kind) for name, at in (("train_idx", [0, 1]), ("val_idx", [2]), ("test_idx", [4]))}
    data = load(ring(tmp_path, y=np.array([0, 1, 2, 0, 1, 2], kind), **ids))
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2] and data.train_idx.tolist() == [0, 1]
    several = load(ring(tmp_path, y=np.eye(6, 3).astype(kind), x=np.arange(12).reshape(6, 2).astype(kind)))
    assert several.classes == 3 and several.x.dtype == torch.float32
    if kind[0] != ">":  # a tensor has no byte order
        edges = torch.tensor([[0, 1], [1, 2]]).to(getattr(torch, np.dtype(kind).name))
        assert adahop.Graph.from_edge_index(edges).num_nodes == 3


BAD = {
    "no indptr": {"indptr": None},
    "no x": {"x": None},
    "half a sparse x": {"x": None, "x_indptr": np.arange(7), "x_shape": np.array([6, 2])},
    "no y": {"y": None},
    "no val_idx": {"val_idx": None},
    "indptr too short": {"indptr": np.arange(0, 11, 2)},
    "a neighbour out of range": {"indices": np.array([1, 5, 0, 2, 1, 3, 2, 4, 3, 5, 0, 6])},
    "x of five rows": {"x": np.zeros((5, 2), np.float32)},
    "flat x": {"x": np.zeros(6, np.float32)},
    "text x": {"x": np.full((6, 2), "a")},
    "complex x": {"x": np.ones((6, 2), np.complex64)},
    "complex y": {"y": np.ones(6, np.complex64)},
    "nan x": {"x": np.full((6, 2), np.nan, np.float32)},
    "y of five": {"y": np.zeros(5, np.int16)},
    "y negative": {"y": np.array([0, 1, -1, 0, 1, 2])},
    "y above the classes": {"meta": json.dumps({"classes": 2})},
    "y of fractions": {"y": np.array([0, 1, 0.5, 0, 1, 2])},
    "many labels not 0 or 1": {"y": np.full((6, 3), 2)},
    "classes no number": {"meta": json.dumps({"classes": "two"})},
    "a split id out of range": {"test_idx": np.array([4, 6])},
    "splits overlap": {"test_idx": np.array([0, 5])},
    "no training nodes": {"train_idx": np.array([], np.int64)},
    "split of fractions": {"val_idx": np.array([0.5])},
    "meta no JSON": {"meta": "{"},
    "meta a list": {"meta": "[]"},
    "pickled y": {"y": np.array([None] * 6)},
    "sparse x broken": {
        **{"x": None, "x_indptr": np.arange(7), "x_indices": np.full(6, 9), "x_shape": np.array([6, 2])},
    },
    "packed y too narrow": {"y": None, "y_packed": np.zeros((6, 1), np.uint8), "y_shape": np.array([6, 11])},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_bad_npz_is_one_sentence(tmp_path, change):
    with pytest.raises(InputError) as e:
        load(ring(tmp_path, **change))
    sentence(str(e.value))
    assert "ring" in str(e.value)


def test_an_id_out_of_range_is_an_index_error_too(tmp_path):
    with pytest.raises(IdError, match=r"`test_idx` must be in \[0, 6\), got test_idx\[1\] = 6"):
        load(ring(tmp_path, test_idx=np.array([4, 6])))


def test_a_damaged_or_foreign_file_is_one_sentence(tmp_path):
    whole = ring(tmp_path).read_bytes()
    one = tmp_path / "one.npy"
    np.save(one, np.zeros(3))
    damaged = whole[:60] + bytes(40) + whole[100:]
    for content in (whole[: len(whole) // 2], damaged, b"", b"hello, this is no archive", one.read_bytes()):
        for suffix in (".npz", ".pt"):
            path = (tmp_path / "bad").with_suffix(suffix)
            path.write_bytes(content)
            with pytest.raises(InputError) as e:
                load(path)
            sentence(str(e.value))


@pytest.mark.skipif(not MANIFEST, reason="the shared data files are not beside the repository")
@pytest.mark.parametrize("name", [n for n, known in MANIFEST.items() if "train_idx_n" in known])
def test_shared_files(name):
    known = MANIFEST[name]
    data = sound(load(SHARED / known["file"]))
    assert (data.name, data.num_nodes, data.num_edges) == (name, known["nodes"], known["directed_entries"])
    assert (data.x.shape[1], data.classes) == (known["features"], known["classes"])
    sizes = [data.train_idx.numel(), data.val_idx.numel(), data.test_idx.numel()]
    assert sizes == [known["train_idx_n"], known["val_idx_n"], known["test_idx_n"]]
    assert int((data.graph.first - data.graph.indptr[:-1]).sum()) == known["self_loops_kept"]
    assert int(data.graph.degree().max()) in (known["max_degree"], known["max_degree"] - 1)
    protein = name.startswith("ppi")
    assert (data.note, data.metric) == (("rebuilt labels", "micro-f1") if protein else ("", "accuracy"))
    assert standard(data) if protein or name == "tolokers" else rows(data)


@pytest.mark.skipif(not MANIFEST, reason="the shared data files are not beside the repository")
def test_a_shared_file_without_counts_of_its_split():
    known = MANIFEST["fb100_johnshopkins55"]
    data = sound(load(SHARED / known["file"]))
    assert (data.num_nodes, data.num_edges) == (known["nodes"], known["directed_entries"])
    assert (data.x.shape[1], data.classes) == (known["features"], known["classes"])


# --- .pt -----------------------------------------------------------------------------------------------------------


def saved(tmp_path, **change) -> Path:
    masks = torch.eye(3, dtype=torch.bool).repeat(1, 2)
    edges = torch.tensor([[5, 4, 3, 2, 1], [0, 1, 2, 3, 4]])
    parts = {"x": torch.randn(6, 3), "y": torch.tensor([0, 1, 2, 0, 1, 2]), "edge_index": edges}
    parts |= {"train_mask": masks[0], "val_mask": masks[1], "test_mask": masks[2]} | change
    torch.save(Data(**{k: v for k, v in parts.items() if v is not None}), tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


def test_a_pyg_data_is_loaded_as_its_file_is(tmp_path):
    kept = {"x": torch.rand(6, 3), "y": torch.tensor([0, 1] * 3), "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]])}
    masks = {f"{part}_mask": torch.arange(6) % 3 == i for i, part in enumerate(("train", "val", "test"))}
    data = Data(**kept, **masks)
    torch.save(data, tmp_path / "data.pt")
    one, two = load(data), load(tmp_path / "data.pt")
    assert torch.equal(one.x, two.x) and torch.equal(one.graph.indices, two.graph.indices) and one.metric == two.metric
    assert load(one) is not None and torch.equal(load(one).x, one.x)  # prepared features stay
    with pytest.raises(InputError, match=r"the Data must have the tensors y, .*got x, edge_index"):
        load(Data(x=data.x, edge_index=data.edge_index))


def test_load_leaves_the_users_data_as_it_is():
    """Features are prepared in a copy, of a Data, a HeteroData and a data set that was loaded before."""
    mask, x = torch.arange(6) % 3, torch.arange(12.0).reshape(6, 2)
    masks = {f"{part}_mask": mask == i for i, part in enumerate(("train", "val", "test"))}
    one = Data(x=x.clone(), y=mask, edge_index=torch.tensor([[0, 1], [1, 2]]), **masks)
    many = HeteroData({"a": {"x": x.clone(), "y": mask, **masks}, ("a", "to", "a"): {"edge_index": one.edge_index}})
    for data, features in ((one, lambda d: d.x), (many, lambda d: d["a"].x)):
        loaded = load(data)
        prepared = features(loaded).clone()
        assert torch.equal(features(data), x) and not torch.equal(prepared, x)
        assert torch.equal(features(load(data)), prepared)
        load(loaded, features="row")
        assert torch.equal(features(loaded), prepared) and load(loaded) is loaded


def test_pt(tmp_path):
    data = sound(load(saved(tmp_path)))
    assert data.edge_index.tolist() == [[5, 4, 3, 2, 1], [0, 1, 2, 3, 4]] and standard(data)
    assert (data.name, data.classes, data.train_idx.tolist()) == ("saved", 3, [0, 3])


def test_reading_a_pt_leaves_what_pyg_allows_alone(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    load(saved(tmp_path))
    assert set(torch.serialization.get_safe_globals()) == before and Data in before and Dataset not in before


def test_pt_with_several_splits_takes_the_first(tmp_path):
    masks = torch.zeros(6, 2, dtype=torch.uint8)
    masks[5, 0] = masks[0, 1] = 1
    assert load(saved(tmp_path, test_mask=masks)).test_idx.tolist() == [5]


def test_pt_keeps_edge_weights(tmp_path):
    data = load(saved(tmp_path, edge_weight=torch.arange(5.0)))
    assert data.graph.weight is not None and data.edge_weight.tolist() == [0, 1, 2, 3, 4]
    part = data.subgraph(torch.tensor([2, 3]))
    assert part.graph.edge_index().tolist() == [[1, 0], [0, 1]] and part.graph.weight.tolist() == [2, 3]


def test_a_saved_dataset_comes_back(tmp_path):
    data = load("digits")
    torch.save(data, tmp_path / "mine.pt")
    again = sound(load(tmp_path / "mine.pt"))
    assert torch.equal(again.x, data.x) and again.graph.hash() == data.graph.hash() and again.name == "digits"


@pytest.mark.parametrize(
    "change",
    [{"x": None}, {"y": None}, {"edge_index": None}, {"val_mask": None}]
    + [{"x": torch.zeros(5, 3)}, {"y": torch.zeros(5)}, {"edge_index": torch.full((2, 1), 6)}]
    + [{"train_mask": torch.ones(5, dtype=torch.bool)}, {"train_mask": torch.ones(6, dtype=torch.bool)}],
)
def test_a_bad_pt_is_one_sentence(tmp_path, change):
    with pytest.raises(InputError, match=r"saved\.pt") as e:
        load(saved(tmp_path, **change))
    sentence(str(e.value))


class Foreign:
    pass


@pytest.mark.parametrize("thing", [{"x": 1}, HeteroData(), Foreign()], ids=["dict", "hetero", "foreign"])
def test_a_pt_of_something_else_is_one_sentence(tmp_path, thing):
    torch.save(thing, tmp_path / "thing.pt")
    with pytest.raises(InputError) as e:
        load(tmp_path / "thing.pt")
    sentence(str(e.value))


# --- public sets, from small files in their raw layout -------------------------------------------------------------


def write_planetoid(root: Path, spelt: str, x: sp.csr_matrix, y: np.ndarray, graph: dict, test: np.ndarray) -> None:
    """Rows of x and y in the order of the files: `ally` first, then the test nodes by id."""
    raw = root / spelt / "raw"
    raw.mkdir(parents=True)
    hot, k = np.eye(y.max() + 1, dtype=np.int32)[y], x.shape[0] - len(test)
    parts = {"x": x[:4], "tx": x[k:], "allx": x[:k], "y": hot[:4], "ty": hot[k:], "ally": hot[:k], "graph": graph}
    for part, value in parts.items():
        (raw / f"ind.{spelt.lower()}.{part}").write_bytes(pickle.dumps(value))
    (raw / f"ind.{spelt.lower()}.test.index").write_text("".join(f"{i}\n" for i in test[::-1]))


def write_cycle(root: Path, spelt: str, gap: int = 0) -> None:
    """520 in `ally`, ten test nodes, `gap` isolated ids among them."""
    n = 530 + gap
    graph = {i: [(i + 1) % n, (i - 1) % n] for i in range(n)}
    graph[0] += [0, 1]  # a self-loop and a double, which PyG drops
    x = sp.csr_matrix((np.random.default_rng(0).random((530, 12)) < 0.3).astype(np.float32))
    write_planetoid(root, spelt, x, np.arange(530) % 3, graph, 520 + np.arange(10) + gap * (np.arange(10) >= 5))


@pytest.mark.parametrize("spelt,gap", [("Cora", 0), ("PubMed", 0), ("CiteSeer", 3)])
def test_planetoid(tmp_path, spelt, gap):
    write_cycle(tmp_path, spelt, gap)
    data = sound(load(spelt.lower(), root=tmp_path))
    assert (data.num_nodes, data.num_edges, data.classes) == (530 + gap, 2 * (530 + gap), 3)
    assert data.train_idx.tolist() == list(range(20)) and data.val_idx.tolist() == list(range(20, 520))
    assert data.test_idx.numel() == 10 and rows(data)
    isolated = ~(data.train_mask | data.val_mask | data.test_mask)
    assert isolated.nonzero().flatten().tolist() == list(range(525, 525 + gap))


@pytest.mark.skipif(not MANIFEST, reason="the shared data files are not beside the repository")
def test_planetoid_equals_the_shared_file(tmp_path):
    ours = load(SHARED / "cora.npz")
    at, to = ours.graph.indptr.tolist(), ours.graph.indices.tolist()
    graph = {i: to[at[i] : at[i + 1]] for i in range(ours.num_nodes)}
    x = sp.csr_matrix((ours.x > 0).float().numpy())
    # the files hold the test rows in the order of the test index, which here runs backwards
    y, k = ours.y.numpy(), ours.num_nodes - 1000
    x, y = sp.vstack([x[:k], x[k:][::-1]]).tocsr(), np.r_[y[:k], y[k:][::-1]]
    write_planetoid(tmp_path, "Cora", x, y, graph, np.arange(k, ours.num_nodes))
    theirs = load("cora", root=tmp_path)
    assert torch.allclose(theirs.x, ours.x) and torch.equal(theirs.y, ours.y)
    assert all(torch.equal(theirs[m], ours[m]) for m in ("train_mask", "val_mask", "test_mask"))
    assert set(map(tuple, theirs.edge_index.T.tolist())) == set(map(tuple, ours.edge_index.T.tolist()))


def test_ppi(tmp_path):
    rng = np.random.default_rng(0)
    raw = tmp_path / "PPI" / "raw"
    raw.mkdir(parents=True)
    for part, sizes in {"train": [4, 5], "valid": [3], "test": [6]}.items():
        n, starts = sum(sizes), np.cumsum([0, *sizes])
        links = [
            {"source": i, "target": i + 1} for a, k in zip(starts, sizes, strict=False) for i in range(a, a + k - 1)
        ]
        links = [{k: int(v) for k, v in link.items()} for link in links]
        graph = {"directed": False, "multigraph": False, "graph": {}, "nodes": [{"id": i} for i in range(n)]}
        (raw / f"{part}_graph.json").write_text(json.dumps(graph | {"links": links}))
        np.save(raw / f"{part}_feats.npy", np.c_[rng.random((n, 3)), np.ones(n)])
        np.save(raw / f"{part}_labels.npy", rng.integers(0, 2, (n, 5)))
        np.save(raw / f"{part}_graph_id.npy", np.repeat(np.arange(1, len(sizes) + 1), sizes))
    data = sound(load("ppi", root=tmp_path))
    assert (data.num_nodes, data.num_edges, data.classes) == (18, 2 * (3 + 4 + 2 + 5), 5)
    assert data.val_idx.tolist() == [9, 10, 11] and data.test_idx.tolist() == list(range(12, 18))
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor([4, 5, 3, 6]))
    assert bool((owner[data.edge_index[0]] == owner[data.edge_index[1]]).all())
    assert (data.task, data.metric) == ("multilabel", "micro-f1") and standard(data)


@pytest.mark.parametrize("name,folder", [("reddit", "Reddit2"), ("flickr", "Flickr")])
def test_reddit_and_flickr(tmp_path, name, folder):
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    adj = sp.random(20, 20, 0.2, format="csr", random_state=0)
    adj = (adj + adj.T).tocsr()
    np.savez(raw / "adj_full.npz", data=adj.data, indices=adj.indices, indptr=adj.indptr, shape=adj.shape)
    np.save(raw / "feats.npy", np.random.default_rng(0).normal(3, 2, (20, 4)))
    (raw / "class_map.json").write_text(json.dumps({str(i): i % 3 for i in range(20)}))
    (raw / "role.json").write_text(json.dumps({"tr": list(range(12)), "va": [12, 13, 14], "te": list(range(15, 20))}))
    data = sound(load(name, root=tmp_path))
    assert (data.num_nodes, data.num_edges, data.classes) == (20, adj.nnz, 3)
    assert data.train_idx.tolist() == list(range(12)) and data.val_idx.tolist() == [12, 13, 14] and standard(data)


class NodePropPredDataset:
    """ogb's reader as far as we use it: a cache of numpy arrays that `torch.load` must be let to read."""

    def __init__(self, name: str, root: str):
        rng = np.random.default_rng(0)
        home = Path(root) / name.replace("-", "_")
        edges = np.array([[0, 1, 2, 3], [1, 2, 3, 4]])
        proteins = name == "ogbn-proteins"
        graph = {"edge_index": edges, "num_nodes": 6, "node_feat": rng.random((6, 3), np.float32), "edge_feat": None}
        labels = np.array([[0], [1], [2], [0], [1], [2]])
        if proteins:
            graph |= {"node_feat": None, "edge_feat": np.arange(32, dtype=np.float32).reshape(4, 8)}
            graph["edge_index"] = np.c_[edges, edges[::-1]]
            graph["edge_feat"] = np.r_[graph["edge_feat"], graph["edge_feat"]]
            labels = rng.integers(0, 2, (6, 112))
        home.mkdir(parents=True)
        torch.save({"graph": graph, "labels": labels}, home / "data_processed", pickle_protocol=4)
        self.kept = torch.load(home / "data_processed")

    def __getitem__(self, i: int):
        return self.kept["graph"], self.kept["labels"]

    def get_idx_split(self) -> dict:
        return {"train": np.array([0, 1, 2]), "valid": np.array([3]), "test": np.array([4, 5])}


def fake_ogb(monkeypatch, reader) -> None:
    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = reader
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)


def test_ogbn(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    fake_ogb(monkeypatch, NodePropPredDataset)
    arxiv = sound(load("ogbn-arxiv", root=tmp_path))
    assert (arxiv.num_nodes, arxiv.num_edges, arxiv.classes, arxiv.metric) == (6, 8, 3, "accuracy")
    assert arxiv.is_undirected() and arxiv.val_idx.tolist() == [3]
    assert sound(load("ogbn-products", root=tmp_path)).num_edges == 4
    proteins = sound(load("ogbn-proteins", root=tmp_path))
    assert (proteins.classes, proteins.task, proteins.metric) == (112, "multilabel", "roc-auc")
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    assert proteins.x[:, 0].tolist() == [0, 4, 12, 20, 24, 0]  # means of the edges at 0, 1, 2, 3, 4; none at 5


def test_ogbn_without_the_extra_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(InputError, match=r"pip install adahop\[ogb\]") as e:
        load("ogbn-arxiv", root=tmp_path)
    sentence(str(e.value))


def offline(*args, **kwargs):
    raise OSError("no route\nto host")


@pytest.mark.parametrize(
    "name,folder",
    [("cora", "Cora/raw"), ("citeseer", "CiteSeer/raw"), ("pubmed", "PubMed/raw"), ("ppi", "PPI/raw")]
    + [("reddit", "Reddit2/raw"), ("flickr", "Flickr/raw"), ("ogbn-arxiv", "ogbn_arxiv")],
)
def test_a_failed_download_is_one_sentence(tmp_path, monkeypatch, name, folder):
    for source in (Planetoid, PPI, Reddit2, Flickr):
        monkeypatch.setattr(source, "download", offline)
    fake_ogb(monkeypatch, offline)
    with pytest.raises(InputError) as e:
        load(name, root=tmp_path)
    sentence(str(e.value))
    assert f"'{name}'" in str(e.value) and str(tmp_path / folder) in str(e.value)


def test_a_declined_ogb_download_does_not_end_the_program(tmp_path, monkeypatch):
    fake_ogb(monkeypatch, lambda name, root: sys.exit(-1))
    with pytest.raises(InputError, match="ogbn_products"):
        load("ogbn-products", root=tmp_path)


def test_root_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAHOP_DATA", str(tmp_path))
    write_cycle(tmp_path, "Cora")
    assert load("Cora").num_nodes == 530
    home = tmp_path / "unused"
    load("digits", root=home)
    assert not home.exists()

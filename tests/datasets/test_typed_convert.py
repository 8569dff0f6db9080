"""adahop convert of typed graphs: a table per relation and per type, numbers or names for ids, a saved HeteroData."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import adahop
from adahop import InputError, cli
from adahop.convert import convert

from test_typed_data import hetero  # isort: skip


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Users rate items (with weights) and know one another; items have features, users labels."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.csv").write_text("src,dst,weight\n" + "".join(f"{i % 6},{i % 4},{i + 1}.5\n" for i in range(9)))
    (tmp_path / "knows.tsv").write_text("0\t1\n5\t2\n5\t2\n3\t3\n")
    np.save("items.npy", np.random.default_rng(0).random((4, 3)))
    (tmp_path / "labels.csv").write_text("id,label\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(6)))
    return tmp_path


FILES = {
    "edge__user__rates__item": "rates.csv",
    "edge__user__knows__user": "knows.tsv",
    "x__item": "items.npy",
    "y__user": "labels.csv",
}


def test_a_table_per_relation_and_type(desk):
    meta = convert(FILES, "g.npz", split="random:50,25,25")
    assert meta["nodes"] == {"user": 6, "item": 4} and meta["class_names"] == ["a", "b"] and sum(meta["split"]) == 6
    assert meta["edges"] == {"user__rates__item": 9, "user__knows__user": 4}
    data = adahop.load("g.npz", features="raw")
    assert data.edge_types == [("user", "rates", "item"), ("user", "knows", "user")] and data.target == "user"
    assert data["user", "rates", "item"].edge_weight.tolist() == [i + 1.5 for i in range(9)]
    assert data["user", "knows", "user"].edge_index.tolist() == [[0, 5, 5, 3], [1, 2, 2, 3]]
    assert np.allclose(data["item"].x.numpy(), np.load("items.npy")) and data["user"].y.tolist() == [0, 1, 0, 1, 0, 1]


def test_the_command(desk, capsys):
    words = [f"{name}={path}" for name, path in FILES.items()]
    with pytest.raises(SystemExit) as left:
        cli.main(["convert", *words, "n__user=8", "--undirected", "--out", "g.npz"])
    assert not left.value.code
    assert "8 user, 4 item; edges: 9 user__rates__item" in capsys.readouterr().out
    data = adahop.load("g.npz")
    assert ("item", "rev_rates", "user") in data.edge_types and data["user"].num_nodes == 8
    assert data["user"].y.tolist() == [0, 1, 0, 1, 0, 1, -1, -1]


TABLES = {
    "e": {"src": ["bo", "al", "bo"], "dst": ["x", "y", "y"]},
    "like": {"src": ["y"], "dst": ["z"]},
    "users": {"id": ["al", "bo", "cy"], "f": [1.0, 2.0, 3.0]},
    "labels": {"id": ["bo", "al"], "label": [1, 0]},
}


def table(name: str, kind: str) -> str:
    columns = TABLES[name]
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        pytest.importorskip("pandas").DataFrame(columns).to_parquet(f"{name}.parquet")
    else:
        rows = [columns, *zip(*columns.values(), strict=True)]
        Path(f"{name}.csv").write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    return f"{name}.{kind}"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_names(desk, kind):
    files = {"edge__user__rates__item": "e", "edge__item__like__item": "like", "x__user": "users", "y__user": "labels"}
    convert({name: table(of, kind) for name, of in files.items()}, "g.npz", ids="names", split="random:50,25,25")
    data = adahop.load("g.npz", features="raw")
    assert data["user", "rates", "item"].edge_index.tolist() == [[1, 0, 1], [0, 1, 1]]  # items as they first come
    assert data["item", "like", "item"].edge_index.tolist() == [[1], [2]] and data["item"].num_nodes == 3
    assert data["user"].x.flatten().tolist() == [1.0, 2.0, 3.0] and data["user"].y.tolist() == [0, 1, -1]


def test_a_saved_hetero_data_and_a_graph_without_labels(desk):
    torch.save(hetero(), "h.pt")
    meta = convert("h.pt", "g.npz")
    assert meta["nodes"] == {"a": 10, "b": 4} and meta["split"] == [5, 1, 2]
    one, other = adahop.load("g.npz", features="raw"), adahop.load("h.pt", features="raw")
    assert one.graph.hash() == other.graph.hash() and torch.equal(one.train_idx, other.train_idx)
    assert torch.equal(one["a"].x, other["a"].x)
    convert({"edge__user__knows__user": "knows.tsv"}, "g.npz")
    bare = adahop.load("g.npz")
    assert bare.target is None and bare.graph.num_nodes == 6


def test_splits_from_a_folder(desk):
    (desk / "parts").mkdir()
    for part, ids in (("train", "0\n1\n4\n"), ("val", "5\n"), ("test", "2\n")):
        (desk / "parts" / f"{part}.csv").write_text(ids)
    convert(FILES, "g.npz", split="parts")
    assert adahop.load("g.npz").train_idx.tolist() == [0, 1, 4]


MISTAKES = {
    "an unknown type": ({"x__itme": "items.npy"}, {}, "got 'itme'; did you mean 'item'"),
    "a bad name": ({"edge__user__item": "rates.csv"}, {}, "edge__SRC__REL__DST"),
    "no file": ({"x__item": "none.npy"}, {}, "existing files, got none.npy"),
    "an id past the features": ({"x__item": "short.npy"}, {}, r"rates.csv, line 5: .* in \[0, 3\).* got 3"),
    "an id past the count": ({"n__user": 5}, {}, r"rates.csv, line 7: .* n__user=5, got 5"),
    "labels of two types": ({"y__item": "labels.csv"}, {}, "labels of one type"),
    "a split without labels": ({"y__user": None}, {"split": "random:60,20,20"}, "no type has labels"),
    "mapped": ({}, {"mmap": True}, "`mmap` must be False for a typed graph"),
    "no edges": ({"edge__user__rates__item": None, "edge__user__knows__user": None}, {}, "edges of a relation"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_sentence(what, desk):
    np.save("short.npy", np.ones((3, 2)))
    changes, options, words = MISTAKES[what]
    files = {k: v for k, v in {**FILES, **changes}.items() if v is not None}
    out = "folder" if options.get("mmap") else "g.npz"
    with pytest.raises(InputError, match=words) as told:
        convert(files, out, **options)
    assert "\n" not in str(told.value) and not (desk / "g.npz").exists()

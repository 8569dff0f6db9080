"""adahop convert: tables, OGB folders and saved Data become one .npz that loads; mistakes name file and line."""

from __future__ import annotations

import gzip
import os
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

import adahop
from adahop import cli
from adahop.checks import InputError
from adahop.convert import convert
from adahop.convert import tables as tables_module

EDGES = [(0, 1), (1, 2), (2, 0), (3, 0), (4, 3), (0, 4)]
LABELS = [0, 1, 0, 1, 0]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with x.npy and y.csv for five nodes, and the edges in edges.csv."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(5, 8)))
    (tmp_path / "y.csv").write_text("label\n" + "\n".join(map(str, LABELS)) + "\n")
    (tmp_path / "edges.csv").write_text("src,dst\n" + "\n".join(f"{a},{b}" for a, b in EDGES) + "\n")
    return tmp_path


def edges_of(path) -> list[tuple[int, int]]:
    return sorted(map(tuple, adahop.load(path).graph.edge_index().T.tolist()))


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(["convert", *words])
    return left.value.code or 0


FORMS = {
    "header": ("e.csv", "src,dst", "{},{}"),
    "no header": ("e.csv", "", "{},{}"),
    "swapped": ("e.csv", "Target,Source", "{1},{0}"),
    "other columns": ("e.csv", "when,src,dst", "2020,{},{}"),
    "tabs": ("e.tsv", "", "{}\t{}"),
    "blanks": ("e.txt", "# made by hand\n", "{}  {}"),
    "quotes": ("e.csv", "src;dst", '"{}";"{}"'),
    "blank lines": ("e.csv", "src,dst\n\n", "{},{}\n"),
    "windows": ("e.csv", "\ufeffsrc,dst\r", "{},{}\r"),
    "gzip": ("e.csv.gz", "src,dst", "{},{}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_edge_lists(form, desk, monkeypatch):
    monkeypatch.setattr(tables_module, "CHUNK", 3)  # several chunks
    name, head, row = FORMS[form]
    text = "\n".join([*([head] if head else []), *(row.format(a, b) for a, b in EDGES)]).encode()
    (desk / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    meta = convert([name, "x.npy", "y.csv"], "g.npz")
    assert edges_of("g.npz") == sorted(EDGES)
    assert meta["edges"] == 6 and meta["split"] == [3, 1, 1] and adahop.load("g.npz").y.tolist() == LABELS


def test_weights(desk):
    (desk / "w.csv").write_text("\n".join(f"{a},{b},{a + b / 2}" for a, b in EDGES))
    convert(["w.csv", "x.npy", "y.csv"], "g.npz")
    graph = adahop.load("g.npz").graph
    assert graph.weight.tolist() == [s + d / 2 for s, d in zip(graph.indices.tolist(), graph.dst().tolist())]  # noqa: B905


@pytest.mark.parametrize("feature_names", [False, True])
def test_names(feature_names, desk):
    names = ["ann", "bob", "42", "#dee", "e e"]
    (desk / "e.csv").write_text(
        "from,to\n" + "\n".join(f"{names[a]},{names[b]}" for a, b in EDGES if names[a] != "#dee")
    )
    (desk / "y.csv").write_text(
        "\n".join(f'"{n}",{"red" if y else "blue"}' for n, y in zip(names, LABELS, strict=True))
    )
    features = "x.npy"
    if feature_names:  # in another order
        features = "x.csv"
        (desk / features).write_text("id,a\n" + "\n".join(f'"{names[i]}",{10 * i}' for i in (4, 0, 2, 1, 3)))
    meta = convert(["e.csv", features, "y.csv"], "g.npz", ids="names")
    data = adahop.load("g.npz", features="raw")
    assert edges_of("g.npz") == sorted(e for e in EDGES if names[e[0]] != "#dee")
    assert data.y.tolist() == LABELS and meta["class_names"] == ["blue", "red"]
    assert np.load("g.npz")["names"].tolist() == names
    if feature_names:
        assert data.x[:, 0].tolist() == [0, 10, 20, 30, 40]


def test_labels_by_id_leave_gaps(desk):
    (desk / "y.csv").write_text("id,label\n3,1\n0,0\n1,1\n")
    convert(["edges.csv", "x.npy", "y.csv"], "g.npz", split="random:1,1,1")
    data = adahop.load("g.npz")
    assert data.y.tolist() == [0, 1, -1, 1, -1]
    assert sorted(torch.cat([data.train_idx, data.val_idx, data.test_idx]).tolist()) == [0, 1, 3]


def test_labels_as_pandas_writes_them(desk):
    (desk / "y.csv").write_text("label\n1.0\n0.0\nnan\n1.0\n0.0\n")
    convert(["edges.csv", "x.npy", "y.csv"], "g.npz")
    assert adahop.load("g.npz").y.tolist() == [1, 0, -1, 1, 0]


def test_several_labels_and_sparse_features(desk):
    y = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]])
    np.save("y.npy", y)
    x = sp.random(5, 300, 0.02, format="csr", rng=np.random.default_rng(0), dtype=np.float32)
    sp.save_npz("x.npz", x)
    meta = convert(["edges.csv", "x.npz", "y.npy"], "g.npz")
    data = adahop.load("g.npz", features="raw")
    assert meta["task"] == "multilabel" and data.y.tolist() == y.tolist()
    assert np.allclose(data.x.numpy(), x.toarray()) and "x_data" in np.load("g.npz").files


def test_undirected(desk):
    (desk / "w.csv").write_text("0,1,1\n1,0,3\n1,2,5\n2,2,1\n")
    convert(["w.csv", "x.npy", "y.csv"], "g.npz", undirected=True)
    graph = adahop.load("g.npz").graph
    assert edges_of("g.npz") == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]
    assert sorted(graph.weight.tolist()) == [1, 3, 3, 5, 5]


def test_splits(desk):
    for seed in (0, 0, 1):
        convert(["edges.csv", "x.npy", "y.csv"], f"{seed}.npz", split="random:40,40,20", seed=seed)
    one, other = adahop.load("0.npz"), adahop.load("1.npz")
    assert [int(m.sum()) for m in (one.train_mask, one.val_mask, one.test_mask)] == [2, 2, 1]
    assert one.train_idx.tolist() != other.train_idx.tolist() or one.val_idx.tolist() != other.val_idx.tolist()
    folder = desk / "split"
    folder.mkdir()
    (folder / "train.csv").write_text("id\n4\n0\n")
    (folder / "valid.txt").write_text("1\n")
    np.save(folder / "test.npy", [2, 3])
    convert(["edges.csv", "x.npy", "y.csv"], "g.npz", split="split")
    data = adahop.load("g.npz")
    assert data.train_idx.tolist() == [0, 4] and data.val_idx.tolist() == [1] and data.test_idx.tolist() == [2, 3]


def zipped(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def test_ogb_folder(desk):
    home = desk / "arxiv"
    zipped(home / "raw/edge.csv.gz", "\n".join(f"{a},{b}" for a, b in EDGES))
    zipped(home / "raw/node-feat.csv.gz", "\n".join(f"{i}.5,-1e-3" for i in range(5)))
    zipped(home / "raw/node-label.csv.gz", "0\n1\n0\nnan\n1\n")
    for part, ids in {"train": "0\n1\n", "valid": "2\n", "test": "4\n"}.items():
        zipped(home / f"split/time/{part}.csv.gz", ids)
    convert("arxiv", "g.npz")
    data = adahop.load("g.npz", features="raw")
    assert edges_of("g.npz") == sorted(EDGES) and data.y.tolist() == [0, 1, 0, -1, 1]
    assert data.x[3].tolist() == pytest.approx([3.5, -1e-3]) and data.val_idx.tolist() == [2]
    (home / "split/other").mkdir()
    with pytest.raises(InputError, match="one split, got other, time"):
        convert("arxiv", "g.npz")


@pytest.mark.parametrize("masks", [True, False])
def test_saved_data(masks, desk):
    data = Data(
        x=torch.randn(5, 3), y=torch.tensor(LABELS), edge_index=torch.tensor(EDGES).T, edge_weight=torch.ones(6)
    )
    if masks:
        for part, ids in {"train": [0, 1], "val": [2], "test": [3]}.items():
            data[f"{part}_mask"] = torch.isin(torch.arange(5), torch.tensor(ids))
    torch.save(data, "d.pt")
    meta = convert("d.pt", "g.npz")
    assert edges_of("g.npz") == sorted(EDGES) and meta["split"] == ([2, 1, 1] if masks else [3, 1, 1])


def test_parquet(desk):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pd.DataFrame(EDGES, columns=["src", "dst"]).to_parquet("e.parquet")
    pd.DataFrame({"id": range(5), "label": LABELS}).to_parquet("y.parquet")
    convert(["e.parquet", "x.npy", "y.parquet"], "g.npz")
    assert edges_of("g.npz") == sorted(EDGES)
    pd.DataFrame({"src": [0, 9], "dst": [1, 1]}).to_parquet("e.parquet")
    with pytest.raises(InputError, match=r"e\.parquet, row 1: a node id must be in \[0, 5\).*got 9"):
        convert(["e.parquet", "x.npy", "y.csv"], "g.npz")


def test_parquet_without_its_extra(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    (desk / "e.parquet").touch()
    with pytest.raises(InputError, match=r"pip install adahop\[parquet\]"):
        convert(["e.parquet", "x.npy", "y.csv"], "g.npz")


BAD = {
    "word": (
        "src,dst\n0,1\n\n1,two\n",
        r"e\.csv, line 4 must hold 2 columns, whole numbers in column 1 .* got '1,two'; with --ids names",
    ),
    "fraction": ("src,dst\n0,1.5\n", r"e\.csv, line 2 must hold 2 columns, whole numbers"),
    "short": ("0,1\n# note\n2\n", r"e\.csv, line 3 must hold"),
    "range": ("# note\n0,1\n\n1,5\n", r"e\.csv, line 4: a node id must be in \[0, 5\), .*got 5"),
    "negative": ("0,1\n-1,2\n", r"e\.csv, line 2: a node id must be"),
    "weight": ("src,dst,weight\n0,1,1\n1,2,-3\n", r"e\.csv, line 3: a weight must be finite and not negative, got -3"),
    "nan": ("0,1,nan\n", r"e\.csv, line 1: a weight must be finite"),
    "long": ("0,1\n1,2,3\n", r"e\.csv, line 2 must hold 2 columns, .* got '1,2,3'"),
    "columns": ("a,b\n0,1\n", r"e\.csv must have the columns src and dst, .*got a, b"),
    "one column": ("0\n1\n", r"e\.csv must have the columns src and dst"),
    "empty": ("", r"e\.csv must have at least one row, got none"),
    "only a header": ("src,dst\n", r"e\.csv must have at least one row below its header"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_edges(what, desk):
    text, sentence = BAD[what]
    (desk / "e.csv").write_text(text)
    with pytest.raises(InputError, match=sentence):
        convert(["e.csv", "x.npy", "y.csv"], "g.npz")
    assert not list(desk.glob("*g.npz*"))


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("y.csv", "0\n1\n", r"y\.csv must have one row for each of the 5 rows of features, got 2"),
        ("y.csv", "id,label\n0,1\n0,1\n", r"y\.csv, line 3: an id must come once, got 0"),
        ("y.csv", "id,label\n7,1\n", r"y\.csv, line 2: a node id must be in \[0, 5\)"),
        ("y.csv", "0\n1\n0.5\n0\n1\n", r"y\.csv, line 3: a label must be a whole number from 0 .*got 0\.5"),
        ("y.csv", "label\n0\n-3\n", r"y\.csv, line 3: a label must be a whole number from 0"),
        ("y.csv", "-1\n-1\n-1\n-1\n-1\n", r"the labels must name at least one node's class"),
        ("y.csv", "1,0,1\n0,2,1\n", r"y\.csv, line 2: several labels a node must be 0 or 1"),
        ("x.csv", "id,a\nann,1\nbob,2\ncy,1\ndi,2\ned,3\n", r"x\.csv must have numbers for ids .*got 'ann'"),
        ("x.csv", "1,2\n3,4,5\n", r"x\.csv, line 2 must hold 2 columns, .*got '3,4,5'"),
        ("x.csv", "1,2\n3,inf\n1,1\n2,2\n1,1\n", r"x\.csv, line 2: features must be finite, got inf"),
        ("x.csv", "1,2\n3\n", r"x\.csv, line 2 must hold 2 columns, real numbers in 2 of them, got '3'"),
        ("x.csv", "label\nred\nblue\n", r"x\.csv, line 2 .*got 'red'; the files are edges, features and labels"),
        ("x.bin", "1", r"a table must be one of \.csv"),
        ("edges.csv.gz", "no gzip", r"edges\.csv\.gz must be whole text"),
    ],
)
def test_bad_files(file, content, sentence, desk):
    (desk / file).write_text(content)
    kind = file.split(".")[0]
    files = {"edges": "edges.csv", "x": "x.npy", "y": "y.csv", kind: file}
    with pytest.raises(InputError, match=sentence):
        convert(list(files.values()), "g.npz")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["edges.csv", "x.npy", "y.csv", "-o", "g.txt"], "`out` must be a .npz file"),
        (["edges.csv", "x.npy", "-o", "g.npz"], "`source` must be edges, features and labels"),
        (["none.csv", "x.npy", "y.csv", "-o", "g.npz"], "`source` must name existing files, got none.csv"),
        (["edges.csv", "x.npy", "y.csv", "-o", "g.npz", "--split", "half"], "`split` must be like random:60,20,20"),
        (["edges.csv", "x.npy", "y.csv", "-o", "g.npz", "--split", "random:1,2"], "three shares"),
        (["edges.csv", "x.npy", "y.csv", "-o", "g.npz", "--ids", "name"], "did you mean 'names'"),
        (["edges.csv", "x.npy", "y.csv", "-o", "g.npz", "--ids", "names"], "must have a label beside the id"),
        (["y.csv", "x.npy", "edges.csv", "-o", "g.npz"], "y.csv must have the columns src and dst"),
    ],
)
def test_bad_commands(words, sentence, desk, capsys):
    assert run(*words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("adahop: ") and sentence in said


def test_the_command_and_training(desk, capsys):
    assert run("edges.csv", "x.npy", "y.csv", "-o", "g.npz", "--undirected") == 0
    told = capsys.readouterr()
    assert told.out == (
        "g.npz: 5 nodes, 12 directed edges, 8 features, 2 classes, 3 / 1 / 1 to train, validate and test on\n"
    )
    assert "read edges.csv" in told.err
    assert adahop.fit(adahop.load("g.npz"), sizes=(2, 2), epochs=1, hidden=4).steps == 1


def test_an_old_file_survives_a_failed_write(desk, monkeypatch):
    (desk / "g.npz").write_bytes(b"old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="must be writable, got No space"):
        convert(["edges.csv", "x.npy", "y.csv"], "g.npz")
    assert (desk / "g.npz").read_bytes() == b"old" and not list(desk.glob(".*part"))


def test_progress_is_told(desk, monkeypatch):
    monkeypatch.setattr(tables_module, "CHUNK", 2)
    heard = []
    convert(
        ["edges.csv", "x.npy", "y.csv"], "g.npz", tell=lambda path, done, total: heard.append((path.name, done / total))
    )
    assert ("edges.csv", 1.0) in heard and sum(name == "edges.csv" for name, _ in heard) == 3


def test_an_empty_cell_is_no_label(desk):
    """pandas writes a missing value as an empty cell, its index as a column without a name."""
    (desk / "y.csv").write_text(",label\n4,1\n0,\n1,0\n2,1\n3,\n")
    convert(["edges.csv", "x.npy", "y.csv"], "g.npz", split="random:1,1,1")
    assert adahop.load("g.npz").y.tolist() == [-1, 0, 1, -1, 1]
    (desk / "y.csv").write_text("id,label\n0,\n1,red sky\n2,blue\n3,nan\n4,blue\n")
    meta = convert(["edges.csv", "x.npy", "y.csv"], "g.npz", split="random:1,1,1")
    assert meta["class_names"] == ["blue", "red sky"] and adahop.load("g.npz").y.tolist() == [-1, 1, 0, -1, 0]
    (desk / "x.csv").write_text(",a,b\n" + "\n".join(f"{i},{i},1" for i in range(5)))
    assert convert(["edges.csv", "x.csv", "y.csv"], "g.npz", split="random:1,1,1")["features"] == 2
    (desk / "x.csv").write_text("a,b\n1,2\n1,\n1,2\n1,2\n1,2\n")
    with pytest.raises(InputError, match=r"x\.csv, line 3: features must be finite, got nan"):
        convert(["edges.csv", "x.csv", "y.csv"], "g.npz")


def test_a_label_of_several_words(desk):
    (desk / "y.csv").write_text("label\nNew York\nParis\nNew York\nParis\nParis\n")
    assert convert(["edges.csv", "x.npy", "y.csv"], "g.npz")["class_names"] == ["New York", "Paris"]


LABEL_ARRAYS = {
    "floats": ([0.0, 1, 0, 1, 0], [0, 1, 0, 1, 0]),
    "gaps": ([0.0, 1, np.nan, 1, 0], [0, 1, -1, 1, 0]),
    "words": (["b", "a", "b", "a", "b"], [1, 0, 1, 0, 1]),
    "a column": ([[0], [1], [0], [1], [0]], [0, 1, 0, 1, 0]),
}


@pytest.mark.parametrize("kind", LABEL_ARRAYS)
def test_arrays_of_labels(kind, desk):
    given, wanted = LABEL_ARRAYS[kind]
    np.save("y.npy", np.array(given))
    convert(["edges.csv", "x.npy", "y.npy"], "g.npz", split="random:1,1,1")
    assert adahop.load("g.npz").y.tolist() == wanted


@pytest.mark.parametrize("given", [np.zeros(5, complex), np.zeros(()), np.zeros((5, 2, 2)), [[*"ab"]] * 5, [0.5] * 5])
def test_arrays_that_are_no_labels(given, desk):
    np.save("y.npy", np.array(given))
    with pytest.raises(InputError, match=r"y\.npy.* must"):
        convert(["edges.csv", "x.npy", "y.npy"], "g.npz")
    assert not (desk / "g.npz").exists()


def test_masks_and_ids_of_splits(desk):
    (desk / "parts").mkdir()
    for part, mask in {"train": [1, 1, 0, 0, 0], "val": [0, 0, 1, 0, 0], "test": [0, 0, 0, 1, 1]}.items():
        np.save(f"parts/{part}.npy", np.array(mask, bool))
    convert(["edges.csv", "x.npy", "y.csv"], "g.npz", split="parts")
    assert adahop.load("g.npz").test_idx.tolist() == [3, 4]
    for bad in (np.array(["a"]), np.array([[0, 1]]), np.array([0.5]), np.ones(4, bool)):
        np.save("parts/train.npy", bad)
        with pytest.raises(InputError, match=r"parts/train\.npy"):
            convert(["edges.csv", "x.npy", "y.csv"], "g.npz", split="parts")


def saved(**fields) -> str:
    mask = torch.arange(5)
    given = {
        "x": torch.arange(10.0).reshape(5, 2), "y": torch.tensor(LABELS), "edge_index": torch.tensor(EDGES).T,
        "train_mask": mask < 2, "val_mask": mask == 2, "test_mask": mask == 3, **fields,
    }  # fmt: skip
    torch.save(Data(**{k: v for k, v in given.items() if v is not None}), "d.pt")
    return "d.pt"


BAD_DATA = {
    "edges in rows": (dict(edge_index=torch.tensor(EDGES)), r"`edge_index` must have shape \[2, E\]"),
    "real ids": (dict(edge_index=torch.tensor(EDGES).T.float()), "`edge_index` must hold whole numbers"),
    "weights": (dict(edge_weight=torch.ones(2)), "`weight` must have one number per edge"),
    "sparse": (dict(x=torch.eye(5).to_sparse()), r"`x` must be a dense tensor"),
    "nan": (dict(x=torch.full((5, 2), torch.nan)), "`x` must be finite"),
    "one row": (dict(x=torch.ones(5)), r"`x` must have shape \[nodes, features\]"),
    "numbers to predict": (dict(y=torch.rand(5) * 3 + 0.01), "`y` with one column must hold whole numbers"),
    "one mask": (
        dict(val_mask=None),
        "`split` must be given for a Data with some masks only, got one with train, test",
    ),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_a_saved_data_that_is_wrong(kind, desk):
    """Nothing is truncated, dropped or written that does not load."""
    fields, sentence = BAD_DATA[kind]
    with pytest.raises(InputError, match=sentence):
        convert(saved(**fields), "g.npz")
    assert not (desk / "g.npz").exists()


def test_unlabelled_nodes_of_several_labels_stay_so(desk):
    y = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0], [-1, -1]])
    convert(saved(y=y), "g.npz")
    assert adahop.load("g.npz").y.tolist() == y.tolist()
    convert(saved(y=y), "g.npz", split="random:2,1,1")
    assert not torch.stack([adahop.load("g.npz")[f"{p}_mask"] for p in ("train", "val", "test")]).any(0)[4]

"""Graphs, features and state on disk: equal to those in memory, small in memory, safe against damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import adahop
from adahop import Graph, InputError, make, ops
from adahop.cli import main
from adahop.convert import convert
from adahop.datasets import load
from adahop.distributed import Shard
from adahop.mapped import Folder, graph_of, open_array, read, save
from adahop.mapped.data import save_graph
from adahop.mapped.looped import LoopedGraph
from adahop.methods import METHODS, Method
from adahop.ops import pointer
from adahop.pyg import AdaptiveNeighborLoader
from adahop.samplers import Labor
from adahop.storage import Files
from conftest import messy_graph, same_blocks

SPEC = "synthetic:600,9000,8,3"


@pytest.fixture
def folder(tmp_path):
    save(load(SPEC), tmp_path / "graph")
    return tmp_path / "graph"


def on_file(graph: Graph, home, loops: bool = False) -> Graph:
    with Folder(home, {"loops": True} if loops else {}) as f:
        save_graph(graph, f, loops)
    return graph_of(home, *read(home))


def forms() -> dict[str, Graph]:
    """Graphs with and without weights, their own loops, and an order of their own."""
    messy = messy_graph()
    row = messy.row()
    kept = (messy.indices != row).nonzero().flatten()
    row, src = row[kept], messy.indices[kept]
    plain = Graph.from_csr(pointer(torch.bincount(row, minlength=messy.num_nodes)), src)
    assert plain.eid is None and messy.eid is not None and messy.weight is not None
    bare = Graph(messy.indptr, messy.indices, None, messy.eid, messy.first)
    return {"messy": messy, "unweighted": bare, "in order": plain}


# --- equal to memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["row", "sym", None])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("form", ["messy", "unweighted", "in order"])
@pytest.mark.parametrize("looped", [True, False])
def test_normalized_on_disk_is_that_of_memory(tmp_path, monkeypatch, kind, loops, form, looped):
    monkeypatch.setattr("adahop.mapped.graph.EDGES", 100)  # many small pieces
    monkeypatch.setattr("adahop.mapped.looped.EDGES", 100)
    graph = forms()[form]
    mapped = on_file(graph, tmp_path / "g", looped)
    assert mapped.num_nodes == graph.num_nodes and mapped.num_edges == graph.num_edges
    assert torch.equal(mapped.degree(), graph.degree())
    for _ in range(2):  # written, then found again
        one, other = graph.normalized(kind, loops), mapped.normalized(kind, loops)
        assert [k for k, _ in one._tensors()] == [k for k, _ in other._tensors()]
        for (name, a), (_, b) in zip(one._tensors(), other._tensors(), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("method", ["graphsage", "bs", "bs.m", "labor", "s-gcn"])
def test_training_from_disk_is_that_from_memory(folder, tmp_path, method, looped):
    how = {"method": method, "sizes": (4, 4), "epochs": 2, "batch_size": 64, "hidden": 8}
    data = load(SPEC)
    if looped:
        folder = tmp_path / "looped"
        save(data, folder, loops=True)
    memory = adahop.fit(data, **how)
    disk = adahop.fit(load(folder), **how, state=str(tmp_path / "state"))
    assert [r["loss"] for r in memory.history] == [r["loss"] for r in disk.history]
    for a, b in zip(memory.sampler.state_dict().values(), disk.sampler.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert list((tmp_path / "state").iterdir()) == []  # nameless files: nothing is left behind


@pytest.mark.parametrize("form", ["messy", "unweighted", "in order"])
def test_stored_loops_take_one_array_per_edge(tmp_path, form):
    """Numbers of edges are stored where the user's order is another, weights where there are any, and nothing else."""
    graph = forms()[form]
    mapped = on_file(graph, tmp_path / "g", loops=True)
    mapped.normalized("row", True)
    files = {f.stem for f in (tmp_path / "g").rglob("*.npy")}
    more = {"messy": {"eid", "weight", "total", "first"}, "unweighted": {"eid", "first"}, "in order": set()}
    assert files == {"indptr", "indices"} | more[form]
    before = json.loads((tmp_path / "g" / "manifest.json").read_text())
    assert before["format"] == "adahop folder 2"  # earlier versions refuse what they would misread


def test_half_features_are_those_of_memory(tmp_path):
    """Stored in 16 bits, summed in 32: as if the rounded features were in memory."""
    data, how = load(SPEC), {"sizes": (4, 4), "epochs": 2, "batch_size": 64, "hidden": 8}
    data.x = data.x.half()
    save(data, tmp_path / "half", loops=True)
    data.x = data.x.float()
    for method in ("graphsage", "adahop"):
        memory, disk = (adahop.fit(d, method=method, **how) for d in (data, load(tmp_path / "half")))
        assert [r["loss"] for r in memory.history] == [r["loss"] for r in disk.history]
        assert memory.test == disk.test


def test_converted_folder_and_command(tmp_path, capsys):
    np.savez(tmp_path / "g.npz", indptr=[0, 2, 3, 4], indices=[1, 2, 0, 0], x=np.eye(3, 4), y=[0, 1, 1],
             train_idx=[0], val_idx=[1], test_idx=[2])  # fmt: skip
    out = tmp_path / "mapped"
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "g.npz"), "--mmap", "-o", str(out)])
    assert end.value.code == 0 and "3 nodes, 4 directed edges" in capsys.readouterr().out
    memory, disk = load(tmp_path / "g.npz"), load(out)
    assert torch.equal(memory.x, disk.x) and torch.equal(memory.y, disk.y)
    assert torch.equal(memory.graph.indices, disk.graph.indices) and disk.classes == 2
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "g.npz"), "--mmap", "-o", str(out)])
    assert end.value.code == 2 and "must be a new folder" in capsys.readouterr().err
    with pytest.raises(InputError, match="must be raw"):
        load(out, features="standard")


def test_parts_and_loaders_of_stored_loops(folder, tmp_path):
    """Whatever asks for the graph's own arrays finds those of a graph without the added loops."""
    data = load(SPEC)
    save(data, tmp_path / "looped", loops=True)
    looped = load(tmp_path / "looped")
    for rank in range(2):
        one, other = (Shard(home, rank, 2) for home in (folder, tmp_path / "looped"))
        assert torch.equal(one.bounds, other.bounds) and torch.equal(one.halo, other.halo)
        for (_, a), (_, b) in zip(one.graph._tensors(), other.graph._tensors(), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(data.edge_index, looped.edge_index) and data.num_edges == looped.num_edges
    both = (AdaptiveNeighborLoader(d, [3, 3], input_nodes=d.train_mask, batch_size=32, seed=1) for d in (data, looped))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a.edge_index, b.edge_index) and torch.equal(a.e_id, b.e_id)


def test_convert_with_loops(tmp_path):
    np.savez(tmp_path / "g.npz", indptr=[0, 2, 3, 4], indices=[1, 2, 0, 0], x=np.eye(3, 4), y=[0, 1, 1],
             train_idx=[0], val_idx=[1], test_idx=[2])  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "g.npz"), "--mmap", "--loops", "-o", str(tmp_path / "mapped")])
    assert end.value.code == 0
    graph = load(tmp_path / "mapped").graph
    assert graph.indices.tolist() == [1, 2, 0, 0] and graph.normalized("row").indices.tolist() == [0, 1, 2, 1, 0, 2, 0]
    with pytest.raises(InputError, match="`loops` must be False without `mmap`"):
        convert(tmp_path / "g.npz", tmp_path / "h.npz", loops=True)


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(folder):
    x = load(folder).x
    x.zero_()
    assert float(load(folder).x.abs().sum()) > 0


# --- past 2^31 -----------------------------------------------------------------------------------------------------


def sparse(path, dtype, many: int) -> None:
    """A .npy file of zeros that takes no room on the disk."""
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": dtype, "fortran_order": False, "shape": (many,)})
        os.ftruncate(f.fileno(), f.tell() + many * np.dtype(dtype).itemsize)


def test_places_past_2_31(tmp_path):
    """Node 1's neighbours lie past place 2^31; draws, uniform and weighted, and blocks must find them there."""
    start, n, k = 2**31 + 100, 50, 10
    sparse(tmp_path / "indices.npy", "<i4", start + n)
    sparse(tmp_path / "weight.npy", "<f4", start + n)
    ends = {"indices": np.arange(2, 2 + n, dtype=np.int32), "weight": np.ones(n // 2, np.float32)}
    for name, values in ends.items():
        with open(tmp_path / f"{name}.npy", "r+b") as f:
            f.seek(-values.nbytes, os.SEEK_END)
            f.write(values.tobytes())
    indptr = torch.tensor([0, start, start + n] + [start + n] * n)
    graph = Graph(indptr, open_array(tmp_path / "indices.npy"), None, None, indptr[:-1].clone())
    assert graph.num_edges > 2**31
    sampler = make("graphsage", graph, [k], draw="systematic")
    block = sampler.sample([1, 0])[0]
    ours = block.dst == 0
    assert int(ours.sum()) == k and bool((block.pos[ours] >= start).all()) and torch.equal(block.e_id, block.pos)
    assert torch.equal(block.n_id[block.src][ours], block.pos[ours] - start + 2)
    assert bool((block.n_id[block.src][~ours] == 0).all())
    weights = open_array(tmp_path / "weight.npy")
    static = make("graphsage", Graph(indptr, graph.indices, weights, None, graph.first), [k], policy="static")
    block = static.sample([1])[0]
    assert bool((block.pos >= start + n // 2).all())  # the first half has weight 0
    assert torch.equal(block.weight, weights[block.pos]) and torch.allclose(block.prob, torch.full((k,), 2 / n))


def test_stored_loops_past_2_31(tmp_path):
    """Node 1's row begins past place 2^31: its loop, its edges' numbers and weights, and what is learned of them."""
    start, n, k = 2**31 + 100, 50, 10
    sparse(tmp_path / "indices.npy", "<i4", start + 1 + 2 * n)
    with open(tmp_path / "indices.npy", "r+b") as f:
        f.seek(-4 * (1 + 2 * n), os.SEEK_END)
        f.write(np.arange(1, 2 + n, dtype=np.int32).tobytes() + np.arange(2, 2 + n, dtype=np.int32).tobytes())
    sizes = torch.tensor([start, 1 + n] + [1] * n)
    arrays = {"indptr": pointer(sizes), "indices": open_array(tmp_path / "indices.npy")}
    arrays["first"] = arrays["indptr"][:-1] + 1
    graph = LoopedGraph(tmp_path, arrays, "large", mean=True)
    true = start + 1 + 2 * n - (2 + n)
    sampler = make("adahop", graph, [k], storage=Files(tmp_path / "state"))
    for _ in range(4):
        block = sampler.sample([1])[0]
        assert block.pos[0] == start and block.e_id[0] == true + 1 and block.n_id[block.src[0]] == 1
        assert bool((block.pos[1:] > start).all()) and torch.equal(block.e_id[1:], block.pos[1:] - 2)
        assert torch.equal(block.n_id[block.src], block.pos - start + 1)
        assert torch.allclose(block.weight, torch.full((1 + k,), 1 / (1 + n)))
        sampler.update([block], [(block.weight * block.scale).square() * (1 + block.pos % 3)])
    sums = sampler.policy.prefix.at(0)
    assert int(sums.upto[2]) > 0 and bool((sums.table[start + 1 : start + n] != 0).all())
    assert torch.allclose(ops.full_sum(torch.ones(2 + n, 1), graph.edges, torch.tensor([1])), torch.ones(1, 1))


# --- damage --------------------------------------------------------------------------------------------------------


def damage(home, how: str) -> None:
    path = home / "indices.npy"
    text = path.read_bytes()
    if how == "truncated":
        path.write_bytes(text[:-8])
    elif how == "changed":
        path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    elif how == "missing":
        path.unlink()
    elif how == "another's":
        (home / "manifest.json").write_text("{}")
    elif how == "half a manifest":
        (home / "manifest.json").write_text((home / "manifest.json").read_text()[:-30])
    elif how == "a path":
        found = json.loads((home / "manifest.json").read_text())
        found["arrays"]["../x"] = found["arrays"].pop("x")
        (home / "manifest.json").write_text(json.dumps(found))
    elif how == "not an array":
        found = json.loads((home / "manifest.json").read_text())
        path.write_bytes(b"no numpy here")
        found["arrays"]["indices"] = {"bytes": 13, "crc32": zlib.crc32(b"no numpy here")}
        (home / "manifest.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "how", ["truncated", "changed", "missing", "another's", "half a manifest", "a path", "not an array"]
)
def test_damaged_folders_are_refused(folder, how):
    damage(folder, how)
    with pytest.raises(InputError, match="must"):
        load(folder)


def test_a_folder_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), Folder(tmp_path / "g") as f:
        f.save("x", np.ones(3))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
    with Folder(tmp_path / "g") as f:
        f.save("x", np.zeros((0, 3)))
        f.array("y", np.int64, (2,))[:] = 7
    arrays, _ = read(tmp_path / "g")
    assert arrays["x"].shape == (0, 3) and arrays["y"].tolist() == [7, 7]
    with pytest.raises(InputError, match="does not exist yet"), Folder(tmp_path / "g"):
        pass


def test_no_room_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="must have room for x"), Folder(tmp_path / "g") as f:
        f.array("x", np.float64, (1 << 58,))
    assert list(tmp_path.iterdir()) == []


def mapped_bytes() -> int:
    """Of nameless files that this process has mapped."""
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line
    ]
    return sum(int(b, 16) - int(a, 16) for a, b in spans)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("method", ["bs", "bs.m", "thanos", "thanos.m", "adahop", "bliss", "graphsaint"])
def test_state_lies_where_it_is_told_to(tmp_path, method):
    graph, before = load("synthetic:600,9000,8,3").graph, mapped_bytes()
    sampler = make(method, graph, [4, 4], storage=Files(tmp_path, least=1))
    state = sum(t.numel() * t.element_size() for t in sampler.state_dict().values())
    assert mapped_bytes() - before >= state - 64  # the counts of steps and epochs aside
    plain = make(method, graph, [4, 4])
    assert same_blocks(sampler.sample([0, 1]), plain.sample([0, 1]))


def test_a_method_without_a_place_for_its_state_refuses_a_folder(tmp_path, monkeypatch):
    own = Method("own", "node-wise", True, "none", lambda graph, sizes, seed=0: Labor(graph, sizes, seed))
    monkeypatch.setitem(METHODS, "own", own)
    assert make("own", load("synthetic:60,900,8,3").graph, [4]).sizes == [4]
    with pytest.raises(InputError, match="`state` must be left out for method 'own'"):
        make("own", load("synthetic:60,900,8,3").graph, [4], storage=Files(tmp_path))


def test_files_take_only_what_is_large(tmp_path):
    files = Files(tmp_path, least=1024)
    small, large = files.ones(4), files.full((300,), 2.5)
    assert small.tolist() == [1.0] * 4 and bool((large == 2.5).all()) and large.dtype == torch.float32
    assert files.zeros(300, 2, dtype=torch.int64).shape == (300, 2)
    with pytest.raises(InputError, match="`state` must be a folder with room"):
        files.zeros(1 << 50)
    with pytest.raises(InputError, match="`state` must be a folder with room"):
        files.zeros(1 << 38)
    room = files.sparse(1 << 38)  # a terabyte, of which one page is written
    room[1 << 37] = 2.0
    assert float(room[1 << 37]) == 2.0 and float(room[5]) == 0.0
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="`state` must be a folder"):
        Files(tmp_path / "file" / "state")


# --- beyond memory -------------------------------------------------------------------------------------------------

LIMITED = """
    import resource, sys, torch
    import adahop
    from adahop.datasets import load
    torch.set_num_threads(1)
    data = load(sys.argv[1])
    def bytes_in(home):
        return sum(f.stat().st_size for f in home.glob("*.npy"))
    adahop.fit(load("synthetic:300,2000,4,2"), method="bs", epochs=1)  # kernels are compiled before the limit holds
    again = bytes_in(data.graph.normalized("row", True).home)
    def anonymous():
        return sum(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024
    before = anonymous()
    used = sum(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) * 1024
    bound = used + again + 80 * 2**20  # the normalised graph is mapped once more, and maps count: 80 MB for all else
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    result = adahop.fit(data, method="bs", sizes=(3, 3), hidden=16, epochs=1, batch_size=256, state=sys.argv[2])
    print(result.steps, bytes_in(data.graph.home) + again, anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit and its measure are Linux's")
def test_training_on_a_graph_larger_than_the_memory_allowed(tmp_path):
    """Files of 170 MB, 50 MB of policy state, 80 MB of memory for all that is not a file: it trains."""
    n, m, f = 80_000, 6_000_000, 256
    rng = np.random.default_rng(0)
    with Folder(tmp_path / "g", {"name": "big", "classes": 4, "metric": "accuracy"}) as out:
        indptr = np.linspace(0, m, n + 1).astype(np.int64)
        out.save("indptr", indptr)
        out.save("first", indptr[:-1])
        indices, x = out.array("indices", np.int32, (m,)), out.array("x", np.float32, (n, f))
        for a in range(0, m, 1 << 20):
            indices[a : a + (1 << 20)] = rng.integers(n, size=min(1 << 20, m - a))
        for a in range(0, n, 1 << 14):
            x[a : a + (1 << 14)] = rng.standard_normal((min(1 << 14, n - a), f), dtype=np.float32)
        out.save("y", rng.integers(4, size=n))
        for part, ids in {"train": range(2000), "val": range(2000, 2500), "test": range(2500, 3000)}.items():
            out.save(f"{part}_idx", np.array(ids))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), tmp_path / "g", tmp_path / "state"],
        capture_output=True, text=True, env={**os.environ, "ADAHOP_TRUST": "1", "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    steps, size, grown = map(int, done.stdout.split())
    assert steps == 8 and size > 160 * 2**20 and grown < 80 * 2**20


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("form", ["messy", "unweighted", "in order"])
@pytest.mark.parametrize("kind", ["row", "sym", None])
def test_blocks_are_the_same_from_disk(tmp_path, form, kind, looped):
    graph = forms()[form]
    mapped = on_file(graph, tmp_path / "g", looped)
    for one, other in ((graph, mapped), (graph.normalized(kind), mapped.normalized(kind))):
        for method in ("bs.m", "labor", "ladies", "cluster-gcn", "graphsaint", "fastgcn", "graphsage"):
            ours, theirs = make(method, one, [3, 3], seed=4), make(method, other, [3, 3], seed=4)
            assert same_blocks(ours.sample([1, 2, 3]), theirs.sample([1, 2, 3])), method


def test_learned_draws_from_stored_loops(tmp_path):
    """Odds within a row need no weights that are all alike: prefix sums then differ by one at most, as do chances."""
    graph = forms()["in order"]
    mapped = on_file(graph, tmp_path / "g", loops=True)
    one, other = (make("adahop", g.normalized("row"), [3, 3], seed=4) for g in (graph, mapped))
    seeds = list(range(graph.num_nodes))
    for _ in range(8):
        ours, theirs = one.sample(seeds), other.sample(seeds)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.pos, b.pos) and torch.equal(a.e_id, b.e_id) and torch.equal(a.weight, b.weight)
            assert torch.allclose(a.scale, b.scale, rtol=1e-6)
        energy = [(b.n_id[b.src] % 7 + 1.0) * b.weight**2 * b.scale**2 for b in ours]
        one.update(ours, energy)
        other.update(theirs, energy)
    assert bool((other.policy.prefix.at(0).upto[::2] > 0).any())  # some rows were drawn from by what was learned

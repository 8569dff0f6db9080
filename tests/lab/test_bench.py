"""adahop bench: turns and ratios, peers that are there or not, the graphs, the commands. Nothing here is timed."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from adahop import cli
from adahop.checks import InputError
from adahop.datasets import load
from adahop_lab.bench import graphs, ours, peers, setup
from adahop_lab.bench.clock import Runner, Turn, quartiles, ratio, take_turns
from adahop_lab.bench.limit import LINE, lines_per_s, read_lines
from adahop_lab.bench.rmat import rmat
from adahop_lab.bench.state import weigh

KEYS = ["method", "edges_per_s", "batches_per_s", "ratio_dgl_uniform", "ratio_pyg_uniform", "threads", "graph"]

SAMPLING = ["bench", "sampling", "--rounds", "2", "--seconds", "0"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ADAHOP_CACHE", str(tmp_path / "cache"))


def said(words: list[str], capsys) -> tuple[list[dict], str, int]:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    out = capsys.readouterr()
    lines = [json.loads(line) for line in out.out.splitlines() if line.startswith("{")]
    return lines, out.err, left.value.code


# --- graphs --------------------------------------------------------------------------------------------------------


def test_rmat_is_the_same_for_the_same_numbers(tmp_path, monkeypatch):
    first, again, other = rmat("rmat:1000,9000"), rmat("rmat:1000,9000"), rmat("rmat:1000,9000,1")
    monkeypatch.setenv("ADAHOP_CACHE", str(tmp_path / "another"))
    anew = rmat("rmat:1000,9000")
    assert first.hash() == again.hash() == anew.hash() != other.hash()
    assert (tmp_path / "another" / "rmat" / "1000-9000-0.npz").exists()


def test_rmat_has_no_loops_no_parallel_edges_and_a_heavy_tail():
    g = rmat("rmat:3000,60000")
    assert (g.num_nodes, g.num_edges) == (3000, 60000)
    assert bool((g.indices != g.dst()).all())
    assert len(set(zip(g.dst().tolist(), g.indices.tolist(), strict=True))) == 60000
    assert int(g.degree().max()) > 15 * 20  # the mean degree is 20


def test_a_typed_rmat_and_its_edges_as_one_relation():
    g = rmat("rmat:3000,60000,types=3,relations=6")
    assert g.types.num_nodes == {"t0": 1000, "t1": 1000, "t2": 1000} and g.num_edges == 60000
    assert {r[::2] for r in g.relations} == {(f"t{a}", f"t{b}") for a in range(3) for b in range(3) if a != b}
    assert set(torch.tensor(g.types.starts).diff().tolist()) == {10000}
    plain = graphs.untyped(g)
    assert plain.types is None and torch.equal(plain.degree(), g.degree())
    assert torch.equal(plain.edge_index(), g.edge_index())
    for words in ("types=3", "types=x,relations=6", "types=1,relations=1"):
        with pytest.raises(InputError, match="types"):
            rmat(f"rmat:3000,60000,{words}")


def test_rmat_survives_a_broken_file(tmp_path):
    g = rmat("rmat:1000,9000")
    path = tmp_path / "cache" / "rmat" / "1000-9000-0.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert rmat("rmat:1000,9000").hash() == g.hash()


@pytest.mark.parametrize("text", ["rmat:10", "rmat:a,b", "rmat:10,1000", "rmat:1,1", "star:0", "star:x"])
def test_bad_graphs(text):
    with pytest.raises(InputError, match="must"):
        graphs.graph(text)


def test_stars_have_their_degree_and_no_parallel_edges():
    g = graphs.graph("star:5000")
    degree = g.degree()
    assert set(degree.tolist()) == {0, 5000}
    assert all(g.indices[g.indptr[v] : g.indptr[v + 1]].unique().numel() == 5000 for v in (0, 1, 200))
    parts = graphs.batches(g, 64, live=True)
    assert all(bool((degree[part] == 5000).all()) for part in parts)


def test_batches_are_different_nodes():
    parts = graphs.batches(rmat("rmat:1000,9000"), 64)
    assert all(part.numel() == 64 for part in parts) and torch.cat(parts).unique().numel() == 64 * len(parts)


# --- the clock -----------------------------------------------------------------------------------------------------


def test_everyone_works_in_every_round():
    order: list[str] = []
    runners = [Runner(name, lambda seeds, name=name: order.append(name) or 5) for name in "abc"]
    turns = take_turns(runners, [torch.arange(4)], rounds=3, seconds=0.0)
    assert order == list("abc") * 4  # a warm-up each, then three rounds of one batch
    assert all([t.edges for t in mine] == [5, 5, 5] for mine in turns.values())


def test_ratios_are_taken_round_by_round():
    ours_, theirs = [Turn(6, 1, 1.0), Turn(60, 1, 1.0), Turn(9, 1, 1.0)], [Turn(3, 1, 1.0), Turn(10, 1, 1.0)] * 2
    assert ratio(ours_, theirs[:3]) == 3.0
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.0, 2.5)


def test_the_limit_reads_what_it_says():
    lines = np.zeros(64 * LINE, np.float32)
    lines[::LINE] = 1.0
    for ahead in (0, 8):
        out = np.zeros(1000, np.float32)
        read_lines(0, 1000, lines, ahead, 1, out)
        assert out[0] == 1000.0
    assert set(lines_per_s(megabytes=1, reads=1000, rounds=1)) == {"plain", "prefetch"}


# --- peers ---------------------------------------------------------------------------------------------------------


class FakePeer:
    """Half as many edges as ours would have, in no time."""

    kinds = ("uniform", "weighted")
    more = ()

    def __init__(self, graph):
        self.threads = []

    def set_threads(self, n):
        self.threads.append(n)

    def runner(self, kind, sizes):
        return Runner(f"dgl:{kind}", lambda seeds: 7, peer=True)


def test_a_peer_gives_ratios(monkeypatch, capsys):
    monkeypatch.setattr(peers, "PEERS", {"dgl": FakePeer})
    words = ["bench", "sampling", "--graph", "rmat:500,4000", "--sizes", "3,2", "--batch-size", "32", "--rounds", "2",
             "--seconds", "0", "--methods", "graphsage,bs:update=true", "--peers", "dgl", "--threads", "1,2",
             "--json"]  # fmt: skip
    rows, _, code = said(words, capsys)
    assert not code and [row["method"] for row in rows[:4]] == [
        "graphsage", "bs:update=true", "dgl:uniform", "dgl:weighted"]  # fmt: skip
    assert {row["threads"] for row in rows} == {1, 2}
    for row in rows:
        assert list(row)[:7] == KEYS and row["ratio_dgl_uniform"] > 0 and row["ratio_pyg_uniform"] is None
        assert set(row["ratios"]) == {"dgl:uniform", "dgl:weighted"}
    assert rows[2]["ratio_dgl_uniform"] == 1.0


def test_peers_that_are_absent_say_why(monkeypatch, capsys):
    real = builtins.__import__

    def without_dgl(name, *args, **more):
        if name == "dgl":
            raise ImportError("no such thing")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_dgl)
    monkeypatch.setattr("torch_geometric.typing.WITH_PYG_LIB", False)
    monkeypatch.setattr("torch_geometric.typing.WITH_TORCH_SPARSE", False)
    words = "--graph rmat:500,4000 --sizes 2 --batch-size 16 --methods graphsage --json"
    rows, err, code = said([*SAMPLING, *words.split()], capsys)
    assert not code and len(rows) == 1 and rows[0]["ratio_dgl_uniform"] is None
    assert "dgl is left out: DGL cannot be imported (ImportError: no such thing)" in err
    assert "pyg is left out: PyG samples only with pyg-lib or torch-sparse" in err


def test_the_stub_stays_only_if_dgl_came(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "dgl.graphbolt", raising=False)
    with pytest.raises(peers.Absent, match="adahop-lab\\[peers\\]"):
        peers.import_dgl()


def test_dgl_draws_on_the_same_graph():
    try:
        peers.import_dgl()
    except peers.Absent as e:
        pytest.skip(str(e))
    g = rmat("rmat:500,4000")
    peer = peers.DGL(g)
    seeds = torch.arange(50)
    for kind in (*peer.kinds, *peer.more):
        many = peer.runner(kind, [-1] if "labor" not in kind else [5000]).work(seeds)
        assert many == int(g.degree()[:50].sum())
    graph = peer.graph(torch.int64)
    block = peer.sampler("uniform", graph, [-1]).sample_blocks(graph, seeds)[2][0]
    assert block.idtype == torch.int64 and peer.graph(torch.int32).idtype == torch.int32
    src, dst = block.edges()
    ids = block.srcdata["_ID"]
    got = set(zip(ids[src.long()].tolist(), dst.tolist(), strict=True))
    want = {(int(s), v) for v in range(50) for s in g.indices[g.indptr[v] : g.indptr[v + 1]]}
    assert got == want


# --- ours ----------------------------------------------------------------------------------------------------------


def test_methods_have_parts():
    assert ours.parse("bs:update=true:eta=0.2") == ("bs", {"update": True, "eta": 0.2})
    g = rmat("rmat:500,4000")
    own = ours.sampler("graphsage:draw=systematic:policy=tracked", g, [2, 2], 8)
    assert own.how == "systematic" and type(own.policy).__name__ == "Tracked"
    assert ours.sampler("ladies", g, [2, 3], 8).sizes == [16, 24]
    for bad in ("nothing", "bs:eta", "cluster-gcn"):
        with pytest.raises(InputError, match="`methods`"):
            ours.sampler(bad, g, [2], 8)


def test_an_update_learns():
    g = rmat("rmat:500,4000")
    made = []
    make = ours.make

    def keep(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    for words, learns in (("bs:update=true", True), ("bs", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours, "make", keep)
            runner = ours.runner(words, g, [3], 8)
        before = {k: v.clone() for k, v in made[-1].state_dict().items() if k != "step"}
        runner.work(torch.arange(500))
        after = made[-1].state_dict()
        assert learns == any(not torch.equal(before[k], after[k]) for k in before)


def test_state_is_weighed_from_what_is_held():
    g = rmat("rmat:2000,40000")
    assert weigh("graphsage", g, [5, 5], 8) == {"bytes_per_edge": 0.0, "bytes_per_node": pytest.approx(0.0, abs=0.1)}
    assert 4.0 <= weigh("bs", g, [5, 5], 8)["bytes_per_edge"] <= 10.0
    tracked = weigh("graphsage:policy=tracked", g, [5, 5], 8)
    assert tracked["bytes_per_edge"] == 4.0 and 8.0 <= tracked["bytes_per_node"] <= 16.1  # and two numbers a layer


# --- commands ------------------------------------------------------------------------------------------------------


def test_sampling_leaves_rows_and_a_plot(tmp_path, capsys):
    words = ["bench", "sampling", "--graph", "star:100", "--sizes", "3", "--batch-size", "32", "--rounds", "2",
             "--seconds", "0", "--methods", "graphsage,labor", "--peers", "none", "--out",
             str(tmp_path / "o")]  # fmt: skip
    _, _, code = said(words, capsys)
    rows = [json.loads(line) for line in (tmp_path / "o" / "sampling.jsonl").read_text().splitlines()]
    assert not code and [row["method"] for row in rows] == ["graphsage", "labor"]
    assert (tmp_path / "o" / "sampling.png").exists() and (tmp_path / "o" / "sampling.svg").exists()


def test_epoch_has_the_same_keys(tmp_path, capsys):
    words = "--graph synthetic:300,3000,8,3 --sizes 2,2 --batch-size 64 --rounds 1 --hidden 8 --peers none --dropout .1"
    for arch in ("plain", "residual"):
        more = ["--arch", arch, "--methods", "graphsage,bs", "--json", "--out", str(tmp_path / arch)]
        rows, _, code = said(["bench", "epoch", *words.split(), *more], capsys)
        assert not code and [row["method"] for row in rows] == ["graphsage", "bs"]
        assert all(list(row)[:7] == KEYS and row["seconds"] > 0 and row["batches_per_s"] > 0 for row in rows)
        assert all(row["dropout"] == 0.1 for row in rows)
        assert (tmp_path / arch / "epoch.png").exists()


def test_dgl_trains_the_same_model():
    """With every neighbour taken, our loss and DGL's are one number for equal weights."""
    try:
        peers.import_dgl()
    except peers.Absent as e:
        pytest.skip(str(e))
    from adahop import models
    from adahop_lab.bench.dgl_epoch import DGLTraining
    from adahop_lab.bench.epoch import EpochBench

    data = load("synthetic:300,3000,8,3")
    ours_ = models.make("gcn", 8, 16, 3, arch="residual")
    seeds = torch.arange(50)
    graph = data.graph.normalized(*ours_.graph)
    want = ours_.inference(graph, data.x)[:50]
    theirs = DGLTraining(data, EpochBench("", sizes=(-1, -1), arch="residual", hidden=16), "sum-first")
    for name in ("encoder", "decoder"):
        getattr(theirs.net, name).load_state_dict(getattr(ours_, name).state_dict())
    for mine, conv in zip(ours_.convs, theirs.net.convs, strict=True):
        conv.linear.load_state_dict(mine.linear.state_dict())
    n_id, _, blocks = theirs.sampler.sample_blocks(theirs.graph, seeds.int())
    assert torch.allclose(theirs.net(blocks, data.x[n_id.long()]), want, atol=1e-5)


def test_degrees_leave_rows_and_a_plot(tmp_path, capsys):
    words = "--graph rmat:2000,40000 --degrees 10,100,90000 --rounds 1 --seconds 0 --methods graphsage,bs"
    rows, err, code = said(["bench", "degrees", *words.split(), "--json", "--out", str(tmp_path)], capsys)
    assert not code and [(row["degree"], row["method"]) for row in rows] == [
        (10, "graphsage"), (10, "bs"), (100, "graphsage"), (100, "bs")]  # fmt: skip
    assert "no node of a degree near 90,000" in err and (tmp_path / "degrees.svg").exists()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_inference_is_weighed_in_a_process_of_its_own(capsys):
    rows, _, code = said(["bench", "inference", "--graph", "rmat:2000,40000"], capsys)
    assert not code and rows[0]["ratio"] > 0
    assert rows[0]["needed_bytes"] == 2000 * 128 * 4 + 40000 * 8 + 2001 * 8


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--methods", "nothing"], "`methods` must be one of"),
        (["--methods", ","], "`methods` must be names"),
        (["--threads", "0"], "`threads` must be"),
        (["--rounds", "0"], "`rounds` must be"),
        (["--peers", "networkx"], "`peers` must be one of"),
        (["--graph", "rmat:3"], "`graph` must be rmat:N,E"),
        (["--sizes", "a"], "`sizes` must be"),
        (["--clock", "sun"], "`clock` must be one of"),
    ],
)
def test_bad_words(words, sentence, capsys):
    _, err, code = said(["bench", "sampling", "--graph", "rmat:500,4000", *words], capsys)
    assert code == 2 and sentence in err and "Traceback" not in err


def test_the_parts_of_setting_up():
    words = ["digits", "adahop", "2,2", "8", "64", "1", "cpu", "wall"]
    done = subprocess.run([sys.executable, "-m", "adahop_lab.bench.setup", *words], capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {*setup.PARTS, "load"} and all(seconds >= 0 for seconds in found.values())
    assert found["memory"] > 0 and found["batch"] > 0 and found["step"] > 0

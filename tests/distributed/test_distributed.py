"""Several processes: what they learn is equal, and equal to what one learns; parts; a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import adahop
import ranks
from adahop.datasets import load
from adahop.distributed import Shard, strategy, write_shards
from adahop.mapped import open_array
from adahop.methods import METHODS
from adahop.train import evaluate

HERE = Path(__file__).parents[1]
RANKS = 3


def start(size: int, command: list[str], **env: str) -> list[subprocess.Popen]:
    """`size` processes that find each other as torchrun's do."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    meet = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(adahop.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **meet, "PYTHONPATH": path, "RANK": str(r), "LOCAL_RANK": str(r), **env},
        )
        for r in range(size)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What three ranks saw, and the folder they left."""
    home = tmp_path_factory.mktemp("ranks")
    processes = start(RANKS, [str(HERE / "ranks.py"), str(home)], ADAHOP_CACHE=str(home / "cache"))
    for p in processes:
        _, said = p.communicate(timeout=300)
        assert p.returncode == 0, said[-3000:]
    return home, [json.loads((home / f"rank{r}.json").read_text()) for r in range(RANKS)]


# --- replicated ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ranks.RUNS)
def test_all_ranks_end_with_the_same_bits(seen, method):
    """257 seeds over 3 ranks, the last step with one seed for all: model, policy and history are equal on all."""
    _, everyone = seen
    first = everyone[0]["replicated"][method]
    assert all(rank["replicated"][method] == first for rank in everyone)


@pytest.mark.parametrize("method", ["graphsage", "bs", "adahop", "bs.m"])
def test_ranks_learn_what_one_process_learns(seen, method, monkeypatch):
    """Node-wise draws depend on the node alone, so several ranks draw what one does; sums differ by rounding only."""
    monkeypatch.setitem(METHODS, "own", ranks.OWN)
    one = adahop.fit(load(ranks.SPEC), method=method, **{**ranks.HOW, **ranks.RUNS[method]})
    many = seen[1][0]["replicated"][method]
    assert many["steps"] == one.steps == 2 * 5
    assert many["loss"] == pytest.approx([row["loss"] for row in one.history], rel=2e-3)
    assert abs(many["test"] - one.test) < 0.03


@pytest.mark.parametrize("method", ["bliss", "as-gcn"])
def test_other_methods_take_the_same_steps(seen, method):
    assert seen[1][0]["replicated"][method]["steps"] == 2 * 5


def test_prefetch_keeps_ranks_equal(seen):
    _, everyone = seen
    assert all(rank["prefetched"] == everyone[0]["prefetched"] for rank in everyone)


def test_alone_nothing_changes():
    here = strategy()
    assert (here.rank, here.size, here.total(2.0), here.parts(None)) == (0, 1, [2.0], None)


# --- partitioned ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ranks.PARTED)
def test_parts_train_together(seen, method):
    _, everyone = seen
    first = everyone[0]["parted"][method]
    assert first["steps"] == 2 * 5 and first["loss"][1] < first["loss"][0]
    assert all(rank["parted"][method] == first for rank in everyone)
    more = {**ranks.HOW, **ranks.PARTED[method]}
    one = adahop.fit(load(ranks.SPEC), method=method, **more)
    assert first["loss"] == pytest.approx([row["loss"] for row in one.history], rel=0.1)


@pytest.mark.parametrize("method", ranks.PARTED)
def test_inference_over_parts_is_that_of_the_whole(seen, method):
    home, everyone = seen
    data = load(home / "metis")
    model = adahop.fit(data, method=method, **{**ranks.HOW, **ranks.PARTED[method], "epochs": 1}).model
    model.load_state_dict(torch.load(home / f"{method}.pt", weights_only=True))
    scores = evaluate(model, data)
    first = everyone[0]["parted"][method]
    assert scores["test"] == pytest.approx(first["test"]) and scores["val"] == pytest.approx(first["val"])


def test_blocks_over_parts_are_of_the_graph(seen):
    _, everyone = seen
    data = load(ranks.SPEC)
    graph, x = data.graph.normalized("row", False), data.x
    src, dst = graph.edge_index()
    for rank in everyone:
        found = rank["parted"]["blocks"]
        assert found["n_id"][1][: len(found["seeds"])] == found["seeds"]
        assert found["n_id"][0][: len(found["n_id"][1])] == found["n_id"][1]
        torch.testing.assert_close(torch.tensor(found["x"]), x[torch.tensor(found["n_id"][0])])
        for s, d, e, _ in found["edges"]:
            assert src[torch.tensor(e)].tolist() == s and dst[torch.tensor(e)].tolist() == d
        assert set(found["edges"][1][3]) == {1.0}  # sizes -1: everyone, exactly
        assert len(found["edges"][1][0]) == int(graph.degree()[torch.tensor(found["seeds"])].sum())
        assert found["most"] == 1  # a target that several ranks drew has learnt once
    asked = {n for rank in everyone for n in rank["parted"]["blocks"]["n_id"][1]}
    chance = int((graph.degree()[torch.tensor(sorted(asked))] > 3).sum())
    assert sum(rank["parted"]["blocks"]["visits"] for rank in everyone) == chance


def test_shards_cover_the_graph_once(tmp_path):
    data = load("synthetic:300,4000,4,2")
    for how in ("range", "metis"):
        write_shards(data, tmp_path / how, 3, how)
        whole = load(tmp_path / how)
        original = open_array(tmp_path / how / "original.npy")
        assert torch.equal(whole.x, data.x[original]) and torch.equal(whole.y, data.y[original])
        edges = data.graph.edge_index()
        ours = whole.graph.edge_index()
        assert torch.equal(original[ours], edges)  # the user's edge order is kept
        shards = [Shard(tmp_path / how, r, 3, how) for r in range(3)]
        assert sum(s.graph.num_edges for s in shards) == data.graph.num_edges
        assert sum(int(s.train_mask.sum()) for s in shards) == int(data.train_mask.sum())
        for s in shards:
            rows = torch.arange(s.high - s.low)
            assert torch.equal(s.graph.degree()[rows], whole.graph.degree()[s.low : s.high])
            a, b = int(whole.graph.indptr[s.low]), int(whole.graph.indptr[s.high])
            assert torch.equal(s.ids(s.graph.indices), whole.graph.indices[a:b].long())
    with pytest.raises(adahop.InputError, match="must be cut into 2 parts"):
        Shard(tmp_path / "metis", 0, 2, "metis")
    with pytest.raises(adahop.InputError, match="no more than"):
        write_shards(data, tmp_path / "many", 301, "range")


def test_a_part_is_small(tmp_path):
    """Two parts of a denser graph: each holds at most 0.6 of the whole."""
    data = load("synthetic:2000,60000,32,4")
    write_shards(data, tmp_path / "one", 1, "range")
    write_shards(data, tmp_path / "two", 2, "range")

    def held(shard: Shard) -> int:
        return sum(t.nbytes for t in (*(t for _, t in shard.graph._tensors()), shard.halo, shard.x, shard.y))

    whole = held(Shard(tmp_path / "one", 0, 1))
    assert all(held(Shard(tmp_path / "two", r, 2)) <= 0.6 * whole for r in range(2))


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")
def test_a_rank_that_dies_is_named_and_the_job_resumes(tmp_path):
    """`adahop train` twice: one is killed, the other says which and ends; both go on, and rank 0 alone writes."""
    out = tmp_path / "out"
    command = ["-m", "adahop", "train", "--dataset", ranks.SPEC, "--hidden", "8", "--batch-size", "64"]
    command += ["--noise", "0"]  # a race would have rows of its arms
    both = start(2, [*command, "--checkpoint-every", "5", "--epochs", "40", "--out", str(out)])
    for _ in range(1000):
        if list(out.glob("checkpoints/*.ckpt")):
            break
        time.sleep(0.05)
    both[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, said = both[0].communicate(timeout=60)
    both[1].communicate()
    assert both[0].returncode == 1 and time.monotonic() - began < 60
    assert f"rank 1 (process {both[1].pid} on " in said and "died" in said
    again = start(2, ["-m", "adahop", "train", "--resume", str(out), "--json"])
    told = [p.communicate(timeout=120) for p in again]
    assert [p.returncode for p in again] == [0, 0], told
    assert "continues after step" in told[0][1] and told[1] == ("", "")
    assert json.loads(told[0][0].splitlines()[-1])["runs"][0]["steps"] == 40 * 5
    assert sorted(f.name for f in out.iterdir()) == ["best-seed0.pt", "config.json", "metrics.jsonl", "result.json"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, 41))


# --- in someone else's process group ---------------------------------------------------------------------------------

GUEST = """
import torch, torch.distributed as dist
from adahop.distributed import session
dist.init_process_group("gloo")
with session() as first:
    assert first == (dist.get_rank() == 0)
one = torch.ones(())
dist.all_reduce(one)
assert float(one) == 2.0
dist.destroy_process_group()
"""


def test_a_process_group_that_was_there_stays():
    """Ray Train and Lightning make their own, and go on using it."""
    for p in start(2, ["-c", GUEST]):
        _, said = p.communicate(timeout=120)
        assert p.returncode == 0, said[-3000:]

"""One rank of the processes that test_distributed.py starts: runs every check, leaves what it saw as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import adahop
from adahop import distributed
from adahop.distributed import Peers, Shard, write_shards
from adahop.distributed.partitioned import Partitioned
from adahop.methods import METHODS, Method
from adahop.ops import Odds
from adahop.policies import Policy
from adahop.run import Run
from adahop.samplers import NeighborSampler
from adahop.train import Config

SPEC = "synthetic:389,6000,6,3"  # 257 nodes to train on: four full batches of 64 and one of a single seed
HOW = {"epochs": 2, "batch_size": 64, "hidden": 8, "dropout": 0.0, "sizes": (4, 4)}
RUNS = {
    "graphsage": {}, "bs": {}, "adahop": {}, "bs.m": {"model": "gat"}, "bliss": {"sizes": (64, 64)},
    "as-gcn": {"sizes": (64, 64)}, "graphsaint": {}, "s-gcn": {"model": "gat", "estimator": "exact+sums"},
}  # fmt: skip


class Heard(Policy):
    """As a user would write it: prefers nodes that were often drawn, and says nowhere that it learns."""

    def __init__(self, graph, layers):
        super().__init__(graph, layers)
        self.register_buffer("times", torch.ones(layers, graph.num_nodes))

    def odds(self, layer):
        return Odds(edge=self.graph.weight, node=self.times[layer].sqrt())

    def update(self, layer, block, energy):
        self.times[layer] += torch.bincount(block.n_id[block.src], energy, minlength=self.times.shape[1])


def own(graph, sizes, seed=0):
    sampler = NeighborSampler(graph, sizes, None, "systematic", seed)
    sampler.policy = Heard(graph, len(sampler.sizes))
    return sampler


OWN = Method("own", "node-wise", True, "4 bytes per node and layer", own)
RUNS["own"] = {}
PARTED = {"graphsage": {}, "bs": {"model": "gat"}, "adahop": {}}


def digest(tensors) -> str:
    h = hashlib.blake2b(digest_size=8)
    for t in tensors:
        h.update(t.detach().numpy().tobytes())
    return h.hexdigest()


def replicated(rank: int) -> dict:
    data, out = adahop.load(SPEC), {}
    for method, more in RUNS.items():
        r = adahop.fit(data, method=method, **{**HOW, **more})
        rows = [kept for m in r.model.memories.values() for _, kept in sorted(m.state().items())]
        out[method] = {
            "steps": r.steps, "loss": [row["loss"] for row in r.history], "test": r.test,
            "state": digest(v for k, v in sorted(r.sampler.state_dict().items())),
            "model": digest(r.model.state_dict().values()), "history": digest(rows),
        }  # fmt: skip
    return out


def prefetched() -> dict:
    data = adahop.load(SPEC)
    r = adahop.fit(data, method="bs", prefetch=2, **HOW)
    return {"state": digest(v for k, v in sorted(r.sampler.state_dict().items())), "steps": r.steps}


def parted(rank: int, size: int, home: Path) -> dict:
    out: dict = {}
    for how in ("range", "metis"):
        if rank == 0:
            write_shards(adahop.load(SPEC), home / how, size, how)
        Peers().barrier()
    shard = Shard(home / "metis", rank, size, "metis")
    for method, more in PARTED.items():
        r = adahop.fit(shard, method=method, **{**HOW, **more})
        if rank == 0:
            torch.save(r.model.state_dict(), home / f"{method}.pt")
        out[method] = {"steps": r.steps, "loss": [row["loss"] for row in r.history], "test": r.test, "val": r.val}
    out["blocks"] = blocks(Shard(home / "range", rank, size, "range"))
    for method, why in {"labor": "node-wise", "s-gcn": "estimator"}.items():
        try:
            adahop.fit(shard, method=method, **HOW)
            raise AssertionError(f"{method} must be refused")
        except adahop.InputError as e:
            assert why in str(e), e
    return out


def blocks(shard: Shard) -> dict:
    """Blocks drawn over parts, as global ids: the parent knows the whole graph and looks them over."""
    config = Config(model="sage", method="bs", **{**HOW, "sizes": (3, -1)})
    run = Run(shard, config, 0)
    assert isinstance(run.strategy, Partitioned)
    seeds = torch.arange(shard.low, shard.high)[:20]
    out = run.sampler.sample(seeds)
    again = run.loader.x.index_select(0, out[0].n_id)
    assert again.shape == (out[0].num_src, shard.x.shape[1])
    told = [torch.ones(b.num_edges) for b in out]
    run.sampler.update(out, told)
    seen = run.sampler.inner.policy.visits
    named = [[b.n_id[b.src].tolist(), b.n_id[b.dst].tolist(), b.e_id.tolist(), b.scale.tolist()] for b in out]
    return {"seeds": seeds.tolist(), "n_id": [b.n_id.tolist() for b in out], "edges": named, "x": again.tolist(),
            "visits": int(seen[0].sum()), "most": int(seen.max())}  # fmt: skip


def talk(rank: int, size: int) -> None:
    """gather and swap bring what was sent, be it empty, wide or of another kind."""
    peers = Peers()
    mine = [torch.arange(rank * 3), torch.full((rank, 2), float(rank)), torch.tensor([rank % 2 == 0])]
    for r, theirs in enumerate(peers.all_gather(mine)):
        assert theirs[0].tolist() == list(range(r * 3)) and theirs[1].shape == (r, 2)
        assert theirs[2].tolist() == [r % 2 == 0]
    got = peers.all_to_all([[torch.full((to,), 10 * rank + to), torch.zeros(0, 3)] for to in range(size)])
    for r, theirs in enumerate(got):
        assert theirs[0].tolist() == [10 * r + rank] * rank and theirs[1].shape == (0, 3)
    assert peers.total(1.0, rank) == [size, sum(range(size))]
    like = [torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    grads = peers.average([torch.ones(2) * rank, None if rank else torch.ones(1), None], like)
    assert grads[0].tolist() == [sum(range(size)) / size] * 2 and grads[1].tolist() == [1.0] and grads[2] is None


def main(home: Path) -> None:
    torch.set_num_threads(1)
    with distributed.session():
        peers = Peers()
        talk(peers.rank, peers.size)
        out = {
            "replicated": replicated(peers.rank),
            "prefetched": prefetched(),
            "parted": parted(peers.rank, peers.size, home),
        }
        (home / f"rank{peers.rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    METHODS["own"] = OWN
    main(Path(sys.argv[1]))

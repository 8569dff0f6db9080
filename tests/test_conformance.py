"""Every method of the one list keeps the one contract."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import adahop
from adahop import ops
from adahop.checks import InputError
from adahop.graph import Graph
from adahop.methods import METHODS
from conftest import messy_edges, messy_graph, same_blocks

FAMILIES = {"node-wise": [3, 3], "layer-wise": [12, 12], "subgraph": [-1, -1]}
SEEDS = torch.tensor([9, 3, 57, 0, 22, 31])

every_method = pytest.mark.parametrize("name", METHODS)


def build(name: str, graph: Graph | None = None, seed: int = 0, sizes=None):
    graph = messy_graph().normalized("row") if graph is None else graph
    method = METHODS[name]
    given = {}
    if "features" in method.needs:
        given["features"] = torch.randn(graph.num_nodes, 4, generator=torch.Generator().manual_seed(0))
    return adahop.make(name, graph, sizes or FAMILIES[method.family], seed=seed, **given)


def numbers(blocks, seed: int):
    """One positive number an edge, like the energies of some model."""
    gen = torch.Generator().manual_seed(seed)
    return [(torch.rand(b.num_edges, generator=gen) + 0.1) * b.scale**2 for b in blocks]


def travel(sampler, steps: int, start: int = 0):
    """Some steps of drawing and learning; what was drawn."""
    out = []
    for t in range(start, start + steps):
        blocks = sampler.sample((SEEDS + t) % 60)
        sampler.update(blocks, numbers(blocks, t))
        out.append(blocks)
    return out


def fingerprint(name: str) -> str:
    h = hashlib.sha256()
    for blocks in travel(build(name, seed=11), 6):
        for block in blocks:
            for t in block:
                h.update(b"" if t is None else np.asarray(t).tobytes())
    return h.hexdigest()


def test_the_list_is_well_formed():
    assert {"graphsage", "bs", "bs.m"} <= set(METHODS)
    for name, m in METHODS.items():
        assert m.name == name == name.lower() and m.family in FAMILIES and m.state and m.models
        assert set(m.models) <= set(adahop.models.MODELS) and set(m.needs) <= {"features"}
        assert len(m.models) == len(adahop.models.MODELS) or m.why_not, f"{name} must say why it leaves models out"


# --- what a block is -----------------------------------------------------------------------------------------------


def check_blocks(blocks, graph: Graph, seeds: torch.Tensor, layers: int = 2, family: str = "node-wise") -> None:
    assert isinstance(blocks, list) and len(blocks) == layers
    last = blocks[-1]
    assert torch.equal(last.n_id[: len(seeds)], seeds), "seeds must come first"
    assert last.num_dst == len(seeds) if family != "subgraph" else last.num_dst >= len(seeds)
    for low, high in itertools.pairwise(blocks):
        assert low.num_dst == high.num_src and torch.equal(low.n_id[: low.num_dst], high.n_id)
    edges = graph.edge_index()
    for b in blocks:
        m = b.num_edges
        assert type(b) is adahop.Block and isinstance(b.num_dst, int)
        assert b.edge_index.shape == (2, m) and all(t.shape == (m,) for t in (b.e_id, b.weight, b.prob, b.scale, b.pos))
        assert all(t.dtype == torch.int64 for t in (b.n_id, b.edge_index, b.e_id, b.ptr, b.pos))
        assert all(t.dtype == torch.float32 and not t.requires_grad for t in (b.weight, b.prob, b.scale))
        assert b.ptr.shape == (b.num_dst + 1,) and b.ptr[0] == 0 and b.ptr[-1] == m
        assert torch.equal(b.dst, torch.repeat_interleave(torch.arange(b.num_dst), b.ptr.diff()))
        assert m == 0 or (int(b.src.min()) >= 0 and int(b.src.max()) < b.num_src)
        assert torch.equal(edges[:, b.e_id], b.n_id[b.edge_index]), "e_id must name the edge in the user's order"
        assert torch.equal(graph.edge_weight()[b.pos], b.weight)
        assert torch.equal(b.e_id, b.pos if graph.eid is None else graph.eid.long()[b.pos])
        assert torch.isfinite(b.scale).all() and (b.scale >= 0).all()
        assert ((b.prob > 0) & (b.prob <= 1)).all()
        fresh = b.n_id[b.num_dst :]
        assert len(fresh.unique()) == len(fresh) and not torch.isin(fresh, b.n_id[: b.num_dst]).any()


@every_method
@pytest.mark.parametrize("kind", ["weighted", "plain", "sorted"])
def test_blocks(name, kind):
    edge_index, weight = messy_edges()
    if kind == "sorted":
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    graph = Graph.from_edge_index(edge_index, weight if kind == "weighted" else None, num_nodes=60)
    graph = graph.normalized("row", self_loops=kind != "sorted") if kind != "plain" else graph
    sampler = build(name, graph)
    for t, blocks in enumerate(travel(sampler, 4)):
        check_blocks(blocks, graph, (SEEDS + t) % 60, family=METHODS[name].family)
    assert int(sampler.step) == 4


@every_method
@pytest.mark.parametrize("layers", [1, 3])
def test_depths(name, layers):
    graph = messy_graph().normalized("row")
    sampler = build(name, graph, sizes=FAMILIES[METHODS[name].family][:1] * layers)
    blocks = sampler.sample(SEEDS)
    check_blocks(blocks, graph, SEEDS, layers, METHODS[name].family)
    sampler.update(blocks, numbers(blocks, 0))


@every_method
def test_the_node_itself_is_never_sampled_away(name):
    for blocks in travel(build(name), 3):
        for block in blocks:
            own = block.is_self()
            assert torch.equal(block.dst[own].unique(), torch.arange(block.num_dst))
            if METHODS[name].unbiased:
                assert (block.scale[own] == 1).all()


@every_method
def test_no_size_limit_means_everyone(name):
    if METHODS[name].family == "subgraph":
        pytest.skip("a subgraph's size is not set by `sizes`")
    graph = messy_graph().normalized("row")
    for block in build(name, graph, sizes=[-1, -1]).sample(torch.arange(60)):
        assert torch.equal(block.pos.sort().values, torch.arange(graph.num_edges))
        assert torch.allclose(block.scale, torch.ones(()), atol=1e-6) and (block.prob == 1).all()


# --- odd graphs and seeds ------------------------------------------------------------------------------------------


@every_method
def test_isolated_empty_and_repeated_seeds(name):
    for graph in (messy_graph(), messy_graph().normalized("row")):
        sampler = build(name, graph)
        family = METHODS[name].family
        for seeds in ([58, 59], [], [3, 3, 8, 3], [59], [58, 58]):
            blocks = sampler.sample(seeds)
            check_blocks(blocks, graph, torch.tensor(seeds, dtype=torch.long), family=family)
            sampler.update(blocks, numbers(blocks, 0))
            if seeds == [] and family != "subgraph":
                assert all(b.num_edges == 0 and b.num_src == 0 for b in blocks)
        twice = sampler.sample([3, 3])[-1]
        if family == "node-wise":  # one node, one draw
            assert torch.equal(twice.e_id[: twice.ptr[1]], twice.e_id[twice.ptr[1] :])


@every_method
@pytest.mark.parametrize("nodes", [1, 4])
def test_graphs_without_edges(name, nodes):
    for loops in (False, True):
        graph = Graph.from_edge_index(torch.empty(2, 0), num_nodes=nodes).normalized("row", self_loops=loops)
        sampler = build(name, graph)
        blocks = sampler.sample(torch.arange(nodes))
        check_blocks(blocks, graph, torch.arange(nodes), family=METHODS[name].family)
        assert all(b.num_edges == nodes * loops for b in blocks)
        sampler.update(blocks, numbers(blocks, 0))


@every_method
def test_seeds_of_many_kinds(name):
    mask = torch.zeros(60, dtype=torch.bool)
    mask[[3, 9]] = True
    drawn = [build(name).sample(s) for s in (mask, [3, 9], (3, 9), np.array([3, 9]), torch.tensor([3, 9]).int())]
    assert all(same_blocks(drawn[0], other) for other in drawn[1:])
    assert build(name).sample(7)[-1].n_id[0] == 7


@every_method
@pytest.mark.parametrize(
    ("seeds", "kinds", "words"),
    [
        ([0.5], (TypeError, ValueError), "whole numbers, got dtype"),
        ([3, -1], (IndexError, ValueError), r"must be in \[0, 60\), got seeds\[1\] = -1"),
        ([60], (IndexError, ValueError), r"must be in \[0, 60\), got seeds\[0\] = 60"),
        (torch.ones(59, dtype=torch.bool), (ValueError,), r"must have 60 entries, got shape \(59,\)"),
        (torch.zeros(2, 2).long(), (ValueError,), "one-dimensional"),
        ("seven", (TypeError, ValueError), "`seeds` must"),
        (None, (TypeError, ValueError), "`seeds` must"),
    ],
)
def test_bad_seeds(name, seeds, kinds, words):
    sampler = build(name)
    for kind in kinds:
        with pytest.raises(kind, match=words):
            sampler.sample(seeds)
    assert int(sampler.step) == 0  # a refused call leaves no trace
    check_blocks(sampler.sample(SEEDS), sampler.graph, SEEDS, family=METHODS[name].family)


@every_method
def test_bad_arguments(name):
    for sizes in ([0, 3], 5, [], [2.5]):
        with pytest.raises(InputError, match="`sizes` must be"):
            adahop.make(name, messy_graph(), sizes)
    with pytest.raises(InputError, match="got 'no_such_option'"):
        adahop.make(name, messy_graph(), FAMILIES[METHODS[name].family], no_such_option=1)
    with pytest.raises(InputError, match=r"weight\[2\] = nan"):
        build(name, Graph.from_edge_index([[0, 1, 2], [1, 2, 0]], [1.0, 1.0, float("nan")]))


def test_unknown_method():
    with pytest.raises(InputError, match="did you mean 'graphsage'"):
        adahop.make("graphsag", messy_graph(), [2])


# --- determinism ---------------------------------------------------------------------------------------------------


@every_method
def test_one_seed_one_road(name):
    one, two, other = (travel(build(name, seed=s), 5) for s in (1, 1, 2))
    assert all(same_blocks(a, b) for a, b in zip(one, two, strict=True))
    if name not in ("cluster-gcn", "rns"):  # an induced subgraph leaves nothing to chance once its nodes are given
        assert not all(same_blocks(a, b) for a, b in zip(one, other, strict=True))


@every_method
def test_steps_differ(name):
    if name in ("cluster-gcn", "rns"):
        pytest.skip("an induced subgraph leaves nothing to chance once its nodes are given")
    sampler = build(name)
    drawn = [sampler.sample(SEEDS) for _ in range(4)]
    assert not any(same_blocks(drawn[0], other) for other in drawn[1:])


@every_method
def test_the_callers_random_state_has_no_part(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = travel(build(name), 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(same_blocks(a, b) for a, b in zip(one, travel(build(name), 2), strict=True))


@every_method
def test_thread_counts_do_not_matter(name, many_threads):
    roads = []
    for n in (1, 2, 8):
        with ops.threads(n):
            sampler = build(name, seed=3)
            roads.append((travel(sampler, 4), sampler.state_dict()))
    for road, state in roads[1:]:
        assert all(same_blocks(a, b) for a, b in zip(roads[0][0], road, strict=True))
        assert all(torch.equal(state[k], roads[0][1][k]) for k in state)


def test_a_fresh_process_draws_the_same():
    code = "import sys, test_conformance as t; print(*map(t.fingerprint, sys.argv[1:]))"
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)]), "PYTHONHASHSEED": "7"}
    ran = subprocess.run([sys.executable, "-c", code, *METHODS], capture_output=True, text=True, env=env, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert dict(zip(METHODS, ran.stdout.split(), strict=True)) == {name: fingerprint(name) for name in METHODS}


@every_method
def test_state_dict_goes_on_where_it_was(name, tmp_path):
    one = build(name, seed=4)
    nodes = torch.arange(0, 60, 2)
    for seeds in one.epoch(nodes, 8):
        blocks = one.sample(seeds)
        one.update(blocks, numbers(blocks, 0))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    two = build(name, seed=4)
    two.load_state_dict(torch.load(tmp_path / "state.pt"))
    roads = []
    for sampler in (one, two):
        road = []
        for i, seeds in enumerate(sampler.epoch(nodes, 8)):
            blocks = sampler.sample(seeds)
            sampler.update(blocks, numbers(blocks, i))
            road += [blocks]
        roads.append(road)
    assert len(roads[0]) > 0
    assert all(same_blocks(a, b) for a, b in zip(*roads, strict=True))
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())


@every_method
def test_epochs_are_named_by_seed_and_number(name):
    nodes = torch.arange(0, 60, 2)
    a, b = build(name, seed=1), build(name, seed=1)
    first = [torch.cat(list(s.epoch(nodes, 7))) for s in (a, b)]
    second = [torch.cat(list(s.epoch(nodes, 7))) for s in (a, b)]
    assert torch.equal(*first) and torch.equal(*second) and int(a.epochs) == 2
    assert len(list(a.epoch(nodes, 7))) == a.batches(nodes, 7)
    assert list(a.epoch([], 7)) == [] and a.batches(torch.tensor([], dtype=torch.long), 7) == 0


# --- updates -------------------------------------------------------------------------------------------------------


@every_method
def test_updates_are_checked(name):
    sampler = build(name)
    blocks = sampler.sample(SEEDS)
    before = {k: v.clone() for k, v in sampler.state_dict().items()}
    good = numbers(blocks, 0)
    for bad, words in (
        (good[:1], "one tensor a block, 2 in all, got 1"),
        ([good[0], good[1][:-1]], r"`energy\[1\]` must hold one number per edge"),
        ([good[0][:, None], good[1]], r"`energy\[0\]` must hold one number per edge"),
    ):
        with pytest.raises(InputError, match=words):
            sampler.update(blocks, bad)
    assert all(torch.equal(v, before[k]) for k, v in sampler.state_dict().items())
    sampler.update(blocks, [e.double() for e in good])  # any dtype will do
    assert all(torch.isfinite(v).all() for v in sampler.state_dict().values() if v.is_floating_point())


@every_method
def test_extreme_feedback_leaves_a_working_sampler(name):
    graph = messy_graph().normalized("row")
    sampler = build(name, graph)
    for value in (0.0, 1e-30, 1e30, torch.inf, torch.nan):
        for _ in range(3):
            blocks = sampler.sample(SEEDS)
            sampler.update(blocks, [torch.full((b.num_edges,), value) for b in blocks])
    check_blocks(sampler.sample(SEEDS), graph, SEEDS, family=METHODS[name].family)
    assert all(torch.isfinite(v).all() for v in sampler.state_dict().values() if v.is_floating_point())


@every_method
def test_updates_leave_no_graph_of_gradients(name):
    sampler = build(name)
    blocks = sampler.sample(SEEDS)
    sampler.update(blocks, [e.requires_grad_() for e in numbers(blocks, 0)])
    assert not any(v.requires_grad for v in sampler.buffers())
    penalty = sampler.penalty(blocks, [e.detach() for e in numbers(blocks, 0)])
    assert isinstance(penalty, float) or penalty.dim() == 0
    weight = sampler.loss_weight(blocks)
    assert weight is None or (weight.shape == (blocks[-1].num_dst,) and (weight >= 0).all())


@every_method
def test_moving_a_sampler_keeps_its_road(name):
    sampler = build(name, seed=6)
    same = build(name, seed=6).to("cpu")
    assert all(same_blocks(a, b) for a, b in zip(travel(sampler, 2), travel(same, 2), strict=True))

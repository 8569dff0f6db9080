"""Typed graphs: doors, seeds by type, sizes by relation, and a batch by type and relation."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from adahop import Graph, InputError, make, ops
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import Merged

from test_rows import typed  # isort: skip
from conftest import messy_graph  # isort: skip

BOUGHT, SEEN, KNOWS = ("item", "bought", "user"), ("item", "seen", "user"), ("user", "knows", "user")
RATES, LIKE = ("user", "rates", "item"), ("item", "like", "item")


# --- the doors ------------------------------------------------------------------------------------------------------


def test_a_hetero_data_comes_back_as_it_was():
    g = typed()
    data = g.to_data()
    assert isinstance(data, HeteroData) and data.node_types == ["user", "item"]
    assert tuple(data.edge_types) == g.relations and data[LIKE].edge_index.shape == (2, 0)
    again = Graph.from_data(data)
    assert again.hash() == g.hash() and again.types.nodes == g.types.nodes
    back = again.to_data()
    for relation in data.edge_types:
        assert torch.equal(back[relation].edge_index, data[relation].edge_index)
        assert torch.equal(back[relation].edge_weight, data[relation].edge_weight)
    assert {t: back[t].num_nodes for t in back.node_types} == {"user": 12, "item": 30} == g.types.num_nodes
    assert "types=['user', 'item'], relations=5" in repr(g)


def test_weights_of_some_relations_and_types_known_from_features():
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.rand(3, 2), 4
    data["a", "to", "b"].edge_index = torch.tensor([[2, 0], [3, 1]])
    data["b", "back", "a"].edge_index = torch.tensor([[3], [2]])
    data["b", "back", "a"].edge_weight = torch.tensor([5.0])
    g = Graph.from_data(data)
    assert g.num_nodes == 7 and g.edge_index().tolist() == [[2, 0, 6], [6, 4, 2]]
    assert g.to_data()["a", "to", "b"].edge_weight.tolist() == [1.0, 1.0]


def test_a_plain_graph_as_data():
    plain = messy_graph()
    data = plain.to_data()
    assert isinstance(data, Data) and torch.equal(data.edge_index, plain.edge_index())
    assert Graph.from_data(data).hash() == plain.hash()


@pytest.mark.parametrize("method", ["graphsage", "bs.m", "labor", "ladies"])
def test_one_type_and_one_relation_draw_as_the_plain_graph(method):
    edge_index = messy_graph().edge_index()
    data = HeteroData()
    data["n"].num_nodes, data["n", "to", "n"].edge_index = 60, edge_index
    graphs = Graph.from_data(data), Graph.from_edge_index(edge_index, num_nodes=60)
    one, other = (make(method, g, [3, 4], seed=5) for g in graphs)
    for _ in range(3):
        for a, b in zip(*(blocks := (one.sample(("n", [3, 0, 59])), other.sample([3, 0, 59]))), strict=True):
            for name in ("n_id", "edge_index", "e_id", "prob", "scale", "pos", "ptr"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name
        for sampler, drawn in zip((one, other), blocks, strict=True):
            sampler.update(drawn, [(b.n_id[b.src] + 1.0) * b.scale for b in drawn])


def test_a_name_is_part_of_the_hash():
    edges = torch.tensor([[0, 1], [1, 0]])
    hashes = {Graph.from_relations({"n": 2}, {("n", name, "n"): edges}).hash() for name in "ab"}
    assert len(hashes) == 2


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_seeds_by_type():
    g = typed()
    assert g.ids({"item": [3, 0], "user": [1]}).tolist() == [15, 12, 1]
    assert g.ids(("item", [29])).tolist() == [41] and g.ids("user").tolist() == list(range(12))
    assert g.ids([40, 2]).tolist() == [40, 2]
    mask = torch.zeros(30, dtype=torch.bool)
    mask[[4, 7]] = True
    assert g.ids({"item": mask}).tolist() == [16, 19]
    blocks = NeighborSampler(g, [2, 2]).sample({"item": [3], "user": [1, 0]})
    assert blocks[-1].n_id[:3].tolist() == [15, 1, 0]
    parts = list(NeighborSampler(g, [2]).epoch(("item", range(30)), 8))
    assert sorted(torch.cat(parts).tolist()) == list(range(12, 42))
    split = g.types.split(torch.tensor([13, 2, 12, 0]))
    assert split["user"].tolist() == [2, 0] and split["item"].tolist() == [1, 0]


# --- sizes ----------------------------------------------------------------------------------------------------------


def taken(g: Graph, block) -> torch.Tensor:
    """How many true neighbours each row of a block has, and how many it could have."""
    loops = (g.first - g.indptr[:-1])[block.row]
    return block.row_ptr.diff() - loops, (g.last - g.first)[block.row]


def test_sizes_by_relation():
    g = typed()
    sizes = {BOUGHT: [2, 1], "seen": [-1, 3], "knows": [0, 0], "default": [4, 4]}
    sampler = NeighborSampler(g, sizes, seed=2)
    blocks = sampler.sample({"user": range(12), "item": range(30)})
    for layer, want in enumerate(([2, -1, 0, 4, 4], [1, 3, 0, 4, 4])):
        block = blocks[layer]
        many, most = taken(g, block)
        k = torch.tensor(want)[block.relation]
        assert torch.equal(many, torch.where(k < 0, most, torch.minimum(k, most)))
        assert set(block.relation.tolist()) == {0, 1, 3}  # nothing at all of "knows", not even self-loops


def test_rows_of_targets_in_both_forms():
    g = typed()
    nodes = torch.tensor([40, 3, 3, 11, 0, 20])
    some = torch.tensor([True, False, True, False, True])
    wide, small = (g.types.ptr, g.types.relation), (g.types.ptr.int(), g.types.relation.short())
    for only, most in ((None, 0), (some, 0), (None, 3), (some, 3)):
        forms = ((ops.target_rows, small), (ops.target_rows.reference, wide))
        ours, plain = (f(*where, nodes, only, most) for f, where in forms)
        assert all(
            torch.equal(getattr(ours, k), getattr(plain, k)) for k in ("row", "dst", "target", "relation", "ptr")
        )
        assert torch.equal(ours.relation, g.types.relation[ours.row]) and ours.ptr.numel() == 7


def test_equal_sizes_by_relation_are_a_list():
    g = typed()
    named = {"bought": [2, 3], "seen": [2, 3], "knows": [2, 3], "rates": [2, 3], "like": [2, 3]}
    a, b = (NeighborSampler(g, sizes, seed=1).sample(range(9)) for sizes in (named, [2, 3]))
    assert all(torch.equal(x.pos, y.pos) for x, y in zip(a, b, strict=True))
    assert NeighborSampler(g, named).fixed_size and not NeighborSampler(g, {**named, "like": [2, 4]}).fixed_size


def test_budgets_by_relation_and_by_type_of_the_sources():
    g = typed()
    for sizes, group in (
        ({"bought": [30], "rates": [60], "default": [0]}, [0, -1, -1, 1, -1]),
        ({"item": [40], "user": [65]}, [0, 0, 1, 1, 0]),
        ({"bought": [60], "rates": [60], "default": [60]}, [0, -1, -1, 1, -1]),
    ):
        sampler = make("graphsage", g, sizes, budget=True, seed=1, draw="systematic")
        (block,) = sampler.sample(range(42))
        many, most = taken(g, block)
        of = torch.tensor(group)[block.relation]
        totals = torch.zeros(2, dtype=torch.long).index_add_(0, of[of >= 0], many[of >= 0])
        assert totals.tolist() == [next(iter(v)) for v in list(sizes.values())[:2]]
        assert bool((many <= most).all())


@pytest.mark.parametrize("method", ["ladies", "fastgcn", "bliss", "as-gcn"])
def test_layer_wise_sizes_by_type(method):
    g = typed()
    sampler = make(method, g, {"item": [5], "user": [2]}, inner=False, seed=3)
    (block,) = sampler.sample({"user": [0, 1, 2], "item": [3, 4]})
    chosen = block.n_id[block.src[~block.is_self()]].unique()
    assert int((chosen >= 12).sum()) <= 5 and int((chosen < 12).sum()) <= 2
    if method != "fastgcn":
        assert chosen.numel() == 7


# --- a batch by type and relation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True])
def test_a_batch_by_type_holds_the_edges_drawn(merged):
    g = typed()
    data = g.to_data()
    sampler = NeighborSampler(g, [3, 2, 2], draw="systematic", seed=3)
    numbering = Merged() if merged else None
    blocks = sampler.sample({"user": [4, 0], "item": [7]}, numbering)
    batch = numbering.by_type(g.types, blocks) if merged else g.types.batch(blocks)
    assert list(batch.n_id) == ["user", "item"] and tuple(batch.edge_index) == g.relations
    assert batch.n_id["user"][:2].tolist() == [4, 0] and batch.n_id["item"][:1].tolist() == [7]
    assert [hops[0] for hops in batch.num_nodes.values()] == [2, 1]
    scale = batch.by_relation([b.scale for b in blocks])
    for relation, (row, col) in batch.edge_index.items():
        ends = torch.stack([batch.n_id[relation[0]][row], batch.n_id[relation[2]][col]])
        assert torch.equal(ends, data[relation].edge_index[:, batch.e_id[relation]]), relation
        assert sum(batch.num_edges[relation]) == row.numel() == scale[relation].numel()
        found = torch.tensor(batch.num_nodes[relation[2]]).cumsum(0)
        hop = torch.arange(3).repeat_interleave(torch.tensor(batch.num_edges[relation]))
        assert bool((col < found[hop]).all())  # the target of an edge was found before
    assert {t: sum(hops) for t, hops in batch.num_nodes.items()} == {t: len(v) for t, v in batch.n_id.items()}
    assert batch.n_id["user"].unique().numel() == batch.n_id["user"].numel()
    x = torch.arange(42.0)
    n_id = numbering.n_id if merged else blocks[0].n_id
    assert torch.equal(x[n_id][batch.node["item"]] - 12, batch.n_id["item"].float())


def test_a_skipped_layer_and_an_empty_batch_have_every_entry():
    g = typed()
    sampler = NeighborSampler(g, [2, 2])
    sampler.skip = frozenset({0})
    for seeds in ({"user": [1]}, {"user": []}):
        batch = g.types.batch(sampler.sample(seeds))
        assert all(len(v) == 3 for v in batch.num_nodes.values()) and all(len(v) == 2 for v in batch.num_edges.values())
        assert batch.edge_index[LIKE].shape == (2, 0) and batch.edge_index[LIKE].dtype == torch.int64


# --- mistakes ---------------------------------------------------------------------------------------------------------


def no_edges() -> HeteroData:
    data = HeteroData()
    data["a"].num_nodes = 2
    return data


def no_count() -> HeteroData:
    data = HeteroData()
    data["a"].num_nodes = 2
    data["a", "to", "b"].edge_index = torch.tensor([[0], [1]])
    return data


PAIR = torch.tensor([[0, 1], [1, 0]])
MISTAKES = {
    "an unknown type": (lambda g: g.ids({"usr": [0]}), "node type.*got 'usr'; did you mean 'user'"),
    "a type's id": (lambda g: g.ids({"item": [30]}), r"seeds\['item'\].*\[0, 30\).*= 30"),
    "a type's mask": (lambda g: g.ids(("user", torch.ones(5, dtype=torch.bool))), "must have 12 entries"),
    "types of a plain graph": (lambda g: messy_graph().ids({"a": [0]}), "no node types"),
    "an unknown relation": (
        lambda g: NeighborSampler(g, {("user", "rate", "item"): [1], "default": [1]}),
        r"`sizes` must be one of .* did you mean \('user', 'rates', 'item'\)",
    ),
    "a missing relation": (lambda g: NeighborSampler(g, {"bought": [1]}), "default.*none for .*'seen'"),
    "unequal lists": (lambda g: NeighborSampler(g, {"bought": [1, 2], "default": [1]}), "one length, got 2 .* and 1"),
    "an empty dict": (lambda g: NeighborSampler(g, {}), "at least one relation"),
    "below -1": (lambda g: NeighborSampler(g, {"bought": [-2], "default": [1]}), "at least -1"),
    "types without a budget": (lambda g: NeighborSampler(g, {"user": [1], "item": [2]}), "by relation"),
    "relations of a layer": (lambda g: make("ladies", g, {"bought": [1], "default": [1]}), "by node type"),
    "a dict for a plain graph": (lambda g: NeighborSampler(messy_graph(), {"a": [1]}), "no relations"),
    "no relation": (lambda g: Graph.from_data(no_edges()), "at least one relation"),
    "no count": (lambda g: Graph.from_data(no_count()), r"data\['b'\]` must have features or `num_nodes`"),
    "an edge's id": (
        lambda g: Graph.from_relations({"a": 1, "b": 2}, {("a", "to", "b"): PAIR}), r"\[0\]` must be in \[0, 1\)",
    ),
    "an edge's type": (lambda g: Graph.from_relations({"aa": 2}, {("ab", "to", "aa"): PAIR}), "did you mean 'aa'"),
    "no triple": (lambda g: Graph.from_relations({"a": 2}, {"to": PAIR}), "source type, name, target type"),
    "a shape": (lambda g: Graph.from_relations({"a": 2}, {("a", "to", "a"): PAIR[0]}), r"shape \[2, E\]"),
    "a weight missing": (
        lambda g: Graph.from_relations(
            {"a": 2}, {("a", "x", "a"): PAIR, ("a", "y", "a"): PAIR}, {("a", "x", "a"): [1, 1]}
        ),
        r"every relation, got none for \('a', 'y', 'a'\)",
    ),
    "a weight too few": (
        lambda g: Graph.from_relations({"a": 2}, {("a", "x", "a"): PAIR}, {("a", "x", "a"): [1]}), "2 in all",
    ),
    "a name that two share": (
        lambda g: Graph.from_relations(
            {"a": 2, "b": 2}, {("a", "to", "b"): PAIR, ("b", "to", "a"): PAIR}
        ).types.number("to"),
        "in full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_sentence(what):
    call, words = MISTAKES[what]
    with pytest.raises(InputError, match=words) as told:
        call(typed())
    assert "\n" not in str(told.value)

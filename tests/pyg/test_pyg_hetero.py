"""Typed data in PyG's loader: batches, models made by `to_hetero` and `HeteroConv`, learning per relation."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GCNConv, HANConv, HeteroConv, HGTConv, RGCNConv, SAGEConv, to_hetero
from torch_geometric.sampler import NodeSamplerInput, NumNeighbors
from torch_geometric.utils import trim_to_layer

from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler, CSVLog, callback, inference, scale_messages
from adahop.pyg.root import Root
from adahop.pyg.wrap import propagate_of

CITES, WRITES, ABOUT, REV = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "about", "topic"),
    ("paper", "rev_writes", "author"),
)


def typed_data(seed=0, papers=60, authors=40, topics=7) -> HeteroData:
    """Parallel edges, self-loops, isolated nodes, a type that feeds nothing, an empty relation."""
    g = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["paper"].x = torch.randn(papers, 6, generator=g)
    data["paper"].y = torch.randint(0, 3, (papers,), generator=g)
    data["paper"].train_mask = torch.rand(papers, generator=g) < 0.5
    data["author"].x = torch.randn(authors, 4, generator=g)
    data["topic"].num_nodes = topics
    data["topic"].x = torch.randn(topics, 3, generator=g)

    def edges(n, m, many):
        return torch.stack([torch.randint(0, n, (many,), generator=g), torch.randint(0, m, (many,), generator=g)])

    data[CITES].edge_index = edges(papers, papers - 3, 500)
    data[CITES].edge_attr = torch.randn(500, 2, generator=g)
    data[WRITES].edge_index = edges(authors, papers, 400)
    data[REV].edge_index = data[WRITES].edge_index.flip(0)
    data[ABOUT].edge_index = edges(papers, topics, 80)
    data["topic", "under", "topic"].edge_index = torch.zeros(2, 0, dtype=torch.long)
    return data


class SAGE(nn.Module):
    def __init__(self, layers=2, aggr="mean", hidden=5):
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv((-1, -1), hidden, aggr=aggr) for _ in range(layers))

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).tanh()
        return self.convs[-1](x, edge_index)


class Mixed(nn.Module):
    """A convolution of another kind per relation, each layer with the relations that it needs."""

    def __init__(self):
        super().__init__()
        gat = lambda: GATConv((-1, -1), 5, heads=2, concat=False, add_self_loops=False)  # noqa: E731
        self.one = HeteroConv({CITES: GCNConv(-1, 5), WRITES: gat(), REV: SAGEConv((-1, -1), 5)})
        self.two = HeteroConv({CITES: GCNConv(-1, 5), WRITES: gat()})

    def forward(self, x_dict, edge_index_dict):
        x = self.one(x_dict, edge_index_dict)
        return self.two({k: v.tanh() for k, v in x.items()}, edge_index_dict)


def made(model, data):
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    return model


def loader_of(data, num_neighbors=(3, 3), **words):
    words = {"batch_size": 16, "seed": 1, **words}
    return AdaptiveNeighborLoader(data, num_neighbors, ("paper", data["paper"].train_mask), **words)


def to_hetero_quietly(model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made(to_hetero(model, data.metadata()), data)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disjoint", [False, True])
def test_a_batch_is_as_of_pygs_loader(disjoint):
    data = typed_data()
    loader = loader_of(data, [3, 2], disjoint=disjoint)
    seeds = data["paper"].train_mask.nonzero().flatten()
    seen = []
    for batch in loader:
        own = batch["paper"]
        assert isinstance(batch, HeteroData) and batch.metadata() == data.metadata()
        assert torch.equal(own.n_id[: own.batch_size], own.input_id)  # a mask's ids are those of the nodes
        seen.append(own.input_id)
        assert torch.equal(own.y, data["paper"].y[own.n_id])
        for kind in batch.node_types:
            store = batch[kind]
            assert torch.equal(store.x, data[kind].x[store.n_id]) and store.num_nodes == len(store.n_id)
            assert len(store.num_sampled_nodes) == 3 and sum(store.num_sampled_nodes) == len(store.n_id)
            if not disjoint:
                assert store.n_id.unique().numel() == store.n_id.numel()
        for relation in batch.edge_types:
            store = batch[relation]
            src, dst = store.edge_index
            was = data[relation].edge_index[:, store.e_id]
            assert torch.equal(batch[relation[0]].n_id[src], was[0])
            assert torch.equal(batch[relation[2]].n_id[dst], was[1])
            assert store.scale.shape == store.e_id.shape and bool((store.scale >= 1 - 1e-6).all())
            assert len(store.num_sampled_edges) == 2 and sum(store.num_sampled_edges) == len(store.e_id)
            found = torch.tensor(batch[relation[2]].num_sampled_nodes).cumsum(0)
            first = store.num_sampled_edges[0]  # hop by hop, at the nodes that were found before
            assert bool((dst[:first] < found[0]).all())
            assert bool(((dst[first:] >= found[0]) & (dst[first:] < found[1])).all())
            many = torch.bincount(dst[was[0] != was[1]] if relation[0] == relation[2] else dst)
            assert not disjoint or torch.equal(batch[relation[0]].batch[src], batch[relation[2]].batch[dst])
            assert many.numel() == 0 or int(many.max()) <= 3
        assert torch.equal(batch[CITES].edge_attr, data[CITES].edge_attr[batch[CITES].e_id])
    assert torch.equal(torch.cat(seen), seeds) and len(loader) == len(seen)


def test_one_type_and_one_relation_are_a_homogeneous_graph_to_the_bit():
    typed = typed_data()
    data = Data(x=typed["paper"].x, edge_index=typed[CITES].edge_index, edge_attr=typed[CITES].edge_attr)
    mask = typed["paper"].train_mask
    same = HeteroData()
    same["paper"].x = data.x
    same[CITES].edge_index, same[CITES].edge_attr = data.edge_index, data.edge_attr
    for words in ({}, {"method": "graphsage"}, {"replace": True}, {"disjoint": True}, {"shuffle": True}):
        words = {"batch_size": 10, "seed": 3, "estimator": "plain", **words}
        a = AdaptiveNeighborLoader(data, [3, 2], mask, **words)
        b = AdaptiveNeighborLoader(same, [3, 2], ("paper", mask), **words)
        torch.manual_seed(0)
        one, two = SAGEConv(6, 4), SAGEConv(6, 4)
        two.load_state_dict(one.state_dict())

        class Twice(nn.Module):
            def __init__(self, conv):
                super().__init__()
                self.conv, self.last = conv, SAGEConv(4, 4)
                for p in self.last.parameters():
                    nn.init.constant_(p, 0.1)

            def forward(self, x, edge_index):
                return self.last(self.conv(x, edge_index), edge_index)

        one, two = Twice(one), Twice(two)
        for x, y in zip(a, b, strict=True):
            node, edge = y["paper"], y[CITES]
            for name in ("x", "n_id", "input_id"):
                assert torch.equal(x[name], node[name])
            for name in ("edge_index", "edge_attr", "e_id", "scale"):
                assert torch.equal(x[name], edge[name])
            assert (x.batch_size, x.num_sampled_nodes) == (node.batch_size, node.num_sampled_nodes)
            assert x.num_sampled_edges == edge.num_sampled_edges
            with a.feedback(one, x), b.feedback(two, y):
                assert torch.equal(one(x.x, x.edge_index), two(node.x, edge.edge_index))


def test_one_type_and_one_relation_with_a_snapshot():
    typed = typed_data()
    mask, same = typed["paper"].train_mask, HeteroData()
    data = Data(x=typed["paper"].x, edge_index=typed[CITES].edge_index)
    same["paper"].x, same[CITES].edge_index = data.x, data.edge_index
    torch.manual_seed(0)
    one, two = (SAGE() for _ in range(2))
    a = AdaptiveNeighborLoader(data, [3, 2], mask, batch_size=10, seed=3)
    b = AdaptiveNeighborLoader(same, [3, 2], ("paper", mask), batch_size=10, seed=3)
    with torch.no_grad():
        one(data.x, data.edge_index), two(data.x, data.edge_index)  # lazy layers get their shapes
    two.load_state_dict(one.state_dict())
    for loader, model in ((a, one), (b, two)):
        loader.learn(model)
        with torch.no_grad():
            model.eval()(data.x, data.edge_index)  # overheard: before its first step nothing says how `two` is called
        model.train()
    for _ in range(3):
        for x, y in zip(a, b, strict=True):
            node, edge = y["paper"], y[CITES]
            assert torch.equal(x.n_id, node.n_id)
            assert torch.equal(x.edge_index, edge.edge_index) and torch.equal(x.scale, edge.scale)
            outs = one(x.x, x.edge_index), two(node.x, edge.edge_index)
            assert torch.equal(*outs)
            for out in outs:
                out.square().mean().backward()
        with torch.no_grad():
            for p, q in zip(one.parameters(), two.parameters(), strict=True):
                p.sub_(0.1 * p.grad)
                q.sub_(0.1 * q.grad)
    assert a.memory_cost()["bytes"] == b.memory_cost()["bytes"] > 0
    assert torch.equal(a.sampler.policy.square, b.sampler.policy.square)


def test_numbers_by_relation():
    data = typed_data()
    each = {r: [0, 0] for r in data.edge_types} | {CITES: [2, -1], WRITES: [0, 1]}
    loader = loader_of(data, each)
    assert loader.num_neighbors == each
    batch = next(iter(loader))
    assert batch[WRITES].num_sampled_edges[0] == 0 < batch[WRITES].num_sampled_edges[1]
    assert batch[REV].e_id.numel() == batch[ABOUT].e_id.numel() == 0
    assert batch["topic"].x.shape == (0, 3) and batch["topic"].num_sampled_nodes == [0, 0, 0]
    few = loader_of(data, NumNeighbors({CITES: [2, -1]}, default=[1, 0]))
    assert few.num_neighbors[WRITES] == [1, 0] and few.num_neighbors[CITES] == [2, -1]
    none = loader_of(data, {CITES: [0, 0], **{r: [2, 0] for r in data.edge_types if r != CITES}})
    assert none.num_neighbors[CITES] == [0, 0] and none.num_neighbors[WRITES] == [2, 0]
    assert next(iter(none))[WRITES].num_sampled_edges[1] == 0


def test_trimmed_layers_see_what_whole_ones_see():
    data = typed_data()
    batch = next(iter(loader_of(data)))
    torch.manual_seed(0)
    layers = nn.ModuleList(
        HeteroConv({r: SAGEConv((-1, -1), 5) for r in data.edge_types}, aggr="sum") for _ in range(2)
    )
    scale_messages(layers)

    def out(trim):
        x, e = batch.x_dict, batch.edge_index_dict
        for i, conv in enumerate(layers):
            if trim:
                x, e, _ = trim_to_layer(i, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, e)
            x = conv(x, e)
        return x["paper"][: batch["paper"].batch_size]

    assert torch.allclose(out(False), out(True), atol=1e-6)


# --- models -----------------------------------------------------------------------------------------------------------


def hetero_models(data):
    torch.manual_seed(0)
    return {
        "to_hetero": to_hetero_quietly(SAGE(), data),
        "HeteroConv": made(Mixed(), data),
    }


@pytest.mark.parametrize("name", ["to_hetero", "HeteroConv"])
def test_with_all_neighbours_a_batch_gives_what_the_whole_graph_gives(name):
    data = typed_data()
    model = scale_messages(hetero_models(data)[name])
    whole = model(data.x_dict, data.edge_index_dict)["paper"]
    for batch in loader_of(data, [-1, -1]):
        seeds = batch["paper"]
        got = model(batch.x_dict, batch.edge_index_dict)["paper"][: seeds.batch_size]
        assert torch.allclose(got, whole[seeds.input_id], atol=1e-5)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_a_layer_is_right_on_average(aggr):
    """z-test over 400 draws of 2 neighbours per relation, by odds that were learned: 300 numbers, of which none may be
    5 standard errors off, an error rate below one in a thousand."""
    data = typed_data()
    torch.manual_seed(0)
    model = to_hetero_quietly(SAGE(1, aggr), data)
    whole = model(data.x_dict, data.edge_index_dict)["paper"].detach()
    loader = AdaptiveNeighborLoader(data, [2], "paper", batch_size=60, seed=4, estimator="plain")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sums are as noisy as large
        for _ in range(5):
            batch = loader(range(60))
            with loader.feedback(model, batch):
                model(batch.x_dict, batch.edge_index_dict)
    got = []
    with torch.no_grad():
        for _ in range(400):
            batch = loader(range(60))
            got.append(model(batch.x_dict, batch.edge_index_dict)["paper"][:60].double())
    each = torch.stack(got)
    z = (each.mean(0) - whole) / (each.std(0) / 20).clamp(min=1e-5)
    assert float(each.std(0).mean()) > 0.05 and float(z.abs().max()) < 5.0


def states(loader):
    """The state of each relation's sources, layers first."""
    types = loader.sampler.graph.types
    many = [types.num_nodes[r[0]] for r in types.relations]
    each = loader.sampler.policy.square.detach().clone()
    return dict(zip(types.relations, each.view(len(loader.sampler.sizes), -1).split(many, 1), strict=True))


def steps(loader, model, call=lambda model, batch: model(batch.x_dict, batch.edge_index_dict)):
    loader.learn(model)
    for batch in loader:
        call(model, batch)["paper"][: batch["paper"].batch_size].square().mean().backward()


def test_learning_reaches_the_odds_of_each_relation():
    data = typed_data()
    torch.manual_seed(0)
    loader = loader_of(data, [2, 2], batch_size=8, estimator="plain")
    before = states(loader)
    steps(loader, to_hetero_quietly(SAGE(), data))
    after = states(loader)
    moved = {r: (after[r] != before[r]).any(1).tolist() for r in data.edge_types}
    assert moved[CITES] == moved[WRITES] == [True, True]
    assert moved[REV] == [True, False]  # no seed is an author
    assert moved[ABOUT] == [False, False]  # no topic feeds a paper


def test_relations_left_alone_stay_uniform():
    data = typed_data()
    torch.manual_seed(0)

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(
                HeteroConv({CITES: SAGEConv(-1, 6, aggr="max"), WRITES: SAGEConv((-1, -1), 6)}) for _ in range(1)
            )

        def forward(self, x, edge_index):
            return self.convs[0](x, edge_index)

    loader = loader_of(data, [2], batch_size=8, estimator="plain")
    before = states(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = made(Part(), data)
    with pytest.warns(UserWarning, match="SAGEConv.* stays as PyG has it: aggr='max' has no use for a scale"):
        steps(loader, model)
    after = states(loader)
    assert torch.equal(before[CITES], after[CITES]) and not torch.equal(before[WRITES], after[WRITES])


class Relational(nn.Module):
    def __init__(self, relations, aggr="mean"):
        super().__init__()
        self.one, self.two = (RGCNConv(6, 6, relations, aggr=aggr) for _ in range(2))

    def forward(self, x, edge_index, edge_type):
        return self.two(self.one(x, edge_index, edge_type).tanh(), edge_index, edge_type)


def test_rgcn_over_a_batch_made_homogeneous():
    data = typed_data()
    for kind in data.node_types:
        data[kind].x = torch.randn(data[kind].num_nodes, 6, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = scale_messages(Relational(len(data.edge_types)))
    whole = joint_call(model, data)["paper"]
    for batch in loader_of(data, [-1, -1]):
        seeds = batch["paper"]
        got = joint_call(model, batch)["paper"][: seeds.batch_size]
        assert torch.allclose(got, whole[seeds.input_id], atol=1e-5)
    loader = loader_of(data, [2, 2], batch_size=8, estimator="plain")
    before = states(loader)
    steps(loader, model, joint_call)
    after = states(loader)
    assert all(not torch.equal(before[r], after[r]) for r in (CITES, WRITES, REV))
    assert "left" not in str(model.one.forward.reading)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_rgcn_is_right_on_average(aggr):
    """z-test over 400 draws of 2 neighbours per relation, on relations that share pairs of nodes: 360 numbers, none 5
    standard errors off, an error rate below one in a thousand."""
    data = typed_data()
    for kind in data.node_types:
        data[kind].x = torch.randn(data[kind].num_nodes, 6, generator=torch.Generator().manual_seed(3))
    again = data[CITES].edge_index[:, ::2]
    data["paper", "again", "paper"].edge_index = torch.cat([again, data[CITES].edge_index.flip(0)], 1)
    torch.manual_seed(0)
    model = scale_messages(RGCNConv(6, 6, len(data.edge_types), aggr=aggr))
    with torch.no_grad():
        whole = joint_call(model, data)["paper"]
        each = {"again": [-1], "default": [2]}  # scales that cannot be taken for each other
        loader = AdaptiveNeighborLoader(data, each, "paper", batch_size=60, seed=4, estimator="plain")
        for weight in loader.sampler.policy.square:
            weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) + 0.1)
        each = torch.stack([joint_call(model, loader(range(60)))["paper"][:60].double() for _ in range(400)])
    z = (each.mean(0) - whole) / (each.std(0) / 20).clamp(min=1e-5)
    assert float(each.std(0).mean()) > 0.05 and float(z.abs().max()) < 5.0


# --- what is remembered -----------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One convolution for two relations, which are told apart by their edges."""

    def __init__(self):
        super().__init__()
        self.own, self.conv = nn.ModuleDict({t: nn.LazyLinear(5) for t in ("paper", "author")}), SAGEConv(5, 5)

    def forward(self, x, edge_index):
        x = {t: lin(x[t]) for t, lin in self.own.items()}
        papers = self.conv(x["paper"], edge_index[CITES]) + self.conv((x["author"], x["paper"]), edge_index[WRITES])
        return {"paper": self.conv(papers.tanh(), edge_index[CITES])}


class Embedded(nn.Module):
    """Takes the batch, and has rows of its own for a type."""

    def __init__(self, data):
        super().__init__()
        self.rows = nn.Embedding(data["author"].num_nodes, 4)
        self.convs = to_hetero_quietly(SAGE(), data)

    def forward(self, batch):
        x = {**batch.x_dict, "author": self.rows(batch["author"].n_id)}
        return self.convs(x, batch.edge_index_dict)


def joint_call(model, batch):
    same = batch.to_homogeneous()
    out = model(same.x, same.edge_index, same.edge_type)
    return {kind: out[same.node_type == i] for i, kind in enumerate(batch.node_types)}


def dict_call(model, batch):
    return model(batch.x_dict, batch.edge_index_dict)


class Attended(nn.Module):
    """Layers that take all relations, or some, as dictionaries."""

    def __init__(self, kind, data, relations=None):
        super().__init__()
        self.relations = data.edge_types if relations is None else relations
        self.convs = nn.ModuleList(kind(6, 6, (data.node_types, self.relations), heads=2) for _ in range(2))

    def forward(self, x, edge_index):
        edge_index = {r: edge_index[r] for r in self.relations}
        for conv in self.convs:
            x = {k: v.tanh() for k, v in conv(x, edge_index).items() if v is not None}
        return x


MODELS = {
    "to_hetero": (lambda data: to_hetero_quietly(SAGE(), data), dict_call),
    "to_hetero, sum": (lambda data: to_hetero_quietly(SAGE(aggr="sum"), data), dict_call),
    "HeteroConv": (lambda data: made(Mixed(), data), dict_call),
    "shared": (lambda data: made(Shared(), data), dict_call),
    "RGCNConv": (lambda data: Relational(len(data.edge_types)), joint_call),
    "HGTConv": (lambda data: Attended(HGTConv, data), dict_call),
    # with several relations into a type it weighs them by a mean over the nodes at hand
    "HANConv": (lambda data: Attended(HANConv, data, [WRITES, REV]), dict_call),
    "embeddings": (lambda data: Embedded(data), lambda model, batch: model(batch)),
}


def model_of(name):
    data = typed_data()
    if name in ("RGCNConv", "HGTConv", "HANConv"):
        for kind in data.node_types:
            data[kind].x = torch.randn(data[kind].num_nodes, 6, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    make, call = MODELS[name]
    return data, make(data), call


def whole_output(model, data, call):
    for kind in data.node_types:
        data[kind].n_id = torch.arange(data[kind].num_nodes)
    training = model.training
    with torch.no_grad():
        out = call(model.eval(), data)["paper"]
    model.train(training)
    return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_snapshot_leaves_to_chance_what_changed_since(name):
    found = {}
    for estimator, moved in (("plain", 1.01), ("snapshot", 1.01), ("snapshot", 1.0)):
        data, model, call = model_of(name)
        loader = loader_of(data, [2, 2], batch_size=8, estimator=estimator)
        loader.learn(scale_messages(model, sums="whole"))
        if estimator == "snapshot":
            whole_output(model, data, call)  # overheard
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(moved)
        other = MODELS[name][0](data)
        other.load_state_dict(model.state_dict())
        want = whole_output(other, data, call)
        far = []
        for batch in loader:
            own = batch["paper"]
            got = call(model, batch)["paper"][: own.batch_size]
            far.append(float((got - want[own.input_id]).norm() / want[own.input_id].norm()))
        found[estimator, moved] = max(far)
    assert found["snapshot", 1.0] < 1e-5
    assert found["snapshot", 1.01] < 0.1 * found["plain", 1.01]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("shared",)])
def test_the_loader_makes_the_pass_itself(name):
    data, model, call = model_of(name)
    loader = loader_of(data, [2, 2], batch_size=8)
    assert loader.estimator == "snapshot"
    for _ in range(2):
        steps(loader, model, call)
    memory = loader._memory
    assert memory.pass_seconds > 0 and not memory.warned and loader.memory_cost()["bytes"] > 0
    assert all(memory.forwards.get(layer) for layer in memory.layers.values())


def test_with_a_snapshot_a_layer_is_right_on_average():
    """z-test as above, over 400 draws: 300 numbers, none 5 standard errors off."""
    data = typed_data()
    torch.manual_seed(0)
    model, other = (to_hetero_quietly(SAGE(1), data) for _ in range(2))
    loader = AdaptiveNeighborLoader(data, [2], "paper", batch_size=60, seed=4)
    loader.learn(model)
    whole_output(model, data, dict_call)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    other.load_state_dict(model.state_dict())
    got = []
    with torch.no_grad():
        for _ in range(400):
            batch = loader(range(60))
            x = {t: v.tanh() for t, v in batch.x_dict.items()}  # rows that no pass has seen
            got.append(model(x, batch.edge_index_dict)["paper"][:60].double())
    want = whole_output(other, data, lambda m, d: m({t: v.tanh() for t, v in d.x_dict.items()}, d.edge_index_dict))
    each = torch.stack(got)
    z = (each.mean(0) - want) / (each.std(0) / 20).clamp(min=1e-5)
    assert float(each.std(0).mean()) > 0.05 and float(z.abs().max()) < 5.0


@pytest.mark.filterwarnings("ignore")
def test_a_snapshot_is_part_of_the_state():
    data, model, call = model_of("HeteroConv")
    loader, again = (loader_of(data, [2, 2], batch_size=8) for _ in range(2))
    steps(loader, model, call)
    state = loader.state_dict()
    again.load_state_dict(state)
    twin = MODELS["HeteroConv"][0](data)
    twin.load_state_dict(model.state_dict())
    again.learn(twin)
    for a, b in zip(loader, again, strict=True):
        assert torch.equal(call(model, a)["paper"], call(twin, b)["paper"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_inference_is_exact(name):
    data, model, call = model_of(name)
    want = whole_output(model, data, call)
    for kind in data.node_types:
        del data[kind].n_id
    Root.of(model)
    if name == "embeddings":  # the first batch shows that the model takes it as it is
        model(next(iter(loader_of(data))))
    for size in (7, 4096):
        out = inference(model, data, batch_size=size)
        got = out["paper"] if isinstance(out, dict) else out[: len(want)]
        assert torch.allclose(got, want, atol=1e-5)


def test_inference_says_what_is_missing():
    data, model, _ = model_of("to_hetero")
    del data["topic"].x
    with pytest.raises(InputError, match="`data` must have an `x` of one width in every type"):
        inference(Relational(5), data)
    data["author"].x = data["author"].x[:-1]
    data["author"].num_nodes = 40
    with pytest.raises(InputError, match=r"`data.'author'..x` must have a row per node of its type, 40 in all, got 39"):
        inference(model, data)


@pytest.mark.parametrize("kind", [HGTConv, HANConv])
def test_layers_of_dictionaries_are_scaled_and_listened_to(kind):
    data, _, _ = model_of("HGTConv")
    torch.manual_seed(0)
    model = Attended(kind, data)
    loader = loader_of(data, [2, 2], batch_size=8, estimator="plain")
    before = states(loader)
    steps(loader, model)
    after = states(loader)
    assert {str(propagate_of(conv).reading) for conv in model.convs} == {"softmax"}
    assert all(not torch.equal(before[r], after[r]) for r in (CITES, WRITES, REV))
    if kind is HANConv:  # its weights of relations depend on the nodes at hand, its sums do not
        return
    want = whole_output(model, data, dict_call)
    for batch in loader_of(data, [-1, -1]):
        own = batch["paper"]
        assert torch.allclose(dict_call(model, batch)["paper"][: own.batch_size], want[own.input_id], atol=1e-5)


def test_trimmed_dictionaries():
    """With a snapshot and all neighbours, layers that see the nodes that they need alone."""
    data, model, _ = model_of("HGTConv")
    loader = loader_of(data, [-1, -1], batch_size=8)
    loader.learn(model)
    whole_output(model, data, dict_call)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    twin = MODELS["HGTConv"][0](data)
    twin.load_state_dict(model.state_dict())
    want = whole_output(twin, data, dict_call)
    for batch in loader:
        x, edges, own = batch.x_dict, batch.edge_index_dict, batch["paper"]
        for i, conv in enumerate(model.convs):
            x, edges, _ = trim_to_layer(i, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
            x = {k: v.tanh() for k, v in conv(x, edges).items()}
        assert torch.allclose(x["paper"][: own.batch_size], want[own.input_id], atol=1e-5)
    assert not any(propagate_of(conv).uses_other_edges for conv in model.convs)


# --- besides ----------------------------------------------------------------------------------------------------------


def test_under_pygs_own_node_loader():
    from torch_geometric.loader import NodeLoader

    data = typed_data()
    sampler = AdaptiveSampler(data, [3, 2], seed=1)
    theirs = NodeLoader(data, sampler, ("paper", data["paper"].train_mask), transform=sampler.attach, batch_size=16)
    model = to_hetero_quietly(SAGE(), data)
    sampler.learn(model)
    ours = loader_of(data, [3, 2])
    other = to_hetero_quietly(SAGE(), data)
    other.load_state_dict(model.state_dict())
    ours.learn(other)
    for a, b in zip(theirs, ours, strict=True):
        for relation in data.edge_types:
            for name in ("edge_index", "e_id", "scale"):
                assert torch.equal(a[relation][name], b[relation][name])
        assert a["paper"].batch_size == b["paper"].batch_size
        outs = [dict_call(net, batch)["paper"] for net, batch in ((model, a), (other, b))]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()
    assert sampler.memory_cost()["bytes"] == ours.memory_cost()["bytes"] > 0


def test_a_state_taken_within_an_epoch_goes_on():
    data = typed_data()
    whole = [b[CITES].e_id for b in loader_of(data, batch_size=5, prefetch=2)]
    first = loader_of(data, batch_size=5, prefetch=2)
    for i, _ in enumerate(first):
        if i == 2:
            state = first.state_dict()
            break
    rest = loader_of(data, batch_size=5, prefetch=2)
    rest.load_state_dict(state)
    got = [b[CITES].e_id for b in rest]
    assert len(got) == len(whole) - 3 and all(map(torch.equal, got, whole[3:]))


@pytest.mark.parametrize(("words", "message"), [
    ({"input_nodes": "papers"}, "`input_nodes's node type` must be one of .*did you mean 'paper'"),
    ({"input_nodes": None}, r"`input_nodes` must be a node type, or \(node type, ids or a mask\)"),
    ({"input_nodes": ("paper", [60])}, r"got input_nodes\[0\] = 60"),
    ({"num_neighbors": {CITES: [2]}}, r"must have a list for every edge type.*got none for \('author'"),
    ({"num_neighbors": {CITES: [2], WRITES: [2, 2], "default": [1]}}, r"lists of one length, got \[1, 2\]"),
    ({"num_neighbors": {"default": [2], "citations": [1]}}, "must be one of .*got 'citations'"),
    ({"num_neighbors": {"default": []}}, "must be a list with one number per hop"),
    ({"num_neighbors": {("paper", "cite", "paper"): [2]}}, "did you mean .*cites"),
    ({"num_neighbors": NumNeighbors({CITES: [2]}, default=[1, 1])}, r"lists of one length, got \[1, 2\]"),
    ({"num_neighbors": {CITES: [-2]}}, "must hold whole numbers of at least -1"),
    ({"estimator": "history"}, "`estimator` must be plain or snapshot where the data is a HeteroData"),
    ({"subgraph_type": "induced"}, "`subgraph_type` must be directional where the data is a HeteroData"),
    ({"weight_attr": "w"}, r"`weight_attr` must name an attribute of every relation"),
    ({"data": HeteroData()}, "must have at least one relation"),
])  # fmt: skip
def test_refusals(words, message):
    with pytest.raises(InputError, match=message):
        AdaptiveNeighborLoader(**{"data": typed_data(), "num_neighbors": [2, 2], "input_nodes": "paper", **words})
    if not words.keys() & {"input_nodes"}:
        with pytest.raises(InputError, match=message):
            AdaptiveSampler(**{"data": typed_data(), "num_neighbors": [2, 2], **words})


def broken(how):
    data = typed_data()
    how(data)
    return data


@pytest.mark.parametrize(("how", "message"), [
    (lambda d: d["author"].update({"x": d["author"].x[:-1], "num_nodes": 40}),
     r"`data\['author'\].x` must have a row per node of its type, 40 in all, got 39"),
    (lambda d: d[WRITES].update({"edge_index": torch.tensor([[40], [0]])}),
     r"`edge_index\[\('author', 'writes', 'paper'\)\]\[0\]` must .*40"),
    (lambda d: d[WRITES].update({"edge_index": torch.tensor([[0], [60]])}), r"\[1\]` must .*60"),
    (lambda d: d[WRITES].update({"edge_index": torch.rand(2, 3)}), "must hold whole numbers, got dtype torch.float32"),
    (lambda d: d[WRITES].update({"edge_index": torch.zeros(3, 2).long()}), r"must have shape \[2, E\], got \(3, 2\)"),
    (lambda d: d["venue", "of", "paper"].update({"edge_index": torch.zeros(2, 1).long()}),
     r"`data\['venue'\]` must have features or `num_nodes`, got neither"),
    (lambda d: d[CITES].update({"edge_weight": torch.ones(3)}), r"weight.*500"),
])  # fmt: skip
def test_data_that_does_not_fit_is_refused_before_anything_is_drawn(how, message):
    for kind, words in ((AdaptiveNeighborLoader, {"input_nodes": "paper"}), (AdaptiveSampler, {})):
        with pytest.raises(InputError, match=message):
            kind(broken(how), [2, 2], **words)


def test_weights_are_checked_by_relation():
    data = typed_data()
    for store in data.edge_stores:
        store.w = torch.ones(store.num_edges)
    want = next(iter(loader_of(data, weight_attr="w")))[WRITES].e_id
    data[WRITES].w = torch.ones(400, 1)
    assert torch.equal(next(iter(loader_of(data, weight_attr="w")))[WRITES].e_id, want)
    data[CITES].w, data[WRITES].w = torch.ones(499), torch.ones(401)  # as many in all
    with pytest.raises(InputError, match=r"`weight\[\('paper', 'cites', 'paper'\)\]` must have one number per edge"):
        loader_of(data, weight_attr="w")


def test_seeds_of_a_sampler_are_checked():
    sampler = AdaptiveSampler(typed_data(), [2, 2])
    for kind, ids, message in (
        ("paper", [60], r"`inputs\['paper'\]` must .*60"),
        ("papers", [0], "must be one of .*did you mean 'paper'"),
        (None, [0], "must have a node type, as the data is a HeteroData, got none"),
    ):
        with pytest.raises(InputError, match=message):
            sampler.sample_from_nodes(NodeSamplerInput(torch.arange(len(ids)), torch.tensor(ids), input_type=kind))
    assert int(sampler.sampler.step) == 0


@pytest.mark.filterwarnings("ignore")
def test_lightning_node_data_with_a_snapshot(tmp_path):
    L = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from torch_geometric.data.lightning import LightningNodeData

    data, net, call = model_of("to_hetero")

    class Node(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, edge_index):
            return self.net(x, edge_index)

        def training_step(self, batch, batch_idx):
            own = batch["paper"]
            return call(self, batch)["paper"][: own.batch_size].square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    sampler = AdaptiveSampler(data, [3, 2], seed=1)
    nodes = LightningNodeData(data, input_train_nodes=("paper", data["paper"].train_mask), loader="custom",
                              node_sampler=sampler, transform=sampler.attach, batch_size=8, num_workers=0)  # fmt: skip
    log, kept = CSVLog(tmp_path / "log.csv"), []

    class Look(L.Callback):
        def on_train_batch_end(self, *args):
            kept.append(sampler.memory_cost()["bytes"])

    trainer = L.Trainer(
        max_epochs=2, callbacks=[Look(), callback(sampler, log, every=2)], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Node(), datamodule=nodes)
    assert int(sampler.sampler.step) == len(kept) and kept[-1] > 0
    assert float(sampler.sampler.policy.square.std()) > 0.001  # it learned
    assert "edges" in (tmp_path / "log.csv").read_text()

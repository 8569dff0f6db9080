"""Features of edges in every model: against sums written out, unbiased from a sample, and through every door."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import adahop
from adahop import Graph, InputError, models
from adahop.checkpoint import Checkpoints
from adahop.convert import convert
from adahop.diagnostics import variance
from adahop.messages import alignment, energy
from adahop.watcher import watch

from conftest import messy_edges, toy_data  # isort: skip
from typed_graphs import COUNTS, RELATIONS, batch_of, dense, encoded, own, plain_outputs, typed_data  # isort: skip

PLAIN = [name for name, m in models.MODELS.items() if not m.typed]
TYPED = [name for name, m in models.MODELS.items() if m.typed]
WIDTHS = (2, 0, 3, 1, 0, 2, 0, 1)  # of the features of each relation


def described(seed: int = 0) -> SimpleNamespace:
    """A graph with self-loops, parallel edges and isolated nodes, whose edges have three features."""
    edge_index, weight = messy_edges(seed=seed)
    g = torch.Generator().manual_seed(seed)
    attr, x = torch.randn(edge_index.shape[1], 3, generator=g), torch.randn(60, 5, generator=g)
    graph = Graph.from_edge_index(edge_index, weight, 60, attr)
    return SimpleNamespace(graph=graph, x=x, y=torch.zeros(60, dtype=torch.long), edge_index=edge_index, attr=attr)


def typed(seed: int = 0) -> SimpleNamespace:
    data = typed_data(seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    data.attr = {r: torch.randn(data.edges[r].shape[1], w, generator=g) for r, w in zip(RELATIONS, WIDTHS, strict=True)}
    told = {r: t for r, t in data.attr.items() if t.shape[1]}
    data.graph = Graph.from_relations(COUNTS, data.edges, edge_attr=told)
    return data


def build(name: str, data: SimpleNamespace, **options) -> models.GNN:
    torch.manual_seed(0)
    if models.MODELS[name].typed:
        return models.make(name, data.x.schema, 8, 3, edges=WIDTHS, **options)
    return models.make(name, data.x.shape[1], 8, 3, edges=3, **options)


def data_for(name: str, seed: int = 0) -> SimpleNamespace:
    return typed(seed) if models.MODELS[name].typed else described(seed)


# --- against sums written out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_sums_against_dense_matrices(name):
    data = described()
    model = build(name, data, layers=1, arch="plain")
    graph = data.graph.normalized(*model.graph)
    a, e = torch.zeros(60, 60), torch.zeros(60, 3)
    for place, (src, dst) in enumerate(zip(graph.indices.tolist(), graph.dst().tolist(), strict=True)):
        edge = place if graph.eid is None else int(graph.eid[place])
        a[dst, src] += graph.weight[place]
        e[dst] += graph.weight[place] * (data.attr[edge] if edge < len(data.attr) else 0)  # added loops have none
    conv = model.convs[0]
    want = a @ data.x @ conv.kernel().t() + e @ conv.edge.weight.t() + conv.rest(data.x)
    for chunk in (0, 40):
        assert torch.allclose(model.inference(graph, data.x, edges=chunk), want, atol=1e-5)


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_scores_against_a_loop_over_edges(name):
    data = described()
    model = build(name, data, layers=1, arch="plain", heads=2)
    conv, h = model.convs[0], data.x
    graph = data.graph.normalized(*model.graph)
    said = torch.einsum("hoi,ni->nho", conv.kernel(), h)
    want = torch.zeros(60, 2, 3)
    for i in range(60):
        span = slice(int(graph.indptr[i]), int(graph.indptr[i + 1]))
        src, edge = graph.indices[span].long(), graph.eid[span].long()
        e = torch.stack([data.attr[k] if k < len(data.attr) else torch.zeros(3) for k in edge.tolist()])
        added = conv.target(h[i : i + 1]) + conv.source(adahop.features.Values(h[src]))[0] + e @ conv.edge.weight.t()
        bent = torch.nn.functional.leaky_relu(added, 0.2)
        score = bent if name == "gat" else (bent.view(-1, 2, 3) * conv.score).sum(-1)
        want[i] = (score.softmax(0).unsqueeze(-1) * said[src]).sum(0)
    assert torch.allclose(model.inference(graph, h), want.mean(1) + conv.bias, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"bases": 2}, {"conv": "sage"}], ids=str)
def test_rgcn_against_dense_matrices(options):
    data = typed()
    model = build("rgcn", data, layers=1, arch="plain", **options)
    h, conv, starts = encoded(model, data), model.convs[0], data.x.schema.starts
    kind = data.x.schema.kind_of(torch.arange(len(h)))
    want = own(conv.own, h)
    for r, (a, each, (_, _, t)) in enumerate(zip(dense(data), conv.convs, RELATIONS, strict=True)):
        here = (kind == list(COUNTS).index(t)).float().unsqueeze(1)
        want = want + here * (a @ h @ each.kernel().t() + each.rest(h))
        if WIDTHS[r]:
            dst = data.edges[RELATIONS[r]][1] + starts[t]
            many = torch.bincount(dst, minlength=len(h)).clamp(min=1).unsqueeze(1)
            mean = torch.zeros(len(h), WIDTHS[r]).index_add_(0, dst, data.attr[RELATIONS[r]]) / many
            want = want + mean @ each.edge.weight.t()
    graph = data.graph.normalized(*model.graph)
    assert torch.allclose(model.inference(graph, data.x), want, atol=1e-5)


def test_hgt_reads_them_in_its_scores():
    """The same as a graph without features, with their part added to the scores by hand."""
    data = typed()
    model = build("hgt", data, layers=1, heads=2)
    conv = model.convs[0]
    graph = data.graph.normalized(*model.graph)
    block = graph.in_edges(range(graph.num_nodes))
    h = encoded(model, data)
    given = conv.sources(h, block.n_id), conv.queries(h, block), conv.by_row(block)
    with_them, maps = conv.scores(*given), conv.of_edges
    conv.of_edges = torch.nn.ModuleDict()
    plain = conv.scores(*given)
    conv.of_edges = maps
    relation = block.relation.repeat_interleave(block.row_ptr.diff())
    for edge in range(0, block.num_edges, 7):
        r = int(relation[edge])
        local = int(block.e_id[edge]) - graph.types.starts[r]
        wanted = maps[str(r)](data.attr[RELATIONS[r]][local]) if WIDTHS[r] else torch.zeros(2)
        assert torch.allclose(with_them[edge] - plain[edge], wanted, atol=1e-5)
    assert set(maps) == {str(r) for r, w in enumerate(WIDTHS) if w}


@pytest.mark.parametrize("estimator", ["plain", "history", "snapshot", "exact+history", "exact+snapshot"])
@pytest.mark.parametrize("name", PLAIN + TYPED)
def test_with_every_neighbour_a_batch_is_the_whole_graph(name, estimator):
    data = data_for(name)
    model = build(name, data)
    graph = data.graph.normalized(*model.graph)
    sampler = adahop.make("graphsage", graph, [-1, -1])
    sampler.skip = model.remember(estimator, graph, data.x)
    blocks = sampler.sample(torch.tensor([3, 50, 17, 59, 39, 2]))
    found = model(batch_of(data, blocks))
    assert (found - model.inference(graph, data.x)[blocks[-1].targets]).abs().max() < 1e-5
    without = model.inference(
        graph.replace(attr=graph.attr._replace(tables=tuple(0 * t for t in graph.attr.tables))), data.x
    )
    assert (without[blocks[-1].targets] - found).abs().max() > 1e-3, "the features have a part in it"


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_scores_alone_remembered(name):
    data = data_for(name)
    model = build(name, data)
    graph = data.graph.normalized(*model.graph)
    sampler = adahop.make("graphsage", graph, [-1, -1])
    model.remember("scores", graph, data.x)
    blocks = sampler.sample(torch.arange(60))
    assert (model(batch_of(data, blocks)) - model.inference(graph, data.x)).abs().max() < 1e-5


# --- right on average ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        *(
            (name, estimator)
            for name in ("gcn", "sage", "rgcn")
            for estimator in ("plain", "exact+history", "exact+snapshot")
        ),
        *(("rgcn", estimator) for estimator in ("history", "snapshot")),
    ],
)
def test_sums_are_unbiased(name, estimator):
    """One linear layer drawn: the mean of 400 estimates against the exact outputs, what is remembered being old.

    55 targets x 3 outputs in 11 cases = 1,815 z-scores; |z| > 5.3 has a family-wise error rate of 2e-4.
    """
    data = data_for(name, seed=2)
    layers = 2 if estimator.startswith("exact") else 1
    model = build(name, data, arch="plain", layers=layers)
    graph = data.graph.normalized(*model.graph)
    sampler = adahop.make("adahop", graph, [2] * layers, seed=3)
    sampler.skip = model.remember(estimator, graph, data.x)
    seeds = torch.arange(55)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
        want = plain_outputs(model, graph, data)[seeds]
        model.eval()
        got = torch.stack([model(batch_of(data, sampler.sample(seeds))) for _ in range(400)])
    error = got.std(0) / 400**0.5
    z = (got.mean(0) - want) / error.clamp(min=1e-6)
    assert z.abs().max() < 5.3 and float(error.max()) > 1e-5


@pytest.mark.parametrize("name", ["gcn", "rgcn"])
def test_energies_have_them(name):
    data = data_for(name)
    model = build(name, data, layers=1, arch="plain")
    graph = data.graph.normalized(*model.graph)
    (block,) = adahop.make("bs", graph, [3]).sample(torch.arange(55))
    with watch(model, energy) as found, watch(model, alignment) as near:
        model(batch_of(data, [block]))
    h = data.x if name == "gcn" else encoded(model, data)
    for edge in range(0, block.num_edges, 11):
        conv, attr = model.convs[0], data.attr if name == "gcn" else None
        at = int(block.e_id[edge])
        if name == "rgcn":
            r = int(block.relation.repeat_interleave(block.row_ptr.diff())[edge])
            conv, attr, at = conv.convs[r], data.attr[RELATIONS[r]], at - graph.types.starts[r]
        said = conv.kernel() @ h[block.n_id[block.src[edge]]]
        if conv.edge is not None and at < len(attr):
            said = said + conv.edge(attr[at])
        m = (block.weight[edge] * block.scale[edge] * said).detach()
        assert float(m.square().sum()) == pytest.approx(float(found[0][edge]), rel=1e-4, abs=1e-6)
    assert near[0].shape == found[0].shape and bool(near[0].isfinite().all())


# --- training --------------------------------------------------------------------------------------------------------


def learnable() -> SimpleNamespace:
    """Labels that features of edges alone tell."""
    data = toy_data(nodes=200)
    g = torch.Generator().manual_seed(3)
    dst = data.graph.edge_index()[1]
    attr = torch.nn.functional.one_hot(data.y[dst], 3).float() + 2 * torch.randn(len(dst), 3, generator=g)
    data.graph = Graph.from_edge_index(data.graph.edge_index(), None, 200, attr)
    data.x = torch.randn(200, 4, generator=g)
    return data


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_run_reads_them_unless_told_not_to(name):
    data = learnable()
    options = dict(model=name, epochs=9, sizes=(2, 2), hidden=8, batch_size=32, seed=1)
    result = adahop.fit(data, **options)
    plain = adahop.fit(data, model_options={"edges": 0}, **options)
    assert result.model.convs[0].edge.in_features == 3 and plain.model.convs[0].edge is None
    assert result.history[-1]["loss"] != plain.history[-1]["loss"]
    if name != "gat":
        assert result.test > plain.test + 0.2
    rows = variance(result.model, result.sampler, data, nodes=range(32), repeats=3)
    assert all(row["variance"] >= 0 for row in rows)


@pytest.mark.parametrize("name", TYPED)
def test_typed_runs_read_them(name):
    result = adahop.fit(typed(), model=name, epochs=2, sizes=(2, 2), hidden=8)
    assert result.steps == 2 and result.history[-1]["loss"] > 0


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    options = dict(model="gcn", method="bs", epochs=3, sizes=(2, 2), hidden=8, batch_size=32, prefetch=2)
    whole = adahop.fit(learnable(), **options)

    def stop(step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adahop.fit(learnable(), on_step=stop, checkpoint=Checkpoints(tmp_path, every="1"), **options)
    rest = adahop.fit(learnable(), checkpoint=tmp_path, **options)
    assert [r["loss"] for r in rest.history] == [r["loss"] for r in whole.history]


def test_the_normaliser_of_all_neighbours_has_no_error():
    data = described()
    model = build("gat", data)
    graph = data.graph.normalized(*model.graph)
    normaliser_error = pytest.importorskip("adahop_lab.normaliser").normaliser_error
    assert max(normaliser_error(model, adahop.make("graphsage", graph, [-1, -1]), data.x, range(40), 1)) < 1e-5


# --- doors -----------------------------------------------------------------------------------------------------------


def test_data_and_back():
    data = described()
    back = data.graph.to_data()
    assert torch.equal(back.edge_attr, data.attr) and torch.equal(back.edge_index, data.edge_index)
    again = Graph.from_data(back)
    assert again.hash() == data.graph.hash() != data.graph.without_edge_features().hash()
    one = Data(edge_index=data.edge_index, num_nodes=60, edge_attr=data.attr[:, 0])
    assert Graph.from_data(one).attr.widths == (1,) and Graph.from_data(one, edge_attr=False).attr is None
    hetero = typed().graph.to_data()
    assert "edge_attr" not in hetero[RELATIONS[1]] and Graph.from_data(hetero).attr.widths == WIDTHS


def test_blocks_have_the_rows_of_their_edges():
    data = typed()
    (block,) = adahop.make("ladies", data.graph, [9]).sample(range(75))
    each = block.relation.repeat_interleave(block.row_ptr.diff())
    for r, part in enumerate(models.typed.sliced(block, data.x.schema)):
        mine = block.e_id[each == r] - data.graph.types.starts[r]
        assert torch.equal(block.attr[r], data.attr[RELATIONS[r]][mine]) and torch.equal(
            part.block.attr[0], block.attr[r]
        )
    graph = described().graph
    (block, _) = adahop.make("cluster-gcn", graph, [1, 1], parts=2).sample(range(20))
    assert torch.equal(block.attr[0], graph.attr.tables[0][block.e_id])


def split(n: int) -> dict[str, np.ndarray]:
    parts = np.split(np.arange(n), [n // 2, 3 * n // 4])
    return {f"{name}_idx": ids for name, ids in zip(("train", "val", "test"), parts, strict=True)}


def test_files(tmp_path):
    data = described()
    g = data.graph
    attr = data.attr[g.eid.long()]
    np.savez(tmp_path / "g.npz", indptr=g.indptr, indices=g.indices, x=data.x, y=data.y, edge_attr=attr, **split(60))
    loaded = adahop.load(tmp_path / "g.npz")
    assert torch.equal(loaded.graph.attr.tables[0], attr) and torch.equal(loaded.edge_attr, attr)
    convert(tmp_path / "g.npz", tmp_path / "folder", mmap=True)
    mapped = adahop.load(tmp_path / "folder")
    one, other = (d.graph.normalized("row", True) for d in (loaded, mapped))
    assert torch.equal(one.attr_sums, other.attr_sums)
    with pytest.raises(InputError, match="must have no `edge_attr` to be cut"):
        adahop.distributed.shard.write(mapped, tmp_path / "parts", 2, "range")
    kept = Data(x=data.x, y=data.y, edge_index=data.edge_index, edge_attr=data.attr)
    for part, ids in split(60).items():
        kept[part.replace("idx", "mask")] = torch.zeros(60, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
    torch.save(kept, tmp_path / "d.pt")
    convert(tmp_path / "d.pt", tmp_path / "d.npz")
    for path in ("d.pt", "d.npz"):
        found = adahop.load(tmp_path / path).graph
        order = found.edge_index().unbind()
        assert sorted(zip(*(t.tolist() for t in order), found.attr.tables[0][:, 0].tolist(), strict=True)) == sorted(
            zip(*data.edge_index.tolist(), data.attr[:, 0].tolist(), strict=True)
        )


def test_tables(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst,attr_a,weight,attr_b\n0,1,.5,2,1\n1,2,.25,1,3\n")
    (tmp_path / "x.csv").write_text("1,2\n3,4\n5,6\n")
    (tmp_path / "y.csv").write_text("0\n1\n0\n")
    convert([tmp_path / f for f in ("e.csv", "x.csv", "y.csv")], tmp_path / "g.npz", undirected=True)
    graph = adahop.load(tmp_path / "g.npz").graph
    found = dict(zip(map(tuple, graph.edge_index().t().tolist()), graph.attr.tables[0].tolist(), strict=True))
    assert found == {(0, 1): [0.5, 1], (1, 0): [0.5, 1], (1, 2): [0.25, 3], (2, 1): [0.25, 3]}
    source = {"edge__a__to__b": tmp_path / "e.csv", "x__a": tmp_path / "x.csv", "n__b": 3, "y__a": tmp_path / "y.csv"}
    convert(source, tmp_path / "t.npz", split="random:40,30,30", undirected=True)
    loaded = adahop.load(tmp_path / "t.npz").graph
    assert loaded.attr.widths == (2, 2) and torch.equal(loaded.attr.tables[0], loaded.attr.tables[1])
    data = loaded.to_data()
    data["a"].x, data["a"].y = torch.eye(3), torch.tensor([0, 1, 0])
    torch.save(data, tmp_path / "h.pt")
    convert(tmp_path / "h.pt", tmp_path / "h.npz")
    assert adahop.load(tmp_path / "h.npz").graph.attr.widths == (2, 2)


PAIR = [[0, 1], [1, 0]]
MISTAKES = {
    "too few": (lambda: Graph.from_edge_index(PAIR, edge_attr=[[1.0]]), "a row per edge, 2 in all, got shape"),
    "not finite": (lambda: Graph.from_edge_index(PAIR, edge_attr=[1.0, np.nan]), r"finite, got edge_attr\[1\]"),
    "an unknown relation": (
        lambda: Graph.from_relations({"a": 2}, {("a", "to", "a"): PAIR}, edge_attr={("a", "two", "a"): [1, 2]}),
        "did you mean",
    ),
    "no dict": (
        lambda: Graph.from_relations({"a": 2}, {("a", "to", "a"): PAIR}, edge_attr=[1, 2]), "dict from relations",
    ),
    "a graph without": (
        lambda: build("gcn", described()).inference(
            described().graph.without_edge_features().normalized(), described().x
        ),
        "`graph` must have 3 features per edge, as the model was made for, got none",
    ),
    "another width": (
        lambda: adahop.fit(learnable(), model_options={"edges": 2}, epochs=1, sizes=(2, 2)),
        "2 features per edge.*got 3",
    ),
    "a number per relation": (
        lambda: models.make("rgcn", typed().x.schema, 8, 3, edges=[1, 2]), "a number per relation, 8 in all, got 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_sentence(what):
    call, words = MISTAKES[what]
    with pytest.raises(InputError, match=words) as told:
        call()
    assert "\n" not in str(told.value)


def test_a_pyg_loader_leaves_them_to_the_batch():
    from adahop.pyg import AdaptiveNeighborLoader

    data = described()
    odd = Data(x=data.x, edge_index=data.edge_index, edge_attr=torch.zeros(data.edge_index.shape[1], 2, 2))
    batch = next(iter(AdaptiveNeighborLoader(odd, num_neighbors=[2, 2], batch_size=8)))
    assert batch.edge_attr.shape[1:] == (2, 2)

"""Models: exact inference equals the forward pass over full blocks, for every model, arch, depth and heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch_geometric.nn as pyg

from adahop import models
from adahop.checks import InputError
from adahop.graph import Graph
from adahop.ops import ranges
from adahop.samplers import NeighborSampler
from conftest import messy_graph

KINDS = [
    ("gcn", {}), ("gcn", {"norm": "sym"}), ("sage", {}), ("gat", {}), ("gat", {"heads": 4, "score": "relu"}),
    ("gat", {"heads": 2, "attention": "paper"}), ("gat", {"attention": "softmax"}), ("geniepath", {}),
    ("geniepath", {"attention": "paper"}), ("gatv2", {}), ("gatv2", {"heads": 2}),
]  # fmt: skip
WIDTH, HIDDEN, OUT = 7, 8, 3

EACH = [(name, options, arch) for name, options in KINDS for arch in models.MODELS[name].arches]
UNTYPED = [name for name, m in models.MODELS.items() if not m.typed]


def build(name, options, **more):
    torch.manual_seed(0)
    return models.make(name, WIDTH, HIDDEN, OUT, **options, **more)


def features(n: int = 60) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1))


def full_batch(graph: Graph, x, seeds, layers: int):
    blocks = NeighborSampler(graph, [-1] * layers).sample(seeds)
    return SimpleNamespace(x=x[blocks[0].n_id], blocks=blocks)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("name", "options", "arch"), EACH)
def test_inference_equals_forward_on_full_blocks(name, options, arch, layers):
    model = build(name, options, arch=arch, layers=layers, dropout=0.5).eval()
    g, x = messy_graph().normalized(*model.graph), features()
    whole = model.inference(g, x)
    assert whole.shape == (60, OUT) and torch.isfinite(whole).all()
    seeds = torch.tensor([59, 3, 0, 7, 2, 31])  # an isolated node, a hub, one with two self-loops
    assert torch.allclose(model(full_batch(g, x, seeds, layers)), whole[seeds], atol=1e-5)
    for edges in (1, 37, 400):  # bounded pieces, the same result
        assert torch.allclose(model.inference(g, x, edges=edges), whole, atol=1e-5)
    assert float(whole.std(0).min()) > 1e-4, "the outputs do not depend on the node"


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_dropout_is_off_in_evaluation_and_the_mode_is_kept(name, options):
    model = build(name, options, dropout=0.5)
    g, x = messy_graph().normalized(*model.graph), features()
    assert model.training
    one, two = model.inference(g, x), model.inference(g, x)
    assert torch.equal(one, two) and model.training
    batch = full_batch(g, x, torch.arange(60), 2)
    assert not torch.allclose(model(batch), model(batch)), "dropout had no effect in training"
    model.eval()
    assert torch.allclose(model(batch), one, atol=1e-5)
    model.inference(g, x)
    assert not model.training


def test_the_mode_is_kept_when_inference_fails():
    model = build("gcn", {})
    with pytest.raises(RuntimeError):
        model.inference(messy_graph(), torch.zeros(60, WIDTH + 1))
    assert model.training


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize("nodes", [0, 1, 5])
def test_graphs_without_edges(name, nodes):
    model = build(name, {})
    g = Graph.from_edge_index(torch.empty(2, 0), num_nodes=nodes).normalized(*model.graph)
    out = model.inference(g, features(nodes))
    assert out.shape == (nodes, OUT) and torch.isfinite(out).all()


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name in UNTYPED for arch in models.MODELS[name].arches])
def test_every_parameter_gets_a_gradient(name, arch):
    model = build(name, {}, arch=arch)
    g = messy_graph().normalized(*model.graph)
    blocks = NeighborSampler(g, [3, 3]).sample(torch.arange(20))
    model(SimpleNamespace(x=features()[blocks[0].n_id], blocks=blocks)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool(p.grad.any()), name


def test_gcn_against_pyg():
    model = build("gcn", {"norm": "sym"}, arch="plain", layers=1)
    edge_index = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    conv = pyg.GCNConv(WIDTH, OUT)
    conv.load_state_dict({"lin.weight": model.convs[0].linear.weight, "bias": model.convs[0].linear.bias})
    g = Graph.from_edge_index(edge_index, num_nodes=20).normalized("sym")
    assert torch.allclose(model.inference(g, features(20)), conv(features(20), edge_index), atol=1e-5)


def test_gcnii_against_pyg():
    model = build("gcn", {"norm": "sym", "alpha": 0.2, "theta": 0.7}, arch="gcnii", layers=3)
    edge_index = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    z = h = model.encoder(features(20))
    for layer, ours in enumerate(model.convs, 1):
        conv = pyg.GCN2Conv(HIDDEN, alpha=0.2, theta=0.7, layer=layer)
        conv.load_state_dict({"weight1": ours.linear.weight.t()})
        h = torch.relu(conv(h, z, edge_index) + ours.linear.bias)
    g = Graph.from_edge_index(edge_index, num_nodes=20).normalized("sym")
    assert torch.allclose(model.inference(g, features(20)), model.decoder(h), atol=1e-5)


def test_sage_against_pyg():
    model = build("sage", {}, arch="plain", layers=1)
    edge_index = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
    conv, ours = pyg.SAGEConv(WIDTH, OUT), model.convs[0]
    conv.load_state_dict(
        {"lin_l.weight": ours.others.weight, "lin_l.bias": ours.own.bias, "lin_r.weight": ours.own.weight}
    )
    g = Graph.from_edge_index(edge_index, num_nodes=20).normalized("row", self_loops=False)
    assert torch.allclose(model.inference(g, features(20)), conv(features(20), edge_index), atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3])
def test_gat_against_pyg(heads):
    """One head narrows (scores as in the paper), three widen (free directions): both say what PyG's layer says."""
    model = build("gat", {"heads": heads}, arch="plain", layers=1)
    edge_index = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
    conv, ours = pyg.GATConv(WIDTH, OUT, heads=heads, concat=False, add_self_loops=False), model.convs[0]
    assert ours.narrow == (heads == 1)
    with torch.no_grad():
        conv.lin.weight.copy_(ours.linear.weight)
        conv.bias.copy_(ours.bias)
        weight = ours.linear.weight.view(heads, OUT, WIDTH)
        for theirs, mine in ((conv.att_src, ours.src), (conv.att_dst, ours.dst)):
            if ours.narrow:
                theirs.copy_(mine[None])
            else:
                mine.copy_((weight * theirs[0].unsqueeze(-1)).sum(1))
    g = Graph.from_edge_index(edge_index, num_nodes=20)
    assert torch.allclose(model.inference(g, features(20)), conv(features(20), edge_index), atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3])
def test_gatv2_against_pyg(heads):
    model = build("gatv2", {"heads": heads}, arch="plain", layers=1)
    edge_index = torch.randint(20, (2, 100), generator=torch.Generator().manual_seed(0))
    conv, ours = pyg.GATv2Conv(WIDTH, OUT, heads=heads, concat=False, add_self_loops=False), model.convs[0]
    with torch.no_grad():
        conv.lin_l.weight.copy_(ours.linear.weight)
        conv.lin_l.bias.zero_()
        conv.lin_r.load_state_dict(ours.dst.state_dict())
        conv.att.copy_(ours.score[None])
        conv.bias.copy_(ours.bias)
    g = Graph.from_edge_index(edge_index, num_nodes=20)
    assert torch.allclose(model.inference(g, features(20)), conv(features(20), edge_index), atol=1e-5)


def test_chunks_cover_every_node_once():
    g = messy_graph()
    for edges in (1, 10, 100, 10**6):
        cuts = ranges(g.indptr, edges)
        assert [b for _, b in cuts[:-1]] == [a for a, _ in cuts[1:]] and cuts[0][0] == 0 and cuts[-1][1] == 60
        biggest = int(g.degree().max()) + 1
        for a, b in cuts:
            assert int(g.indptr[b] - g.indptr[a]) + b - a <= edges + biggest
    block = g.in_edges(range(3, 9))
    assert block.num_dst == 6 and torch.equal(block.n_id[block.src], g.indices[g.indptr[3] : g.indptr[9]].long())
    assert torch.equal(g.edge_index()[0, block.e_id], block.src)


def test_parameters_do_not_depend_on_the_callers_order():
    a, b = build("gat", {"heads": 2}), build("gat", {"heads": 2})
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: models.make("gnc", 2, 2, 2), "did you mean 'gcn'"),
        (lambda: models.make("gcn", 2, 2, 2, arch="residul"), "did you mean 'residual'"),
        (lambda: models.make("gat", 2, 9, 2, heads=2), "divisible by the 2 heads, got 9"),
        (lambda: models.make("gat", 2, 8, 2, attention="hajek"), "`attention` must be one of"),
        (lambda: models.make("geniepath", 2, 8, 2, attention="soft"), "`attention` must be one of"),
        (lambda: models.make("gcn", 2, 0, 2), "`hidden` must be a whole number of at least 1"),
        (lambda: models.make("gcn", 2, 2, 2, layers=0), "`layers` must be"),
        (lambda: models.make("gcn", 2, 2, 2, dropout=1.5), "`dropout` must be"),
        (lambda: models.make("gat", 2, 2, 2, heads=0), "`heads` must be"),
        (lambda: models.make("gcn", 2, 2, 2, norm="col"), "`norm` must be one of"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(InputError, match=words):
        make()

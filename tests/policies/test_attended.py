"""Attention without seeing everyone: the policy of scores, and the normaliser from what is remembered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import adahop
from adahop.block import Block
from adahop.checks import InputError
from adahop.features import Values
from adahop.graph import Graph
from adahop.messages import scores
from adahop.models.gat import GATConv
from adahop.policies import Attended
from adahop.samplers import NeighborSampler
from adahop.sum import AttentionScores
from adahop.watcher import listen, watch


def star(n: int = 12) -> Graph:
    return Graph.from_edge_index([list(range(1, n + 1)), [0] * n]).normalized("row", True)


def sampler_of(graph: Graph, k: int, heads: int = 1, draw: str = "systematic", **options) -> NeighborSampler:
    return NeighborSampler(graph, [k], Attended(graph, 1, heads=heads, **options), draw)


def conv_of(inputs: int = 4, heads: int = 2) -> tuple[GATConv, Tensor]:
    torch.manual_seed(0)
    conv = GATConv(inputs, 4, heads=heads)
    return conv, torch.randn(13, inputs)


def pass_over(conv: GATConv, h: Tensor, block: Block) -> Tensor:
    with watch(conv, scores) as told:
        conv(h[block.n_id], h[block.n_id[: block.num_dst]], block)
    return told[0]


@pytest.mark.parametrize("heads", [1, 2])
def test_odds_are_attention_times_norm(heads):
    """Once everyone was seen, the odds are those of the oracle: sqrt(sum over heads of a^2) |W h|."""
    conv, h = conv_of(heads=heads)
    graph = star()
    sampler = sampler_of(graph, -1, heads, eta=0.0, memory=1.0)
    with torch.no_grad():
        for _ in range(3):
            (block,) = sampler.sample([0])
            sampler.update([block], [pass_over(conv, h, block)])
        _, place, odds = sampler.policy.chances(0, torch.tensor([0]))
        value, t = Values(h).mapped(conv.kernel()), h @ conv.directions()[1].t()
        s = h[:1] @ conv.directions()[0].t()
        nodes = graph.indices[place].long()
        a = torch.nn.functional.leaky_relu(s + t[nodes], conv.slope).softmax(0)
    norm = (a.square() * value[nodes].square().sum(-1)).sum(-1) / a.square().sum(-1)
    true = nodes != 0
    best = (a.square().sum(1) * norm).sqrt()[true]
    assert torch.allclose(odds[true] / odds[true].sum(), best / best.sum(), atol=1e-5)


@pytest.mark.parametrize("draw", ["multinomial", "systematic", "depround", "poisson"])
def test_draws_are_unbiased(draw):
    """The mean of 3,000 estimates of a sum, within 5 standard errors: 6e-7 to fail by chance."""
    conv, h = conv_of()
    graph = star()
    sampler = sampler_of(graph, 3, 2, draw)
    with torch.no_grad():
        for _ in range(20):
            (block,) = sampler.sample([0])
            sampler.update([block], [pass_over(conv, h, block)])
    value = torch.arange(13.0)
    sums = []
    for _ in range(3000):
        (b,) = sampler.sample([0])
        sums.append(float((b.scale * value[b.n_id[b.src]]).sum()))
    found = torch.tensor(sums, dtype=torch.double)
    assert abs(float(found.mean()) - 78.0) <= 5 * float(found.std()) / 3000**0.5 + 1e-6


def test_unknown_nodes_are_typical():
    policy = Attended(star(), 1)
    (block,) = NeighborSampler(policy.graph, [2], policy, "systematic").sample([0])
    told = torch.stack(
        [torch.ones(block.num_edges), torch.full((block.num_edges,), 2.0), torch.ones(block.num_edges)], 1
    )
    policy.update(0, block, told)
    seen = policy.known[1, 0]
    assert 0 < int(seen.sum()) < 13 and float(policy._score(1, 0, torch.tensor([12]))[0, 0]) > 0
    policy.update(0, block, told[:0])  # a layer that needed no draw


def test_the_normaliser_is_unbiased_and_exact_with_everyone():
    """Mean of 2,000 normalisers from stale scores, within 5 standard errors: 6e-7 to fail by chance."""
    conv, h = conv_of()
    graph = star()
    memory = AttentionScores(graph, 2)
    memory.history.value.copy_(h @ conv.directions()[1].t() + 0.3 * torch.randn(13, 2))
    memory.eval()
    everyone = NeighborSampler(graph, [-1]).sample([0])[0]
    exact = conv(h[everyone.n_id], h[:1], everyone)
    assert torch.allclose(conv(h[everyone.n_id], h[:1], everyone, memory), exact, atol=1e-5)
    sampler, inverse = NeighborSampler(graph, [3], None, "systematic"), []
    with torch.no_grad():
        true = torch.nn.functional.leaky_relu(
            h[:1] @ conv.directions()[0].t() + h @ conv.directions()[1].t(), 0.2
        ).exp()
        for _ in range(2000):
            (block,) = sampler.sample([0])
            heard: list[Tensor] = []
            with listen(conv, lambda m, heard=heard: heard.append(m.coef)):
                memory.total(conv, Values(h[block.n_id]), h[:1], block)
            t = h[block.n_id] @ conv.directions()[1].t()
            w = torch.nn.functional.leaky_relu(h[:1] @ conv.directions()[0].t() + t[block.src], 0.2).exp()
            inverse.append((block.scale.unsqueeze(1) * w / heard[0])[0])
    found, target = torch.stack(inverse).double(), true.sum(0).double()
    assert ((found.mean(0) - target).abs() <= 5 * found.std(0) / 2000**0.5 + 1e-4).all()


@pytest.mark.parametrize("estimator", ["plain", "scores", "history", "exact+scores", "exact+history"])
def test_fit(estimator):
    options = {"policy": "attended", "draw": "systematic"}
    result = adahop.fit(adahop.load("digits"), model="gat", method="graphsage", method_options=options, sizes=(3, 3),
                        estimator=estimator, epochs=8, hidden=32)  # fmt: skip
    assert result.test > 0.9 and result.sampler.policy.known[1, 1].float().mean() > 0.5


def test_scores_are_remembered_for_attention_alone():
    data = adahop.load("digits")
    with pytest.raises(InputError, match=r"must not remember scores for model gcn, .* got exact"):
        adahop.fit(data, method="graphsage", estimator="exact+scores", epochs=1)

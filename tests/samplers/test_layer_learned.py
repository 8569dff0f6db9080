"""Layer-wise methods that learn: AS-GCN by its penalty, BLISS by its bandits; and training with any of them."""

from __future__ import annotations

import pytest
import torch
from test_layer_wise import NAMES, SEEDS, aggregate, dense, graph, values

from adahop.checks import InputError
from adahop.graph import Graph
from adahop.methods import make
from adahop.samplers import ASGCN, Bliss


def problem(n: int = 200, degree: int = 10):
    """h whose norm is exp of the first feature: known to x, not to the graph."""
    gen = torch.Generator().manual_seed(0)
    g = Graph.from_edge_index(torch.randint(0, n, (2, n * degree), generator=gen), num_nodes=n).normalized("row")
    x = torch.randn(n, 3, generator=gen)
    h = torch.nn.functional.normalize(torch.randn(n, 4, generator=gen), dim=1) * x[:, :1].exp()
    return g, x, h


def energies(block, h):
    return (block.weight * block.scale).square() * h[block.n_id[block.src]].square().sum(1)


def variance(sampler, g, h, repeats: int = 60) -> float:
    gen, full, total = torch.Generator().manual_seed(9), dense(g) @ h, 0.0
    for _ in range(repeats):
        seeds = torch.randperm(g.num_nodes, generator=gen)[:30]
        block = sampler.sample(seeds)[0]
        total += float((aggregate(block, h[block.n_id]) - full[seeds]).square().sum(1).mean()) / repeats
    return total


def train(sampler, g, h, steps: int = 300, unit: float = 1.0):
    gen, parameters = torch.Generator().manual_seed(5), list(sampler.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.03) if parameters else None
    for _ in range(steps):
        blocks = sampler.sample(torch.randperm(g.num_nodes, generator=gen)[:30])
        energy = [energies(blocks[0], h) * unit]
        penalty = sampler.penalty(blocks, energy)
        if optimizer and isinstance(penalty, torch.Tensor):
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
        sampler.update(blocks, energy)
    return sampler


def test_the_learners_beat_ladies():
    g, x, h = problem()
    ladies = variance(make("ladies", g, [30]), g, h)
    learnt = {name: train(make(name, g, [30], **o), g, h) for name, o in (("bliss", {}), ("as-gcn", {"features": x}))}
    for name, sampler in learnt.items():
        assert variance(sampler, g, h) < 0.5 * ladies, name
    assert learnt["as-gcn"].w[0, 0] > 5 * learnt["as-gcn"].w[0, 1:].abs().max()


@pytest.mark.parametrize(("name", "state"), [("bliss", "policy.arms.weight"), ("as-gcn", "w")])
def test_the_unit_of_the_energy_does_not_matter(name, state):
    g, x, h = problem()
    options = {"features": x} if name == "as-gcn" else {}
    a, b = (train(make(name, g, [30], **options), g, h, 20, unit).state_dict()[state] for unit in (1.0, 1e8))
    assert float(a.abs().max()) > 0.1
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("inner", [True, False])
def test_the_penalty_has_the_gradient_of_the_variance(inner):
    """Of sum_j sum_i a_ij^2 h_j^2 / q_j(theta); a factor, here s / (s - 1), is all that may differ."""
    g, h, size, seeds = graph(60), values(60), 12, torch.arange(10)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    sampler = ASGCN(g, [size], features=x, draw="multinomial", inner=inner)
    with torch.no_grad():
        sampler.w.copy_(torch.tensor([[0.7, -0.5]]))
    near = sampler.near(g.rows(seeds))
    q = near.total(sampler.weight(near.place)) * sampler.score(0, x[near.nodes] @ sampler.w[0])
    square = near.total((sampler.weight(near.place) * h[g.indices[near.place].long(), 0]).square())
    possible = q > 0
    expected = torch.autograd.grad((square[possible] / (q[possible] / q.sum())).sum(), sampler.w)[0].flatten()
    grads = []
    for _ in range(2000):
        block = sampler.sample(seeds)[0]
        value = sampler.variance(0, block, block.drawn(), energies(block, h))
        grads.append(torch.autograd.grad(value, sampler.w)[0].flatten() * size / (size - 1))
    out = torch.stack(grads).double()
    assert ((out.mean(0) - expected).abs() < 4.5 * out.std(0) / len(grads) ** 0.5).all()
    assert expected.abs().max() > 9 * (out.std(0) / len(grads) ** 0.5).max()  # far enough from zero to tell


@pytest.mark.parametrize("name", ["bliss", "as-gcn"])
def test_strange_energies_do_no_harm(name):
    g = graph(60)
    sampler = make(name, g, [6, 5])
    optimizer = torch.optim.Adam(sampler.parameters(), lr=0.1) if list(sampler.parameters()) else None
    for value in [0.0, 1e38, float("inf"), float("nan"), 1e-38] * 40:
        blocks = sampler.sample(SEEDS)
        energy = [torch.full((b.num_edges,), value) for b in blocks]
        penalty = sampler.penalty(blocks, energy)
        if optimizer and isinstance(penalty, torch.Tensor):
            penalty.backward()
            optimizer.step()
        sampler.update(blocks, energy)
    assert all(bool(torch.isfinite(t).all()) for t in sampler.state_dict().values())
    assert all(bool(torch.isfinite(b.scale).all()) for b in sampler.sample(SEEDS))


def test_bliss_does_not_chase_noise():
    g, _, h = problem()
    h, gen = torch.nn.functional.normalize(h, dim=1), torch.Generator().manual_seed(1)
    sampler = Bliss(g, [30])
    before = variance(sampler, g, h, 200)
    for _ in range(200):
        noisy = h * torch.randn(len(h), 1, generator=gen).exp()
        blocks = sampler.sample(torch.randperm(g.num_nodes, generator=gen)[:30])
        sampler.update(blocks, [energies(blocks[0], noisy)])
    assert variance(sampler, g, h, 200) < 1.3 * before


# --- at the door -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gcn", "gat"])
@pytest.mark.parametrize("name", NAMES)
def test_fit(name, model):
    from adahop.datasets import load
    from adahop.train import fit

    result = fit(load("digits"), method=name, model=model, sizes=(64, 64), epochs=3, hidden=16)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    if name == "as-gcn":
        assert result.sampler.w.shape[1] == load("digits").x.shape[1] and bool((result.sampler.w != 0).any())


def test_wrong_options_are_told():
    g = graph()
    for name, options, words in [
        ("ladies", {"draw": "systematc"}, "did you mean 'systematic'"),
        ("ladies", {"power": -1.0}, "`power` must be"),
        ("fastgcn", {"eta": 0.1}, "an option of method 'fastgcn' must be one of draw"),
        ("as-gcn", {"features": torch.ones(3, 2)}, "`features` must have shape"),
        ("as-gcn", {"features": torch.ones(24, 2, dtype=torch.long)}, "floating-point"),
        ("as-gcn", {"penalty": -1.0}, "`penalty` must be"),
        ("bliss", {"eta": 2.0}, "`eta` must be"),
    ]:
        with pytest.raises(InputError, match=words):
            make(name, g, [3], **options)

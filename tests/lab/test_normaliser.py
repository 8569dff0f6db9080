"""The normaliser's error: nothing where nothing is left to chance, and what plain arithmetic says elsewhere."""

from __future__ import annotations

import pytest
import torch

import adahop
from adahop import models
from adahop.checks import InputError
from adahop.config import Config
from adahop.run import assemble
from adahop.samplers import NeighborSampler
from adahop_lab.normaliser import normaliser_error


def made(**options):
    data = adahop.load("digits")
    config = Config(**{"model": "gat", "method": "graphsage", "sizes": (3, 3), "hidden": 8, **options})
    model, sampler = assemble(data, config, 0)
    return data, model, sampler


def test_everyone_has_no_error():
    data, model, sampler = made(sizes=(-1, -1))
    assert normaliser_error(model, sampler, data.x, range(40), repeats=2) == pytest.approx([0, 0], abs=1e-5)


def test_even_scores_of_even_draws_have_no_error():
    data, model, sampler = made()
    with torch.no_grad():
        for conv in model.convs:
            conv.dst.zero_(), conv.src.zero_()
    assert normaliser_error(model, sampler, data.x, range(40), repeats=2) == pytest.approx([0, 0], abs=1e-5)


def test_an_exact_layer_has_none_and_a_memory_less():
    """0.5 is far from what chance gives: the memory was renewed on the same model, so only rounding is left."""
    data, model, sampler = made(estimator="exact+history")
    model.inference(sampler.graph, data.x)
    first, second = normaliser_error(model, sampler, data.x, range(40), repeats=4)
    assert first == 0.0
    _, without = normaliser_error(*made()[1:], data.x, range(40), repeats=4)
    assert second < 0.5 * without


def test_by_hand():
    """A star of 4 with e^score = 1, 1, 1, 4 beside the hub's own: one uniform draw of 4 gives D' = 1 + 4 w."""
    graph = adahop.Graph.from_edge_index([[1, 2, 3, 4], [0, 0, 0, 0]], num_nodes=5)
    x = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0]])
    model = models.make("gat", 1, 2, 2, layers=1, arch="plain", dropout=0.0)
    with torch.no_grad():
        model.convs[0].dst.zero_()
        model.convs[0].src.copy_(torch.full_like(model.convs[0].src, float(torch.tensor(4.0).log())))
        if model.convs[0].narrow:
            pytest.fail("the layer must not narrow here")
    sampler = NeighborSampler(graph.normalized(*model.graph), [1])
    (found,) = normaliser_error(model, sampler, x, [0], repeats=4000)
    true, low, high = 1 + 7, 1 + 4 * 1, 1 + 4 * 4
    expected = (0.75 * (low / true - 1) ** 2 + 0.25 * (high / true - 1) ** 2) ** 0.5
    assert found == pytest.approx(expected, rel=0.05)  # 4,000 draws: 6 standard errors


def test_other_models_are_refused():
    data, model, sampler = made(model="gcn")
    with pytest.raises(InputError, match="`model` must be a GAT, got"):
        normaliser_error(model, sampler, data.x, range(4))

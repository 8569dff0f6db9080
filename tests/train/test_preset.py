"""The preset adahop: what it is for each model, and that it stays itself when a part is replaced."""

from __future__ import annotations

import pytest

import adahop
from adahop.config import Config
from adahop.methods import METHODS, OTHER
from adahop.policies import Attended, Tracked, Uniform
from adahop.run import assemble
from adahop.sum import AttentionSums, ControlVariate, ExactAttention, ExactSum

PARTS = {
    "gcn": (Tracked, [ExactSum, ControlVariate]),
    "sage": (Tracked, [ExactSum, ControlVariate]),
    "gat": (Attended, [ExactAttention, AttentionSums]),
    "geniepath": (Tracked, []),
    "gatv2": (Tracked, []),
}


@pytest.fixture(scope="module")
def data():
    return adahop.load("digits")


@pytest.mark.parametrize("model", PARTS)
def test_it_takes_what_applies(data, model):
    net, sampler = assemble(data, Config(model=model, sizes=(3, 3), hidden=8), seed=0)
    policy, memories = PARTS[model]
    assert Config().method == "adahop" and type(sampler.policy) is policy
    assert sampler.how == ("auto" if model in ("gcn", "sage") else "systematic")
    assert [type(m) for m in net.memories.values()] == memories
    assert sampler.skip == (frozenset({0}) if memories else frozenset())


def test_heads_go_along(data):
    _, sampler = assemble(data, Config(model="gat", model_options={"heads": 4}, sizes=(3, 3), hidden=8), seed=0)
    assert sampler.policy.heads == 4
    assert adahop.fit(data, model="gat", model_options={"heads": 4}, sizes=(3, 3), hidden=32, epochs=10).test > 0.9


def test_a_part_can_be_replaced(data):
    config = Config(model="gat", sizes=(3, 3), hidden=8, estimator="plain", method_options={"policy": "uniform"})
    net, sampler = assemble(data, config, seed=0)
    assert type(sampler.policy) is Uniform and not net.memories and sampler.how == "systematic"


def test_other_models_have_no_memory():
    assert METHODS["adahop"].on(OTHER).estimator == "plain"
    assert METHODS["adahop"].on(OTHER).options["policy"] == "tracked"

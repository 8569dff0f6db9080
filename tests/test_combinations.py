"""What combines with what: every combination of parts runs, or `Config` refuses it in one sentence.

Each accepted combination takes two steps on a small graph, and where it claims to be unbiased, a z-test says whether it
is: of 150 draws, the mean of each layer's sum, projected on the sum over all neighbours, against that sum. The bound of
5.5 standard errors is passed by chance once in 2.6e7 tests (about 1,900 are made in all); seeds are fixed.

Every run takes a cover of all pairs of parts; `ADAHOP_ALL=1 pytest tests/test_combinations.py` takes everything.
`python tests/test_combinations.py` writes docs/combinations.md.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from itertools import combinations, islice, product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import adahop
from adahop.block import Block
from adahop.checks import InputError
from adahop.config import Config
from adahop.features import Values
from adahop.methods import FIXED, METHODS, OTHER, part, refusal
from adahop.models import GNN
from adahop.models import MODELS as ALL_MODELS
from adahop.policies import POLICIES
from adahop.run import Run
from adahop.samplers.neighbor import AUTO
from adahop.samplers.neighbor import DRAWS as ALL_DRAWS
from adahop.sum import ESTIMATORS
from adahop.train import train_step
from conftest import full_sum

PAGE = Path(__file__).parent.parent / "docs" / "combinations.md"
REPEATS, BOUND = 150, 5.5
SPEC = "synthetic:48,500,5,3"

DRAWS = [draw for draw in ALL_DRAWS if draw != AUTO]  # which is one of the others
MODELS = {name: m for name, m in ALL_MODELS.items() if not m.typed}  # typed ones: tests/models/test_typed_models.py


def common(parts: Parts | Preset) -> dict:
    return {"model": parts.model, "estimator": parts.estimator, "hidden": 8, "batch_size": 16, "dropout": 0.0}


class Parts(NamedTuple):
    """One of each; `policy` and `draw` belong to node-wise sampling, other methods come as they are."""

    policy: str
    draw: str
    estimator: str
    model: str

    def config(self) -> Config:
        options = {"policy": self.policy, "draw": self.draw}
        return Config(method="graphsage", method_options=options, sizes=(3, 3), **common(self))

    @property
    def unbiased(self) -> bool:
        return not POLICIES[self.policy].rescales


class Preset(NamedTuple):
    """A method that has no policy of its own choice."""

    method: str
    estimator: str
    model: str

    def config(self) -> Config:
        sizes = (9, 9) if METHODS[self.method].family == "layer-wise" else (3, 3)
        return Config(method=self.method, sizes=sizes, **common(self))

    @property
    def unbiased(self) -> bool:
        return METHODS[self.method].unbiased


NODE_WISE = [Parts(*c) for c in product(POLICIES, DRAWS, ESTIMATORS, MODELS)]
CLOSED = [name for name, m in METHODS.items() if part(m, {}, "policy") is None]
OTHERS = [Preset(*c) for c in product(CLOSED, ESTIMATORS, MODELS)]


def cover(every: list) -> list:
    """A few combinations that hold every pair of parts that some combination holds; the same few every time."""
    pairs = {c: {((i, c[i]), (j, c[j])) for i, j in combinations(range(len(c)), 2)} for c in every}
    open_pairs, chosen = set().union(*pairs.values()) if pairs else set(), []
    while open_pairs:
        best = max(every, key=lambda c: len(pairs[c] & open_pairs))
        chosen.append(best)
        open_pairs -= pairs[best]
    return chosen


def said(parts: Parts | Preset) -> str | None:
    """Why `Config` refuses it, if it does."""
    try:
        parts.config()
    except InputError as e:
        return str(e)
    return None


def refused(parts: Parts | Preset) -> str | None:
    """The same from the table, which costs less than a thousand configs."""
    return refusal(parts.estimator, parts.model, MODELS[parts.model].weights)


REFUSED = {c: why for c in [*NODE_WISE, *OTHERS] if (why := refused(c)) is not None}
FEW = [*cover([c for c in NODE_WISE if c not in REFUSED]), *cover([c for c in OTHERS if c not in REFUSED])]
MANY = [c for c in [*NODE_WISE, *OTHERS] if c not in REFUSED and c not in set(FEW)]


# --- what is accepted works ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", FEW, ids="-".join)
def test_a_cover_of_all_pairs(parts):
    check(parts)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ADAHOP_ALL"), reason="a thousand tests; ADAHOP_ALL=1 asks for them")
@pytest.mark.parametrize("parts", MANY if os.environ.get("ADAHOP_ALL") else MANY[:1], ids="-".join)
def test_all_the_others(parts):
    check(parts)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def check(parts: Parts | Preset) -> None:
    torch.manual_seed(0)
    run = Run(adahop.load(SPEC), parts.config(), seed=1)
    batches = list(islice(run.strategy.batches(run.loader), 2))  # of clusters, an epoch may have but one
    assert batches
    for batch in batches:
        assert math.isfinite(float(train_step(run.net, run.sampler, run.optimizer, batch)))
    for name, t in run.sampler.state_dict().items():
        assert bool(torch.isfinite(t.float()).all()), name
    run.model.eval()
    exact = run.sampler.skip
    if parts.unbiased and run.model.weights == FIXED:
        unbiased(run, exact)
    elif exact:
        known(run)


def mapped_sum(model: GNN, layer: int, values: Values, own: torch.Tensor, block: Block) -> torch.Tensor:
    """A layer's estimate of the sum of a_ij W h_j, without the rest."""
    conv = model.layers()[layer]
    out, rest = model.sums(layer)(conv, values, own, block), conv.rest(own)
    return out if rest is None else out - rest


@torch.no_grad()
def unbiased(run: Run, exact: frozenset[int]) -> None:
    """Of every layer's sum over h that is held fixed, given what the policy and the memory know now."""
    seeds, model = torch.arange(12), run.model
    for memory in model.memories.values():
        memory.flush()
    h = torch.randn(run.sampler.graph.num_nodes, model.widths[1], generator=torch.Generator().manual_seed(2))
    table = {0: Values(run.data.x, model.encoder).rows(), 1: h}
    true = {i: full_sum(run.sampler.graph, t)[:12] @ model.layers()[i].kernel().double().t() for i, t in table.items()}
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(REPEATS):
        blocks = run.sampler.sample(seeds)
        first, last = blocks[0], blocks[-1]
        values = Values(run.data.x[first.n_id], model.encoder)
        below = mapped_sum(model, 0, values, values.rows(first.num_dst), first)
        above = mapped_sum(model, 1, model.set_recompute(1, Values(h[last.n_id])), h[last.n_id[: last.num_dst]], last)
        for layer, out in ((0, below), (1, above)):  # along the true sum, where a wrong scale shows most
            found[layer].append(float(((out[:12] - true[layer]) * true[layer]).sum()))
    for layer, numbers in found.items():
        off = torch.tensor(numbers).double()
        if layer in exact:
            assert float(off.abs().max()) < 1e-3
        else:
            z = float(off.mean()) / (float(off.std()) / math.sqrt(REPEATS) + 1e-5)
            assert abs(z) < BOUND, f"layer {layer}: {z:.1f} standard errors"


@torch.no_grad()
def known(run: Run) -> None:
    """The first layer's sum is that over all neighbours, whatever was drawn: equal from draw to draw."""
    seeds, model = torch.arange(12), run.model
    said = []
    for _ in range(3):
        first = run.sampler.sample(seeds)[0]
        values = Values(run.data.x[first.n_id], model.encoder)
        said.append(model.sums(0)(model.layers()[0], values, values.rows(first.num_dst), first)[:12])
    assert torch.allclose(said[0], said[1], atol=1e-5) and torch.allclose(said[0], said[2], atol=1e-5)


def test_the_z_test_sees_a_bias(monkeypatch):
    torch.manual_seed(0)
    run = Run(adahop.load(SPEC), Parts("uniform", "systematic", "plain", "gcn").config(), seed=1)
    run.model.eval()
    draw = run.sampler.draw

    def biased(seeds):
        return [b._replace(scale=torch.where(b.scale > 1, 1.2 * b.scale, b.scale)) for b in draw(seeds)]

    monkeypatch.setattr(run.sampler, "draw", biased)
    with pytest.raises(AssertionError, match="standard errors"):
        unbiased(run, frozenset())


# --- what is not is refused in time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", cover([c for c in NODE_WISE if c in REFUSED]), ids="-".join)
def test_config_refuses_what_the_table_refuses(parts):
    assert said(parts) == REFUSED[parts]


@pytest.mark.slow
def test_config_says_what_the_table_says():
    for parts in [*NODE_WISE, *OTHERS]:
        assert said(parts) == REFUSED.get(parts)


def test_most_combine():
    assert len(NODE_WISE) == 1800 and sum(c in REFUSED for c in NODE_WISE) <= 0.15 * len(NODE_WISE)


@pytest.mark.parametrize("why", sorted(set(REFUSED.values())))
def test_a_refusal_is_one_sentence_in_the_words_of_the_user(why):
    assert " must " in why and ", got " in why and why.startswith("`") and "\n" not in why
    word = why.split("`")[1]
    assert word in Config.__dataclass_fields__


def test_nothing_is_loaded_before_a_refusal(monkeypatch):
    def load(*_):
        raise AssertionError("data were read")

    monkeypatch.setattr("adahop.cli.train.load", load)
    from adahop.cli import main

    with pytest.raises(SystemExit) as end:
        main(["train", "--estimator", "exact+scores"])
    assert end.value.code == 2


def test_a_preset_fits_every_model():
    for method, model in product(METHODS, MODELS):
        Config(method=method, model=model)
    assert all(m.on(OTHER).estimator in ESTIMATORS for m in METHODS.values())


def test_the_cover_holds_every_pair():
    for every in (NODE_WISE, OTHERS):
        able = [c for c in every if c not in REFUSED]
        for i, j in combinations(range(len(able[0])), 2):
            assert {(c[i], c[j]) for c in able} == {(c[i], c[j]) for c in FEW if type(c) is type(able[0])}
    assert len(FEW) < 200


# --- the page --------------------------------------------------------------------------------------------------------


TEXT = """# Combinations

Parts combine freely: `policy` and `draw` (options of node-wise methods), `estimator` and `model`. What cannot work is
refused when a `Config` is made, before data are read. CPU and GPU accept the same. This page is written by
`tests/test_combinations.py`, which runs every accepted combination.

| part | one of |
|---|---|
| `policy` | {policies} |
| `draw` | {draws} |
| `estimator` | {estimators} |
| `model` | {models} |
| methods without `policy` | {closed} |

Of {many:,} combinations of policy, draw, estimator and model, {able} ({share:.1f} %) are accepted; of {others} of the
other methods with estimator and model, {others_able}.

| refused | node-wise | other methods |
|---|---:|---:|
{rows}

The policy `attended` reads attention scores that are a sum of one number per end of an edge (gat). With the other
models it samples by the graph's weights, as `tracked` does. Estimates with fixed weights (gcn, sage) are unbiased for
every policy but thanos and thanosm. Attention is normalised by the sample or by stored values, which is consistent but
not unbiased, except in an exact first layer.
"""


def page() -> str:
    """docs/combinations.md."""
    reasons = Counter(REFUSED[c] for c in NODE_WISE if c in REFUSED)
    others = Counter(REFUSED[c] for c in OTHERS if c in REFUSED)
    able = len(NODE_WISE) - sum(reasons.values())
    return TEXT.format(
        policies=", ".join(POLICIES),
        draws=", ".join(DRAWS),
        estimators=", ".join(ESTIMATORS),
        models=", ".join(MODELS),
        closed=", ".join(CLOSED),
        many=len(NODE_WISE),
        able=able,
        share=100 * able / len(NODE_WISE),
        others=len(OTHERS),
        others_able=len(OTHERS) - sum(others.values()),
        rows="\n".join(f"| {why} | {reasons[why]} | {others[why]} |" for why in dict.fromkeys([*reasons, *others])),
    )


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run `python tests/test_combinations.py`"


if __name__ == "__main__":
    PAGE.write_text(page())

"""The GPU's kernels against the reference: on a CUDA device where there is one, else in Triton's interpreter.

`python -m pytest tests/ops/test_gpu.py` runs them all. Without a GPU the interpreter must be chosen before Triton is
imported, so `test_gpu_interpreted.py` runs this file in a process of its own, and here it is skipped.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from adahop import capture, fit, models, ops, train
from adahop.config import Config
from adahop.features import Features
from adahop.graph import Graph
from adahop.methods import METHODS, make
from adahop.ops import Odds, random, segment_sum
from adahop.run import Run, device_features
from adahop.samplers.loop import Padded
from adahop.sum import AllNeighboursSum
from adahop.watcher import watch

from conftest import messy_graph, star, toy_data  # isort: skip
from typed_graphs import typed_data  # isort: skip

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
EACH = [(name, arch) for name in ("gcn", "sage", "gat") for arch in models.MODELS[name].arches]
pytestmark = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs a CUDA device or Triton's interpreter")
on_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
MANY = 20_000 if CUDA else 40  # copies of a star that are drawn from at once


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so short that even small neighbourhoods need several."""
    pytest.importorskip("triton")
    from adahop.ops.drawing import cuda as drawing
    from adahop.ops.learning import cuda as learning

    if INTERPRETED:
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of the wrap-around that hashes live on
    monkeypatch.setenv("ADAHOP_TRITON", "1")
    for module in (drawing, learning):
        monkeypatch.setattr(module, "BLOCK", 32)


def small_graph() -> Graph:
    return messy_graph(nodes=16, edges=150).normalized("row", True)


def drawn_both(graph: Graph, k, how: str, odds: Odds, key: int):
    """The kernel's draw and the reference's, on the CPU."""
    dst = torch.arange(graph.num_nodes)
    g, here = graph.to(DEVICE), Odds(*(t.to(DEVICE) if torch.is_tensor(t) else t for t in odds))
    ks = torch.as_tensor(k).reshape(-1)
    ours = ops.draw(g.edges, g.rows(dst.to(DEVICE)), ks.to(DEVICE), how, here, key)
    theirs = ops.draw.reference(graph.edges, graph.rows(dst), ks, how, odds, key)
    return ops.Drawn(*(t.cpu() for t in ours)), theirs


@pytest.mark.parametrize("how", ["multinomial", "systematic"])
@pytest.mark.parametrize("k", [1, 5])
def test_uniform_draws_are_the_same_bit_for_bit(how, k):
    for a, b in zip(*drawn_both(small_graph(), k, how, Odds(), random.key(1, 2, 3)), strict=True):
        assert torch.equal(a, b)


def test_each_target_may_have_its_own_number():
    many = torch.arange(16) % 4
    for a, b in zip(*drawn_both(small_graph(), many, "multinomial", Odds(), 5), strict=True):
        assert torch.equal(a, b)


def test_the_step_on_the_device_names_the_same_stream():
    g = small_graph().to(DEVICE)
    dst, stream = torch.arange(16, device=DEVICE), random.Stream(random.key(7), torch.tensor(9, device=DEVICE), 1)
    assert stream.now() == random.key(7, 9, 1)
    loops = int((g.first - g.indptr[:-1]).max())
    one, other, plain = (
        form(g.edges, g.rows(dst), dst, 3, loops, "multinomial", Odds(), key)
        for form, key in ((ops.padded, stream), (ops.padded, stream.now()), (ops.padded.reference, stream))
    )
    assert all(torch.equal(a, b) for a, b in zip(one[:5], other[:5], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[:2], plain[:2], strict=True))
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(one[2:5], plain[2:5], strict=True))  # divisions


def apart(t: torch.Tensor) -> torch.Tensor:
    """The same on the device, its entries (or rows) not side by side in memory."""
    return t.repeat_interleave(2, 0).to(DEVICE)[::2]


@pytest.mark.parametrize("kind", ["uniform", "mixed", "node"])
def test_what_is_drawn_from_need_not_lie_side_by_side(kind):
    """Seeds may be every other node of a tensor, and weights a column."""
    graph, many = small_graph(), torch.arange(16) % 4
    odds = Odds() if kind == "uniform" else some_odds(kind, graph)
    g, found = graph.to(DEVICE), []
    for form in (lambda t: t.to(DEVICE), apart):
        law = odds._replace(**{k: form(getattr(odds, k)) for k in ("edge", "node") if getattr(odds, k) is not None})
        found.append(ops.draw(g.edges, g.rows(form(torch.arange(16))), form(many), "multinomial", law, 5))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_summed_need_not_lie_side_by_side():
    g = torch.Generator().manual_seed(0)
    h, coef, ptr = torch.randn(9, 40, generator=g), torch.rand(30, generator=g), torch.tensor([0, 4, 4, 25, 30])
    src, row = torch.randint(9, (30,), generator=g), torch.repeat_interleave(torch.arange(4), ptr.diff())
    nodes, graph, square = torch.tensor([7, 0, 3]), small_graph().to(DEVICE), torch.rand(9, generator=g)
    x, none = torch.randn(16, 40, generator=g), torch.full((9,), -1, dtype=torch.int32, device=DEVICE)
    found = []
    for form in (lambda t: t.to(DEVICE), apart):
        value, places = torch.zeros(16, 40, device=DEVICE), torch.arange(9, device=DEVICE)
        ops.push(value, form(nodes), h[:3].to(DEVICE), ops.Scratch())
        found.append([
            value,
            ops.gather_sum(h.to(DEVICE), form(src), form(row), form(coef), form(ptr)),
            ops.energies(h.to(DEVICE), form(src), form(coef)),
            ops.known_energies(form(square), places, form(src), form(coef)),
            ops.full_sum(form(x), graph.edges, form(nodes)),
            ops.fetch(form(src), ops.pinned(h), h[:0].to(DEVICE), none),
        ])  # fmt: skip
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))  # summed in another order


def some_odds(kind: str, graph: Graph) -> Odds:
    g = torch.Generator().manual_seed(3)
    edge, node = torch.rand(graph.num_edges, generator=g), torch.rand(graph.num_nodes, generator=g) + 0.1
    edge[::5] = 0.0
    return {
        "edge": Odds(edge=edge),
        "mixed": Odds(edge=edge, eta=0.1),
        "node": Odds(edge=graph.weight, node=node, eta=0.05),
        "nobody": Odds(edge=torch.zeros_like(edge), eta=0.1),
    }[kind]


@pytest.mark.parametrize("kind", ["edge", "mixed", "node", "nobody"])
@pytest.mark.parametrize("how", ["multinomial", "systematic", "depround"])
def test_weighted_draws_have_the_reference_s_numbers(how, kind):
    """As many a target, the same probability wherever both took the place, nobody without odds, no place twice."""
    graph = small_graph()
    odds = some_odds(kind, graph)
    ours, theirs = drawn_both(graph, 3, how, odds, 11)
    assert torch.equal(ours.ptr, theirs.ptr)
    if kind == "edge":
        true = ours.pos >= graph.first[graph.dst()[ours.pos]]
        assert bool((odds.edge[ours.pos[true]] > 0).all())
    if how == "multinomial":  # the same marks on the same line, summed in another order
        assert (ours.pos == theirs.pos).double().mean() > 0.97
    else:
        assert all(len(set(ours.pos[a:b].tolist())) == b - a for a, b in zip(ours.ptr[:-1], ours.ptr[1:], strict=True))
    shared = {int(p): (float(q), float(s)) for p, q, s in zip(*theirs[1:], strict=True)}
    for p, q, s in zip(*ours[1:], strict=True):
        if int(p) in shared:
            assert (float(q), float(s)) == pytest.approx(shared[int(p)], rel=1e-4)


@pytest.mark.parametrize("how", ["multinomial", "systematic", "depround"])
def test_marginals(how):
    """Neighbour j comes as often as its probability says: every z below 5, which chance breaks once in 10^5 tests."""
    n, k = 11, 3
    graph = star(n, MANY)
    node = torch.rand(graph.num_nodes, generator=torch.Generator().manual_seed(0)) ** 2 + 0.01
    w = node[graph.indices[:n].long()].double()
    g, dst = graph.to(DEVICE), torch.arange(MANY, device=DEVICE)
    odds = Odds(node=node.to(DEVICE), eta=0.1)
    d = ops.draw(g.edges, g.rows(dst), torch.tensor([k], device=DEVICE), how, odds, 4)
    assert bool((d.ptr.diff() == k).all())
    came = torch.bincount((g.indices[d.pos].long() - MANY).cpu(), minlength=n).double()
    if how == "multinomial":
        p = 0.9 * w / w.sum() + 0.1 / n
        z = (came - MANY * k * p) / (MANY * k * p * (1 - p)).sqrt()
    else:
        p = ops.inclusion(w, torch.zeros(n, dtype=torch.long), 1, torch.tensor([float(k)]).double(), 0.1)
        z = (came - MANY * p) / (MANY * p * (1 - p)).clamp(min=1e-9).sqrt()
    assert float(z.abs().max()) < 5


def test_a_hub_needs_several_blocks():
    """3,000 neighbours (200 without a GPU), weights that rise: the mean place drawn is where it must be, z below 5."""
    n, k = (3000, 64) if CUDA else (200, 16)
    g = star(n, 1).to(DEVICE)
    weight = torch.arange(1, n + 1, dtype=torch.float32, device=DEVICE)
    rows = g.rows(torch.zeros(1, dtype=torch.long, device=DEVICE))
    d = ops.draw(g.edges, rows, torch.tensor([k], device=DEVICE), "multinomial", Odds(edge=weight), 2)
    place = d.pos.double().cpu() / n
    assert abs(float(place.mean()) - 2 / 3) < 5 * (1 / 18 / k) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2])
def test_gather_sum_and_its_gradients(dtype, heads):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(9, heads, 150, generator=g).to(dtype)
    src, ptr = torch.randint(9, (30,), generator=g), torch.tensor([0, 4, 4, 25, 30])
    row = torch.repeat_interleave(torch.arange(4), ptr.diff())
    coef = torch.randn(30, heads, generator=g)
    up = torch.randn(4, heads, 150, generator=g)
    ours = [t.clone().to(DEVICE).requires_grad_() for t in (h, coef)]
    out = ops.gather_sum(ours[0], src.to(DEVICE), row.to(DEVICE), ours[1], ptr.to(DEVICE))
    out.backward(up.to(out))
    true = [t.double().requires_grad_() for t in (h, coef)]
    want = ops.gather_sum.reference(true[0], src, row, true[1], ptr)
    want.backward(up.to(dtype).double())
    loose = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for a, b in ((out, want), (ours[0].grad, true[0].grad), (ours[1].grad, true[1].grad)):
        assert float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm()) < loose


def table_case(dtype=torch.float32):
    """A block of fixed shape and features for it, with the same sums in plain torch."""
    graph = small_graph()
    sampler = make("graphsage", graph, [4]).to(DEVICE)
    block = sampler.sample(torch.arange(0, 16, 3), Padded.of(sampler))[0]
    assert block.slots
    x = torch.randn(16, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    return block, x, x.double()[block.n_id.cpu()][block.src.cpu()], block.dst.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_table_s_sums_scores_and_gradients(dtype):
    block, x, rows, dst = table_case(dtype)
    table = Features(x, DEVICE)
    g = torch.Generator().manual_seed(2)
    coef, v = torch.randn(block.num_edges, 2, generator=g), torch.randn(2, 70, generator=g)
    a, b = (t.clone().to(DEVICE).requires_grad_() for t in (coef, v))
    total, score = table.sum(block, a), table.dot(block, b)
    assert not bool(total[..., 70:].any())
    total = total[..., :70]
    c, d = (t.double().requires_grad_() for t in (coef, v))
    want = segment_sum(c.unsqueeze(-1) * rows.unsqueeze(1), dst, block.num_dst)
    want_score = rows @ d.t()
    up = torch.randn(want.shape, generator=g)
    (total * up.to(DEVICE)).sum().backward()
    (score.square() * 0.1).sum().backward()
    (want * up.double()).sum().backward()
    (want_score.square() * 0.1).sum().backward()
    for ours, true in ((total, want), (score, want_score), (a.grad, c.grad), (b.grad, d.grad)):
        assert float((ours.detach().cpu().double() - true.detach()).norm() / true.detach().norm()) < 1e-4
    norm = coef.double().square().sum(1) * rows.square().sum(1)
    assert torch.allclose(table.energies(block, a).cpu().double(), norm, rtol=1e-3, atol=1e-5)


def test_dropped_entries_are_the_same_in_every_read():
    block, _, _, dst = table_case()
    table = Features(torch.ones(16, 70), DEVICE)
    drop = table.drop(0.25)
    read = table.rows(block.n_id, drop).cpu()[:, :70]
    assert torch.allclose(read[read > 0], torch.tensor(1 / 0.75)) and 0.6 < float((read > 0).float().mean()) < 0.9
    total = table.sum(block, torch.ones(block.num_edges, 1, device=DEVICE), drop).squeeze(1).cpu()[:, :70]
    want = segment_sum(read[block.src.cpu()], dst, block.num_dst)
    assert torch.allclose(total, want, rtol=1e-5)


def test_rows_near_and_far_are_the_same_rows():
    block, x, _, _ = table_case()
    coef = torch.rand(block.num_edges, 1, device=DEVICE)
    whole, split = Features(x, DEVICE), Features(x, DEVICE, cache=5, often=torch.arange(16.0))
    assert torch.allclose(whole.sum(block, coef), split.sum(block, coef))
    near = float((block.n_id >= 11).float().mean())
    assert split.hit_rate() == pytest.approx(near) and split.hit_rate() == 1.0 and 0 < near < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("near", [0, 5])
def test_fetched_rows_are_the_table_s_to_the_bit(dtype, near):
    """Some of them from copies, the others read where they lie, in pinned memory on a GPU."""
    g = torch.Generator().manual_seed(0)
    table = ops.pinned(torch.randn(20, 3, 97, generator=g).to(dtype))
    kept, ids = torch.randperm(20, generator=g)[:near], torch.randint(20, (31,), generator=g)
    place = torch.full((20,), -1, dtype=torch.int32)
    place[kept] = torch.arange(near, dtype=torch.int32)
    copies = table[kept].to(DEVICE)
    found = ops.fetch(ids.to(DEVICE), table, copies, place.to(DEVICE))
    assert found.dtype == dtype and torch.equal(found.cpu(), table[ids])
    if near:  # and it is the copies that are read
        found = ops.fetch(ids.to(DEVICE), table, torch.zeros_like(copies), place.to(DEVICE)).cpu()
        assert not bool(found[place[ids] >= 0].any()) and torch.equal(found[place[ids] < 0], table[ids[place[ids] < 0]])


def test_full_sums_in_pieces(monkeypatch):
    from adahop.ops.summing import cuda

    monkeypatch.setattr(cuda, "LONG", 8)
    graph, nodes = small_graph(), torch.tensor([3, 0, 15, 3])
    for dtype in (torch.float32, torch.float16):
        h = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
        want = ops.full_sum.reference(h.float(), graph.edges, nodes)
        g = graph.to(DEVICE)
        ours = ops.full_sum(h.to(DEVICE), g.edges, nodes.to(DEVICE))
        assert torch.allclose(ours.cpu(), want, atol=1e-5)


def learned(method: str, monkeypatch, kernels: bool, steps: int = 3, **options):
    """The state of a policy after a few blocks and made-up energies; without kernels, numbered anew on the CPU."""
    if not kernels:
        monkeypatch.delenv("ADAHOP_TRITON")
        monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    sampler = make(method, small_graph(), [2, 2], **options)
    sampler = sampler.to(DEVICE) if kernels else sampler
    padded = Padded.of(sampler)
    assert (padded is not None) == kernels
    for _ in range(steps):
        blocks = sampler.sample(torch.arange(1, 16, 4), padded)
        told = [1e3 * (b.n_id[b.src] + 1.0) * (b.weight * b.scale).square() for b in blocks]
        sampler.update(blocks, told)
    if not kernels:
        monkeypatch.delenv("ADAHOP_REFERENCE")
        monkeypatch.setenv("ADAHOP_TRITON", "1")
    return {k: v.cpu() for k, v in sampler.policy.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"step": 0.9}, {"step": "paper"}, {"step": 30.0}])
def test_exp3_learns_what_the_reference_learns(monkeypatch, options):
    """A node that is a target several times over learns once; with the largest step, segments are brought back."""
    ours, true = (learned("bs", monkeypatch, kernels, steps=9 if options.get("step") == 30.0 else 2, **options)
                  for kernels in (True, False))  # fmt: skip
    assert float((true["arms.weight"] - 1).abs().max()) > 0
    for name, want in true.items():
        assert torch.allclose(ours[name].double(), want.double(), rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("draw", ["depround", "multinomial"])
def test_exp3_with_more_draws_than_a_kernel_compares(monkeypatch, draw):
    """90 draws of one target, each place once or some of them twice."""
    graph = Graph.from_edge_index([list(range(1, 201)), [0] * 200])
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setenv("ADAHOP_REFERENCE", "1")
            monkeypatch.delenv("ADAHOP_TRITON")
        sampler = make("bs.m", graph.to(DEVICE), [90], seed=1, draw=draw)
        with pytest.MonkeyPatch.context() as patch:  # both sides draw the reference's
            patch.setenv("ADAHOP_REFERENCE", "1")
            block = sampler.sample([0])[0]
        assert (block.pos.unique().numel() == 90) == (draw == "depround")
        sampler.update([block], [torch.linspace(0.1, 3.0, 90, device=block.pos.device)])
        found.append(sampler.policy.state_dict()["arms.weight"].cpu())
    assert float((found[1] - 1).abs().max()) > 0 and torch.allclose(*found, rtol=1e-4)


def test_tracked_learns_what_the_reference_learns(monkeypatch):
    """On draws that both sides share: uniform odds, so that the kernels' other way to draw plays no part."""
    ours, true = (learned("graphsage", monkeypatch, k, policy="tracked", eta=0.999) for k in (True, False))
    seen = (ours["visits"] > 0) & (true["visits"] > 0)
    assert seen.double().mean() > 0.15
    assert torch.allclose(ours["square"][seen], true["square"][seen], rtol=0.35)
    assert torch.allclose(ours["level"], true["level"], rtol=0.35)


@pytest.mark.parametrize("typed", [False, True])
def test_tracked_learns_from_numbered_blocks(monkeypatch, typed):
    """One block that both sides share, of a graph with relations too, where the state is by (relation, source)."""
    graph = typed_data().graph if typed else small_graph()
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setenv("ADAHOP_REFERENCE", "1")
            monkeypatch.delenv("ADAHOP_TRITON")
        sampler = make("graphsage", graph.to(DEVICE), [2, 3], policy="tracked", draw="systematic").to(DEVICE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ADAHOP_REFERENCE", "1")
            blocks = sampler.sample(torch.arange(0, 16, 2, device=DEVICE))
        for _ in range(2):
            told = [1e3 * (b.n_id[b.src] + 1.0) * (b.weight * b.scale).square() for b in blocks]
            sampler.update(blocks, told)
        found.append({k: v.cpu() for k, v in sampler.policy.state_dict().items()})
    ours, true = found
    assert int(true["visits"].max()) == 2
    for name in ("square", "visits", "level"):
        assert torch.allclose(ours[name].double(), true[name].double(), rtol=1e-4), name


# --- typed graphs ----------------------------------------------------------------------------------------------------


def typed_block(method: str, seeds=tuple(range(3, 40, 4)), **options):
    """A sampler over a typed graph, and a padded block of it in which some rows are none and some come twice."""
    sampler = make(method, typed_data().graph.normalized("row", False), [3, 2], seed=4, **options).to(DEVICE)
    seeds = torch.tensor(seeds, device=DEVICE)
    padded = Padded.of(sampler, seeds=seeds)
    assert padded is not None
    block = sampler.sample(seeds, padded)[0]
    assert bool((block.row == -1).any()) and block.row.unique().numel() < block.row.numel()
    return sampler, block


@pytest.mark.parametrize("how", ["multinomial", "systematic", "depround"])
@pytest.mark.parametrize("odds", ["uniform", "node"])
def test_rows_that_are_none_stay_empty(how, odds):
    """A draw over all rows of a typed hop, by kernels and by the reference."""
    sampler, block = typed_block("graphsage")
    g, node = sampler.graph, torch.rand(sampler.graph.num_sources, generator=torch.Generator().manual_seed(1)) + 0.1
    law = Odds() if odds == "uniform" else Odds(node=node.to(DEVICE), eta=0.05, shift=g.shift)
    blank = torch.arange(block.row.numel(), device=DEVICE) % 7
    rows, loops = ops.Rows(block.row), g.edges.loops
    ours, true = (
        f(g.edges, rows, blank, 3, loops, how, law, random.key(2)) for f in (ops.padded, ops.padded.reference)
    )
    none = (block.row == -1).repeat_interleave(3 + loops)
    assert not bool((ours.scale[none] != 0).any()) and bool((ours.prob[none] == 1).all())
    assert torch.equal(ours.n_id[ours.rows :].view(-1, 3)[block.row == -1], blank[block.row == -1, None].expand(-1, 3))
    wide = (-1, 3 + loops)
    assert torch.equal((ours.scale > 0).view(wide).sum(1), (true.scale > 0).view(wide).sum(1))
    if odds == "uniform" and how != "depround":
        assert torch.equal(ours.pos, true.pos) and torch.allclose(ours.scale, true.scale)
    elif how == "multinomial":
        assert (ours.pos == true.pos).double().mean() > 0.97


def first_copies(block):
    """The used slots of a padded block's rows, each row once and none that is none: (its rows, which slots)."""
    rows, slots = block.row.tolist(), block.slots
    keep = [t for t, row in enumerate(rows) if row >= 0 and rows.index(row) == t]
    used = torch.zeros(block.num_edges, dtype=torch.bool)
    for t in keep:
        used[t * slots : (t + 1) * slots] = block.scale[t * slots : (t + 1) * slots].cpu() > 0
    many = torch.stack([used[t * slots : (t + 1) * slots].sum() for t in keep])
    return torch.tensor(keep), used, ops.pointer(many)


def test_a_typed_bandit_learns_from_every_row_once():
    sampler, block = typed_block("bs")
    energy = torch.rand(block.num_edges, generator=torch.Generator().manual_seed(0)) * (block.scale.cpu() > 0)
    before = {k: v.clone().cpu() for k, v in sampler.policy.state_dict().items()}
    sampler.policy.update(0, block, energy.to(DEVICE))
    state = {k: v.cpu() for k, v in sampler.policy.state_dict().items()}
    other = make("bs", sampler.graph.to("cpu"), [3, 2])
    keep, used, ptr = first_copies(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAHOP_REFERENCE", "1")
        other.policy.load_state_dict(before)
        whole = block._replace(
            row=block.row.cpu()[keep], row_ptr=ptr, slots=0,
            **{k: getattr(block, k).cpu()[used] for k in ("pos", "prob", "scale")},
        )  # fmt: skip
        other.policy.update(0, whole, energy[used])
        again = make("bs", sampler.graph.to("cpu"), [3, 2])  # the reference knows slots, too
        here = [t.cpu() if torch.is_tensor(t) else t for t in block[:13]]
        again.policy.update(0, type(block)(*here), energy)
    want = other.policy.state_dict()
    for name, value in again.policy.state_dict().items():
        assert torch.allclose(want[name].double(), value.double(), rtol=1e-4), name
    assert float((want["arms.weight"] - 1).abs().max()) > 0.01
    for name, value in want.items():
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-3, atol=1e-5), name


def test_tracked_norms_of_relations_and_sources():
    """Of each (relation, source) the mean of what its messages said, over the rows of the block, each once."""
    sampler, block = typed_block("adahop")
    types, energy = sampler.graph.types, torch.rand(block.num_edges, generator=torch.Generator().manual_seed(0)) + 0.5
    sampler.policy.update(0, block, energy.to(DEVICE))
    keep, used, ptr = first_copies(block)
    used &= ~block.is_self().cpu()
    row = block.row.cpu().repeat_interleave(block.slots)[used]
    pair = (block.n_id[block.src].cpu()[used] + types.shift.cpu()[row]).tolist()
    factor = (block.weight * block.scale).cpu()[used]
    told: dict[int, list[float]] = {}
    for at, value in zip(pair, (energy[used] / factor.square()).tolist(), strict=True):
        told.setdefault(at, []).append(value)
    mean = {at: sum(values) / len(values) for at, values in told.items()}
    level = sum(mean.values()) / len(mean)
    square, visits = sampler.policy.square[0].cpu(), sampler.policy.visits[0].cpu()
    assert float(sampler.policy.level[0]) == pytest.approx(level, rel=1e-4)
    assert set(visits.nonzero().flatten().tolist()) == set(mean) and keep.numel() == ptr.numel() - 1
    for at, value in mean.items():
        assert float(square[at]) == pytest.approx(1.0 + 0.5 * (value / level - 1.0), rel=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAHOP_REFERENCE", "1")
        again = make("adahop", sampler.graph.to("cpu"), [3, 2])
        again.policy.update(0, type(block)(*[t.cpu() if torch.is_tensor(t) else t for t in block[:13]]), energy)
    assert torch.allclose(again.policy.square[0], square, rtol=1e-4)
    assert torch.equal(again.policy.visits[0], visits)


def test_tracked_norms_of_a_compact_typed_block():
    """More rows than (relation, source) pairs: a row, not a source, is what learns once."""
    sampler = make("adahop", typed_data().graph.normalized("row", False), [1], seed=4).to(DEVICE)
    (block,) = sampler.sample(torch.arange(0, 40, device=DEVICE))
    pairs = block.n_id[block.src] + sampler.graph.types.shift[block.row].repeat_interleave(block.row_ptr.diff())
    assert block.row.numel() > pairs.unique().numel() + 1
    energy = torch.rand(block.num_edges, generator=torch.Generator().manual_seed(0)) + 0.5
    sampler.policy.update(0, block, energy.to(DEVICE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAHOP_REFERENCE", "1")
        again = make("adahop", sampler.graph.to("cpu"), [1])
        again.policy.update(0, type(block)(*[t.cpu() if torch.is_tensor(t) else t for t in block[:13]]), energy)
    assert torch.equal(sampler.policy.visits.cpu(), again.policy.visits)
    assert torch.allclose(sampler.policy.square.cpu(), again.policy.square, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "method"), [("rgcn", "graphsage"), ("rgat", "graphsage"), ("rgcn", "s-gcn"), ("rgcn", "adahop")]
)
def test_typed_steps_are_the_cpu_s_steps(monkeypatch, model, method):
    """Draws by uniform odds are equal, so the losses are."""
    options = {"model": model, "method": method, "tf32": False, "noise": 0.0, "data": typed_data()}
    if method == "adahop":
        options["method_options"] = {"policy": "uniform", "draw": "systematic"}  # by itself the CPU would share sources
    ours, true = (losses(k, monkeypatch, **options) for k in (True, False))
    assert len(ours) == 3 and ours == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize("method", ["bs", "adahop"])
def test_typed_steps_learn(monkeypatch, method):
    """Two epochs of a learned policy on padded blocks: energies reach it, and the losses stay those of training."""
    out = losses(True, monkeypatch, epochs=2, model="rgcn", method=method, noise=0.0, data=typed_data())
    assert len(out) == 6 and all(0 < loss < 3 for loss in out)


@on_cuda
@pytest.mark.parametrize("model", ["rgcn", "rgat"])
@pytest.mark.parametrize("method", ["graphsage", "bs", "adahop", "s-gcn"])
def test_captured_typed_steps_are_the_eager_steps(monkeypatch, method, model):
    if model == "rgat" and method in ("adahop", "s-gcn"):
        pytest.skip("attention over all neighbours has no fixed shape")
    options = {"epochs": 3, "dropout": 0.1, "method": method, "model": model, "noise": 0.0}
    one, other = (losses(True, monkeypatch, capture_it=c, data=typed_data(), **options) for c in (True, False))
    assert one == pytest.approx(other, rel=1e-3)


@on_cuda
def test_learnt_rows_of_a_typed_graph_run_eagerly():
    data = typed_data(bare=True)
    data.to = lambda device: moved(data, device)
    with pytest.warns(UserWarning, match="cannot be captured .* learnt rows"):
        result = fit(
            data, model="rgcn", method="graphsage", sizes=(2, 2), hidden=8, epochs=2, device="cuda", capture=True
        )
    assert result.epochs == 2


# --- steps -----------------------------------------------------------------------------------------------------------


def losses(
    kernels: bool,
    monkeypatch,
    epochs: int = 1,
    capture_it: bool = False,
    dropout: float = 0.0,
    data=None,
    rooms: bool = False,
    **options,
):
    if not kernels:
        monkeypatch.delenv("ADAHOP_TRITON")
    config = Config(sizes=(2, 2), hidden=8, batch_size=7, dropout=dropout, epochs=epochs, **options,
                    device=DEVICE if kernels else "cpu")  # fmt: skip
    torch.manual_seed(0)
    data = toy_data(nodes=30) if data is None else data
    data.to = lambda device: moved(data, device)
    run = Run(data, config, 0)
    if not kernels:
        out = [float(train.train_step(run.model, run.sampler, run.optimizer, b)) for b in run.loader]
        monkeypatch.setenv("ADAHOP_TRITON", "1")
        return out
    if run.features is None:
        run.padded = Padded.of(run.sampler, bare=True, seeds=run.loader.nodes)
        assert run.padded is not None
        run.features = device_features(run.data.x, run.sampler, config)
    steps = capture.DeviceSteps(run, capture_it)
    if rooms:  # as steps are before a capture, in the captured shape

        def aside(seeds, blocks=None, room=None):
            with steps.rooms.within(room):
                return steps.step(seeds) if blocks is None else steps.rest(seeds, blocks)

        monkeypatch.setattr(capture, "WARM", 1 << 30)
        steps.capture, steps.aside = True, aside
    out = [float(loss) for _ in range(epochs) for loss, _ in steps]
    assert not rooms or steps.rooms.edges
    assert not capture_it or len(steps.recorded) > 1
    return out


def moved(data, device):
    parts = {k: v.to(device) if hasattr(v, "to") else v for k, v in vars(data).items() if k != "to"}
    return SimpleNamespace(**parts)


@pytest.mark.parametrize("model, arch", EACH)
def test_steps_are_the_cpu_s_steps(monkeypatch, model, arch):
    """Uniform draws are equal, so the losses are, whatever the blocks' shape."""
    ours, true = (losses(k, monkeypatch, model=model, arch=arch, method="graphsage", tf32=False) for k in (True, False))
    assert ours == pytest.approx(true, rel=2e-3)


def one_head(model: str) -> dict:
    """Of several heads a GPU knows the mean of the squared norms, so that energies agree for one."""
    return {"model_options": {"heads": 1}} if model == "gat" else {}


@pytest.mark.parametrize("model, arch", EACH)
def test_renewed_energies_are_the_cpu_s(monkeypatch, model, arch):
    """Uniform draws are equal, so every edge has the same message on both; a GPU's is known from its source's norm."""
    data, heard = toy_data(nodes=30), []
    data.to = lambda device: moved(data, device)
    for device, kernels in ((DEVICE, True), ("cpu", False)):
        if not kernels:
            monkeypatch.delenv("ADAHOP_TRITON")
        torch.manual_seed(0)
        config = Config(model=model, arch=arch, method="bs", method_options={"policy": "uniform"}, sizes=(2, 2),
                        hidden=8, dropout=0.0, tf32=False, device=device, **one_head(model))  # fmt: skip
        run = Run(data, config, 0)
        blocks = run.sampler.sample(torch.arange(9, device=device))
        run.model.eval()
        batch = SimpleNamespace(blocks=blocks, x=run.data.x[blocks[0].n_id])
        if kernels:
            batch.features = Features(run.data.x, device)
            batch.features.renew(run.model.first_norms)
        with watch(run.model) as energy:
            run.model(batch)
        heard.append(energy[0].cpu())
    ours, true = heard
    assert torch.allclose(ours, true, rtol=1e-3)


@on_cuda
def test_a_probe_looks_at_a_captured_run():
    """It may ask for all neighbours, which has no fixed shape, and the run goes on as if nobody had looked."""
    from adahop import load
    from adahop.diagnostics import Probe

    data, options = load("digits"), {"method": "bs", "sizes": (3, 3), "epochs": 3, "device": "cuda", "capture": True}
    probe = Probe(data, every=5, against=("uniform", "oracle"), gradient=True)
    seen, alone = fit(data, **options, probe=probe), fit(data, **options)
    assert len(probe.rows) >= 4 and all(0.2 < row["over_oracle"] < 5 for row in probe.rows)
    assert [h["loss"] for h in seen.history] == pytest.approx([h["loss"] for h in alone.history], rel=1e-3)


def test_memories_too(monkeypatch):
    ours, true = (losses(k, monkeypatch, method="s-gcn", tf32=False) for k in (True, False))
    assert ours == pytest.approx(true, rel=2e-3)


def test_steps_in_a_room_are_the_steps_as_they_come(monkeypatch):
    """All neighbours in a shape that can be captured; the draws are equal, so the losses are."""
    one, other = (losses(True, monkeypatch, rooms=r, method="adahop", model="gat", tf32=False) for r in (True, False))
    assert one == pytest.approx(other, rel=1e-3)


@on_cuda
@pytest.mark.parametrize("model", ["gcn", "gat", "gatv2"])
@pytest.mark.parametrize("method", ["graphsage", "bs", "bs.m", "adahop", "s-gcn"])
def test_captured_steps_are_the_eager_steps(monkeypatch, method, model):
    """Three epochs with a last smaller batch, and dropout, whose seeds come from the same generator; where all
    neighbours are read, dropout's numbers depend on the room for them, so there is none."""
    dropout = 0.0 if model != "gcn" and method in ("adahop", "s-gcn") else 0.1
    one, other = (losses(True, monkeypatch, epochs=3, capture_it=c, dropout=dropout, method=method, model=model)
                  for c in (True, False))  # fmt: skip
    assert one == pytest.approx(other, rel=1e-3)


@on_cuda
@pytest.mark.parametrize("broken", [False, True])
def test_what_cannot_be_captured_is_said_once_and_runs(monkeypatch, broken):
    """A step known to have no fixed shape, and one that breaks its capture off; both are the eager run."""
    data = toy_data(nodes=50)
    data.to = lambda device: moved(data, device)
    if broken:  # numbers as they come ask the host for their size
        monkeypatch.setattr(ops, "relabel_within", lambda *ends: ops.relabel(*ends[:2], torch.empty(ends[2])))
    else:
        monkeypatch.setattr(AllNeighboursSum, "takes_capacity", False)
    options = {"method": "adahop", "model": "gat", "sizes": (3, 3), "hidden": 8, "batch_size": 16, "epochs": 4}
    with pytest.warns(UserWarning, match="cannot be captured") as said:
        result = fit(data, **options, device="cuda", capture=True)
    assert len([w for w in said if "captured" in str(w.message)]) == 1 and result.epochs == 4
    eager = fit(data, **options, device="cuda", capture=False)
    assert [row["loss"] for row in result.history] == pytest.approx([row["loss"] for row in eager.history], rel=2e-2)


@on_cuda
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("model", ["gcn", "gat", "geniepath"])
def test_every_method_runs_on_the_device(monkeypatch, method, model):
    monkeypatch.delenv("ADAHOP_TRITON")
    if model not in METHODS[method].models:
        pytest.skip("the method does not serve this model")
    data = toy_data(nodes=120)
    data.to = lambda device: moved(data, device)
    sizes = (30, 30) if METHODS[method].family == "layer-wise" else (3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(data, method=method, model=model, sizes=sizes, hidden=8, batch_size=32, epochs=2, device="cuda")
    assert result.epochs == 2 and result.history[-1]["loss"] < 3


def test_padded_blocks_leave_the_sampler_as_it_was():
    """The shape is asked for batch by batch: a later plain batch has each node once and the user's edge ids."""
    graph = messy_graph(nodes=16, edges=150)
    assert graph.eid is not None
    sampler = make("bs", graph, [2, 3]).to(DEVICE)
    seeds = torch.arange(0, 16, 3)
    padded = sampler.sample(seeds, Padded.of(sampler, bare=True))
    assert all(b.slots for b in padded)
    edge_index = graph.edge_index()
    for block in sampler.sample(seeds):
        ends = torch.stack([block.n_id[block.src], block.n_id[block.dst]]).cpu()
        assert block.slots == 0 and torch.equal(edge_index[:, block.e_id.cpu()], ends)
        assert block.n_id.unique().numel() == block.num_src


@pytest.mark.parametrize("how", ["multinomial", "systematic", "depround"])
@pytest.mark.parametrize("form", ["uniform", "node"])
def test_clipped_and_shifted_rows(how, form):
    """Places outside since..until never come; a shift reads other numbers of the sources."""
    graph = small_graph()
    rows = torch.arange(16)
    since = graph.first + 1
    until = graph.first + (graph.last - graph.first) * 3 // 4
    node = torch.rand(32, generator=torch.Generator().manual_seed(1)) + 0.1
    shift = torch.where(rows % 2 == 0, 0, 16)
    odds = Odds() if form == "uniform" else Odds(node=node, eta=0.05, shift=shift)
    key = random.key(3)
    clipped = ops.Rows(rows, since=since, until=until)
    want = ops.draw.reference(graph.edges, clipped, torch.tensor([3]), how, odds, key)
    g, here = graph.to(DEVICE), Odds(*(t.to(DEVICE) if torch.is_tensor(t) else t for t in odds))
    there = ops.Rows(*(t.to(DEVICE) if torch.is_tensor(t) else t for t in clipped))
    d = ops.draw(g.edges, there, torch.tensor([3], device=DEVICE), how, here, key)
    pos, row = d.pos.cpu(), torch.repeat_interleave(rows, d.ptr.diff().cpu())
    assert torch.equal(d.ptr.cpu(), want.ptr)
    loop = pos < graph.first[row]
    assert bool((loop | ((pos >= since[row]) & (pos < until[row]))).all())
    shared = dict(zip(want.pos.tolist(), want.prob.tolist(), strict=True))
    assert all(
        q == pytest.approx(shared[p], rel=1e-4)
        for p, q in zip(pos.tolist(), d.prob.tolist(), strict=True)
        if p in shared
    )
    if form == "uniform" and how != "depround":
        assert torch.equal(pos, want.pos)

"""Steps of a fixed shape for estimators that read all neighbours: the same steps, nothing read back to the host."""

from __future__ import annotations

import pytest
import torch

from adahop import capture, ops
from adahop.capture import DeviceSteps, Rooms
from adahop.config import Config
from adahop.features import Features
from adahop.run import Run
from adahop.samplers.loop import Padded
from conftest import messy_graph, toy_data
from elsewhere import ELSEWHERE, pretended

ESTIMATORS = ["exact+sums", "exact+history", "exact+scores", "history"]


@pytest.fixture(autouse=True)
def padded(monkeypatch):
    """Blocks have a fixed shape on any device, and no step is captured."""
    monkeypatch.setattr(ops, "pads", lambda at: True)
    monkeypatch.setattr(capture, "WARM", 1 << 30)


def steps_of(model: str, estimator: str, dropout: float = 0.0, method: str = "adahop") -> DeviceSteps:
    torch.manual_seed(0)
    data = toy_data(nodes=30)
    config = Config(model=model, method=method, estimator=estimator, sizes=(2, 2), hidden=8, batch_size=7,
                    dropout=dropout, noise=0.0)  # fmt: skip
    run = Run(data, config, 0)
    run.padded = Padded.of(run.sampler, bare=True)
    assert run.padded is not None
    run.features = Features(run.data.x, "cpu")
    return DeviceSteps(run, capture=False)


def in_rooms(steps: DeviceSteps) -> DeviceSteps:
    """The steps as they are before a capture, in the captured shape, one by one."""

    def aside(seeds, blocks=None, room=None):
        with steps.rooms.within(room):
            return steps.step(seeds) if blocks is None else steps.rest(seeds, blocks)

    steps.capture, steps.aside = True, aside
    return steps


def losses(steps: DeviceSteps, epochs: int = 3) -> list[float]:
    return [float(loss) for _ in range(epochs) for loss, _ in steps]


def test_all_in_edges_and_some_more():
    """Those of `in_edges`, then added ones of scale 0, each the last edge of its target, which no `ptr` leads to."""
    graph = messy_graph()
    nodes = torch.tensor([3, 59, 7, 3, 0, 58])  # a hub twice, and nodes without edges, one at the end
    plain = graph.in_edges(nodes)
    for room in (plain.num_edges, plain.num_edges + 40):
        ours, m = graph.in_edges_within(nodes, room), plain.num_edges
        assert ours.num_edges == room and torch.equal(ours.ptr, plain.ptr) and torch.equal(ours.targets, nodes)
        for name in ("e_id", "weight", "scale", "pos", "prob"):
            assert torch.equal(getattr(ours, name)[:m], getattr(plain, name)), name
        assert torch.equal(ours.edge_index[:, :m], plain.edge_index) and not bool(ours.scale[m:].any())
        met = plain.ptr.diff()[ours.dst[m:]] > 0
        assert torch.equal(ours.src[m:][met], plain.src[plain.ptr[1:][ours.dst[m:]] - 1][met])
    assert bool(met.any()) and not bool(met.all())


def test_too_little_room_reads_nothing_outside():
    ours = messy_graph().in_edges_within(torch.tensor([3, 7]), 10)
    assert ours.num_edges == 10 and ours.ptr.tolist() == [0, 10, 10]


def test_numbers_in_a_fixed_shape():
    g = torch.Generator().manual_seed(0)
    for many in (0, 3, 50):
        dst, src = torch.randint(20, (6,), generator=g), torch.randint(20, (many,), generator=g)
        n_id, local = ops.relabel(dst, src, torch.full((20,), -1, dtype=torch.int32))
        ids, same = ops.relabel_within(dst, src, 20)
        assert len(ids) == 6 + min(many, 20) and torch.equal(same, local)
        assert torch.equal(ids[: len(n_id)], n_id) and not bool(ids[len(n_id) :].any())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("model", ["gat", "gatv2", "geniepath"])
def test_steps_in_a_room_are_the_steps(model, estimator):
    plain, ours = steps_of(model, estimator), in_rooms(steps_of(model, estimator))
    want = losses(plain)
    assert losses(ours) == pytest.approx(want, rel=1e-4)
    assert len(ours.rooms.edges) == 2  # whole batches and the last of an epoch
    for one, other in zip(plain.run.model.parameters(), ours.run.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
    state, same = (s.run.sampler.policy.state_dict() for s in (plain, ours))
    close = [torch.allclose(state[k].double(), same[k].double(), rtol=1e-2) for k in state]  # of small differences
    assert all(close) and len(close) > 2


def test_with_dropout_the_room_plays_no_part():
    """The same random numbers, whatever the room: rows are dropped node by node, and there are as many in each."""
    found = []
    for more in (1.5, 3.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capture, "MORE", more)
            found.append(losses(in_rooms(steps_of("gat", "exact+sums", dropout=0.3))))
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(set(found[0])) == len(found[0])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_step_in_a_room_reads_nothing_back(monkeypatch, estimator, dropout):
    """What a CUDA graph asks of it: between the draw and the next step the host neither waits nor copies. The update of
    the norms is a kernel of its own on a GPU and is left out."""
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    monkeypatch.setattr(ops, "track", lambda *given: False)
    here = steps_of("gat", estimator, dropout)
    with pretended() as reads:
        steps = on(here, ELSEWHERE)
        seeds = torch.arange(7, device=ELSEWHERE)
        for at in range(3):
            blocks = steps.draw(seeds)
            assert steps.rooms.hold(7, steps.rooms.needed(blocks)) == (at > 0)
            reads.clear()
            with steps.rooms.within(7):
                loss = steps.rest(seeds, blocks)
            assert not reads and loss.device == ELSEWHERE
        steps.rest(seeds, blocks)
        assert reads["size"] + reads["number"] > 0  # as it comes it cannot be captured


def on(steps: DeviceSteps, device: torch.device) -> DeviceSteps:
    """A run with all its parts on another device."""
    run = steps.run
    run.data.y = run.data.y.to(device)
    run.model.to(device)
    run.sampler.to(device)
    run.padded = Padded.of(run.sampler, bare=True)
    run.features = Features(run.data.x, device)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
    return DeviceSteps(run, capture=False)


class Never:
    """A captured graph that must not be replayed."""

    def replay(self) -> None:
        raise AssertionError("replayed")


class Counted:
    def __init__(self) -> None:
        self.times = 0

    def replay(self) -> None:
        self.times += 1


def test_a_step_that_needs_more_room_runs_as_it_comes():
    """On the blocks that the captured draw has drawn; then the step is captured anew, with more room."""
    plain, ours = (steps_of("gat", "exact+sums", method="bs") for _ in range(2))
    seeds = ours.nodes[:7]
    want = float(plain.step(seeds))
    ours.capture, blocks, draw = True, ours.draw(seeds), Counted()
    ours.rooms.edges[7] = [1, 1]
    ours.recorded[7] = capture.CapturedStep(Never(), seeds.clone(), torch.zeros(()), draw, blocks)
    assert float(ours.take(seeds)) == pytest.approx(want) and draw.times == 1
    assert 7 not in ours.recorded and ours.rooms.hold(7, ours.rooms.needed(blocks))


def test_a_step_with_room_is_replayed():
    ours = steps_of("gat", "exact+sums", method="bs")
    seeds, draw, graph = ours.nodes[:7], Counted(), Counted()
    blocks, ours.capture = ours.draw(seeds), True
    ours.rooms.hold(7, ours.rooms.needed(blocks))
    ours.recorded[7] = capture.CapturedStep(graph, torch.zeros_like(seeds), torch.tensor(5.0), draw, blocks)
    assert float(ours.take(seeds)) == 5.0 and (draw.times, graph.times) == (1, 1)
    assert torch.equal(ours.recorded[7].seeds, seeds)


def drawn_outside() -> tuple[DeviceSteps, torch.Tensor, list]:
    """The preset's: its policy looks at all neighbours to draw, so that the draw is no part of what is captured."""
    ours = steps_of("gat", "exact+sums")
    assert ours.run.sampler.draw_syncs
    seeds = ours.nodes[:7]
    ours.capture, blocks = True, ours.draw(seeds)
    return ours, seeds, blocks


def test_a_draw_outside_of_what_is_captured_is_copied_in():
    ours, seeds, blocks = drawn_outside()
    ours.rooms.hold(7, ours.rooms.needed(blocks))
    empty = [capture._copy_of(b) for b in blocks]
    for block in empty:
        block.n_id.zero_()
    graph = Counted()
    ours.recorded[7] = capture.CapturedStep(graph, torch.zeros_like(seeds), torch.tensor(5.0), None, empty)
    ours.run.sampler.step -= 1  # the same draw once more
    assert float(ours.take(seeds)) == 5.0 and graph.times == 1
    kept = ours.recorded[7]
    assert torch.equal(kept.seeds, seeds)
    assert all(torch.equal(a.n_id, b.n_id) and torch.equal(a.scale, b.scale)
               for a, b in zip(kept.blocks, blocks, strict=True))  # fmt: skip


def test_a_draw_outside_that_needs_more_room():
    ours, seeds, blocks = drawn_outside()
    in_rooms(ours).rooms.edges[7] = [1, 1]
    ours.recorded[7] = capture.CapturedStep(Never(), seeds.clone(), torch.zeros(()), None, blocks)
    assert 0 < float(ours.take(seeds)) < 5 and 7 not in ours.recorded and ours.rooms.edges[7] == [256, 256]


def test_attended_draws_in_slots_are_its_draws(monkeypatch):
    """Of each target the same places with the same probabilities, weights of the graph, and empty slots of scale 0."""
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")  # forms of a draw by weights take edges in other orders
    steps = steps_of("gat", "exact+sums")
    sampler, seeds = steps.run.sampler, torch.arange(0, 30, 2)
    sampler.policy.square[1].uniform_(0.5, 2.0)
    plain = sampler.sample(seeds)[1]
    sampler.step -= 1
    block = sampler.sample(seeds, Padded.of(sampler))[1]
    used = block.scale > 0
    assert block.slots and torch.equal(used.view(15, -1).sum(1), plain.ptr.diff()) and not bool(used.all())
    assert torch.equal(block.pos[used], plain.pos) and torch.allclose(block.prob[used], plain.prob)
    assert torch.allclose(block.scale[used], plain.scale) and torch.equal(block.weight[used], plain.weight)
    assert torch.equal(block.n_id[block.src][used], plain.n_id[plain.src]) and not bool(block.weight[~used].any())


def test_room_grows_by_what_was_needed():
    rooms = Rooms(steps_of("gat", "exact+sums").run.model)
    assert len(rooms.sums) == 2
    assert not rooms.hold(7, [1000, 10]) and rooms.edges[7] == [1280, 256]  # a quarter more, in steps of 256
    assert rooms.hold(7, [1280, 12]) and rooms.edges[7] == [1280, 256]
    assert not rooms.hold(7, [5000, 12]) and rooms.edges[7] == [6400, 256]
    assert not rooms.hold(3, [1, 1])  # another size of batch has rooms of its own


def test_a_sum_without_all_neighbours_needs_no_room():
    assert not Rooms(steps_of("gcn", "exact+snapshot").run.model).sums

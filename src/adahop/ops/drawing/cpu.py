"""Draws on the CPU: numpy views of the tensors, numba kernels over ranges of rows in threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from adahop.ops.buffers import empty
from adahop.ops.drawing import cpu_hop, cpu_labor, cpu_prefix, cpu_scan, cpu_tree
from adahop.ops.drawing.reference import SURE
from adahop.ops.numbering import cpu as numbering
from adahop.ops.threads import cuts, get_threads, over, parts, relay
from adahop.ops.types import (
    DRAWS,
    NO_PLACES,
    NO_WEIGHTS,
    Drawn,
    Edges,
    Near,
    Numbered,
    Odds,
    Plan,
    Prefix,
    Rows,
    plain_odds,
)

NO_RELATIONS = np.empty(0, np.bool_)
FEW = 8  # relations of a target for which there is room rather than a count of its rows
Where = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def target_rows(ptr: Tensor, relation: Tensor, nodes: Tensor, only: Tensor | None = None, most: int = 0) -> Rows:
    where, of, kinds = ptr.numpy(), nodes.numpy(), relation.numpy()
    room = len(of) * most if 0 < most <= FEW else cpu_scan.count_targets(where, of)  # type: ignore[call-arg]
    bounds, out = empty((len(of) + 1,), np.int64), empty((3, room), np.int64)
    drawn = NO_RELATIONS if only is None else only.numpy()
    many = cpu_scan.list_targets(where, kinds, of, drawn, bounds, out[0], out[1], out[2])
    row, target, kind = torch.from_numpy(out)[:, :many]
    return Rows(row, nodes, target, relation=kind, ptr=torch.from_numpy(bounds))


def extents(edges: Edges, rows: Rows, ks: np.ndarray = NO_PLACES, ptr: np.ndarray = NO_PLACES) -> Where:
    """(start, size, begin, loops) per row, and with `ptr` the pointer of what is drawn, see `cpu_scan.extents`."""
    out = empty((4, rows.row.numel()), np.int64)
    where = (out[0], out[1], out[2], out[3])
    clips = (NO_PLACES if t is None else t.numpy() for t in (rows.since, rows.until))
    cpu_scan.extents(*edges.arrays[:3], rows.row.numpy(), *clips, ks, where, ptr)  # type: ignore[call-arg]
    return where


def unclipped(rows: Rows) -> bool:
    """Whether rows are drawn from whole."""
    return rows.since is None and rows.until is None


def alike(odds: Odds, how: str) -> bool:
    """Whether all neighbours are, so that nothing must be read to draw some."""
    return odds.edge is None and odds.node is None and how != "poisson"


def usable(odds: Odds, rows: Rows, how: str) -> Odds:
    """The odds with those of their sums that such draws go by; sums that are kept are those of whole rows."""
    whole = unclipped(rows)
    by_prefix = odds.prefix is not None and whole and how in ("systematic", "multinomial")
    by_tree = odds.tree is not None and odds.edge is not None and whole and how == "multinomial" and not by_prefix
    if by_prefix:
        return odds._replace(tree=None)
    return plain_odds(odds)._replace(tree=odds.tree if by_tree else None)


def hop(
    edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int, scratch: Tensor, known: bool
) -> tuple[Drawn, Numbered]:
    n, size, odds = rows.row.numel(), int(k[0]) if k.numel() == 1 else -1, usable(odds, rows, how)
    plain, summed = alike(odds, how), odds.prefix is not None or odds.tree is not None
    simple = size >= 0 and unclipped(rows) and (plain or summed)
    most = n * (size + edges.loops) if simple else 0
    if not simple or (plain and parts(n, most) > 1):
        ready = plan(edges, rows, k, how, odds, key)
        return ready.drawn, numbering.number(rows.targets, ready, edges, rows.target, scratch, known)
    marks = scratch.numpy()
    try:
        if plain:
            return _uniform_hop(edges, rows, size, how, key, marks, known, most)
        return _learned_hop(edges, rows, k.numpy(), how, odds, key, marks, known, most)
    except BaseException:
        marks.fill(-1)
        raise


def _uniform_hop(
    edges: Edges, rows: Rows, k: int, how: str, key: int, marks: np.ndarray, known: bool, most: int
) -> tuple[Drawn, Numbered]:
    dst, of, target = _targets(rows)
    ptr, n_id, out = _hop_room(edges, rows, most)
    m, nodes = cpu_hop.uniform_hop(dst, of, target, edges.arrays, k, DRAWS[how], key, known, marks, ptr, *out, n_id)
    return _hop(m, nodes, ptr, n_id, out)


def _learned_hop(
    edges: Edges, rows: Rows, ks: np.ndarray, how: str, odds: Odds, key: int, marks: np.ndarray, known: bool, most: int
) -> tuple[Drawn, Numbered]:
    """In parts where there are threads: the first is numbered as it is drawn, the others after it."""
    dst, of, target = _targets(rows)
    ptr, n_id, out = _hop_room(edges, rows, most)
    where, nodes = tuple(empty((len(of),), np.int64) for _ in range(4)), len(dst)
    cpu_hop.open_hop(dst, of, edges.arrays, ks, known, marks, where, ptr, n_id)
    prefix, wide = (None, None) if odds.prefix is None else _prefix(odds.prefix)
    tree = None if odds.tree is None else tuple(t.numpy() for t in odds.tree)
    by = (DRAWS[how], key, _odds(odds), prefix, wide, tree)
    given = (of, target, edges.arrays, where, ks, *by, marks, ptr, *out, n_id)

    def here(lo: int, hi: int) -> None:
        nonlocal nodes
        nodes = cpu_hop.learned_rows(lo, hi, nodes, *given)

    def there(lo: int, hi: int) -> None:
        cpu_hop.learned_rows(lo, hi, -1, *given)

    def name(lo: int, hi: int) -> None:
        nonlocal nodes
        nodes = numbering.name_sources(ptr[lo], ptr[hi], out[1], marks, n_id, nodes)

    relay(here, there, name, cuts(len(of), ptr))
    return _hop(int(ptr[-1]), nodes, ptr, n_id, out)


def _targets(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets, rows, and whose each row is where that is not the t-th target's."""
    return rows.targets.numpy(), rows.row.numpy(), NO_PLACES if rows.target is None else rows.target.numpy()


def _hop_room(edges: Edges, rows: Rows, most: int) -> tuple[np.ndarray, np.ndarray, tuple]:
    """ptr, n_id, and (pos, ends, e_id, (weight, prob, scale)) of up to `most` edges."""
    pos, chance = empty((most,), np.int64), tuple(empty((most,), np.float32) for _ in range(3))
    e_id = pos if edges.eid is None else empty((most,), np.int64)
    n_id = empty((rows.targets.numel() + most + 1,), np.int64)
    return empty((rows.row.numel() + 1,), np.int64), n_id, (pos, empty((2 * most,), np.int64), e_id, chance)


def _hop(m: int, nodes: int, ptr: np.ndarray, n_id: np.ndarray, out: tuple) -> tuple[Drawn, Numbered]:
    pos, ends, e_id, (w, prob, scale) = out
    drawn = Drawn(*map(torch.from_numpy, (ptr, pos[:m], prob[:m], scale[:m])))
    found = map(torch.from_numpy, (n_id[:nodes], ends[: 2 * m].reshape(2, m), e_id[:m], w[:m]))
    return drawn, Numbered(*found)


def plan(edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int) -> Plan:
    n, of, ks, odds = rows.row.numel(), rows.row.numpy(), k.numpy(), usable(odds, rows, how)
    ptr = empty((n + 1,), np.int64)
    where = extents(edges, rows, ks, ptr)
    work = ptr
    kernel: Callable = cpu_scan.uniform_rows
    given: tuple = (of, where, ptr, ks, DRAWS[how], key)
    if odds.tree is not None and odds.edge is not None:
        tree = tuple(t.numpy() for t in (odds.edge, *odds.tree))
        kernel, given = cpu_tree.tree_rows, (*given[:4], key, odds.eta, tree)
    elif odds.prefix is not None:
        kernel, given = cpu_prefix.prefix_rows, (*given, _odds(odds), edges.arrays[3], *_prefix(odds.prefix))
    elif not alike(odds, how):
        kernel, given = cpu_scan.weighted_rows, (*given, _odds(odds), edges.arrays[3])
        work = np.concatenate([[0], np.cumsum(where[1] + 16)])
        if how == "poisson" or odds.eta == 0.0:  # who takes part is known only when the odds are
            over(cpu_scan.count_rows, n, *given, work=work)
            np.cumsum(ptr, out=ptr)
    m = int(ptr[-1])
    out = empty((m,), np.int64), empty((m,), np.float32), empty((m,), np.float32)

    def fill(lo: int, hi: int) -> None:
        kernel(lo, hi, *given, out)

    return Plan(Drawn(*map(torch.from_numpy, (ptr, *out))), fill, work)


def draw(edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int) -> Drawn:
    ready = plan(edges, rows, k, how, odds, key)
    over(ready.fill, rows.row.numel(), work=ready.work)
    return ready.drawn


def _odds(odds: Odds) -> tuple:
    """(edge, node, eta, shift, root) as the kernels take them."""
    edge, node = (NO_WEIGHTS if t is None else t.numpy() for t in (odds.edge, odds.node))
    return edge, node, odds.eta, NO_PLACES if odds.shift is None else odds.shift.numpy(), odds.root


def _prefix(prefix: Prefix) -> tuple[tuple[np.ndarray, np.ndarray], int | None]:
    """Tables as kernels take them, and edges per sum: None for one."""
    return (prefix.table.numpy().view(np.uint32), prefix.upto.numpy()), None if prefix.wide == 1 else prefix.wide


def visit(row: Tensor, ptr: Tensor, edges: Edges, often: int, once: bool, odds: Odds, prefix: Prefix) -> None:
    begin, first, last, indices, _, _ = edges.arrays
    ((table, upto), wide), by = _prefix(prefix), _odds(odds)
    due, ks, work = (empty((len(row) + 1,), np.int64) for _ in range(3))
    drawn = row.numpy(), ptr.numpy(), begin, first, last, often
    if get_threads() == 1:
        cpu_prefix.visit_and_renew(*drawn, once, indices, by, table, upto, wide, due, ks, work)
        return
    many = cpu_prefix.visit(*drawn, once, upto, due, ks, work)
    given = (due, ks, first, last, indices, by, table, upto, wide)
    over(cpu_prefix.renew, many, *given, work=work, light=cpu_prefix.LIGHT)


def renew(rows: Tensor, k: Tensor, edges: Edges, odds: Odds, prefix: Prefix) -> None:
    _, first, last, indices, _, _ = edges.arrays
    of, ks = rows.numpy(), k.numpy()
    work = np.concatenate([[0], np.cumsum(last[of] - first[of])])
    tables, wide = _prefix(prefix)
    given = (of, ks, first, last, indices, _odds(odds), *tables, wide)
    over(cpu_prefix.renew, len(of), *given, work=work, light=cpu_prefix.LIGHT)


def labor(edges: Edges, rows: Rows, k: Tensor, refine: int, nodes: int, key: int) -> Drawn:
    n, ks, ids = rows.row.numel(), k.numpy(), edges.indices.numpy()
    where, ptr = extents(edges, rows), np.zeros(n + 1, np.int64)
    start, size, _, loops = where
    word, many = np.concatenate([[0], np.cumsum(-(-size // cpu_labor.MANY))]), np.empty(n, np.int64)
    bits, mark, odds = np.empty(int(word[-1]), np.uint64), cpu_labor.mark, (np.empty(0), np.empty(0))
    if refine:
        mark, odds = cpu_labor.mark_refined, _refined(ids, start, size, ks, refine, nodes)
    given = (ids, start, size, ks, key, word, bits, many, *(odds if refine else ()))
    over(mark, n, *given, work=(word + np.arange(n + 1)) * 16)
    np.cumsum(many + loops, out=ptr[1:])
    out = tuple(np.empty(int(ptr[-1]), t) for t in (np.int64, np.float32, np.float32))
    over(cpu_labor.take, n, ids, where, ks, word, bits, ptr, *odds, *out, work=ptr)
    return Drawn(*map(torch.from_numpy, (ptr, *out)))


def _refined(ids, start, size, k: np.ndarray, refine: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(pi, room for c). With pi = 1 the constant is k/n, and pi then the largest of them."""
    c = np.where((k < 0) | (size <= k), SURE, k / np.maximum(size, 1))
    pi = np.zeros(nodes)
    cpu_labor.spread(ids, start, size, c, pi)
    for _ in range(refine - 1):
        over(cpu_labor.solve, len(c), ids, start, size, k, pi, c, work=np.concatenate([[0], np.cumsum(size + 16)]))
        most = np.zeros(nodes)
        cpu_labor.spread(ids, start, size, c, most)
        pi *= np.where(most > 0, most, 1.0)
    return pi, c


def near(edges: Edges, rows: Rows, targets: Tensor, inner: bool, scratch: Tensor) -> Near:
    where = extents(edges, rows)
    ptr = np.concatenate([[0], np.cumsum(where[1])])
    row, place = np.empty(int(ptr[-1]), np.int64), np.empty(int(ptr[-1]), np.int64)
    over(cpu_scan.places, len(ptr) - 1, where, ptr, row, place, work=ptr)
    head, at = targets if inner else targets[:0], torch.from_numpy(place)
    n_id, local = numbering.relabel(head, edges.indices[at].long(), scratch)
    return Near(torch.from_numpy(row), at, (local - head.numel()).clamp_(min=-1), n_id[head.numel() :])


def chances(edges: Edges, rows: Rows, near: Near, k: Tensor, odds: Odds) -> Tensor:
    where, by = extents(edges, rows), _odds(plain_odds(odds))
    ptr, out = np.concatenate([[0], np.cumsum(where[1])]), np.empty(near.place.numel())
    given = (rows.row.numpy(), where, ptr, k.numpy(), by, edges.arrays[3], out)
    over(cpu_scan.chance_rows, len(ptr) - 1, *given, work=ptr)
    return torch.from_numpy(out)


def total(value: Tensor, local: Tensor, candidates: int) -> Tensor:
    out = np.zeros(candidates, value.numpy().dtype)
    cpu_scan.total(value.numpy(), local.numpy(), out)
    return torch.from_numpy(out)


def keep(edges: Edges, rows: Rows, near: Near, prob: Tensor, scale: Tensor) -> Drawn:
    where = extents(edges, rows)
    most = int(where[3].sum()) + near.row.numel()
    out = [np.empty(most, t) for t in (np.int64, np.float32, np.float32)]
    ptr = np.empty(rows.row.numel() + 1, np.int64)
    given = [t.numpy() for t in (near.row, near.place, near.local, prob, scale)]
    m = cpu_scan.keep(where, *given, ptr, *out)  # type: ignore[call-arg]
    return Drawn(*map(torch.from_numpy, (ptr, *(a[:m].copy() for a in out))))

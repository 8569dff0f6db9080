"""A whole hop on the CPU in one pass: drawn, looked up and numbered, each group a step behind.

A group's places are drawn and their lines asked for; while these come, the group before is looked up and the lines of
its sources' numbers asked for; and the group before that is numbered. What is handed on stays in the nearest cache.
"""

from __future__ import annotations

import numpy as np

from adahop.ops.drawing import cpu_prefix, cpu_tree
from adahop.ops.drawing.cpu_prefix import block_group, prefix_group
from adahop.ops.drawing.cpu_scan import extents, sure, uniform_row
from adahop.ops.drawing.cpu_tree import tree_group
from adahop.ops.random import base
from adahop.ops.simd import bare, kernel, part, prefetch, prefetch_write
from adahop.ops.types import NO_PLACES

GROUP = 32  # targets that are drawn, looked up and numbered together
LEARNED = min(cpu_prefix.GROUP, cpu_tree.GROUP)  # the same by learned odds
AHEAD = 24  # targets whose extents are asked for before they are read


@part
def ask(a, b, pos, stored):
    """Ask for what will be looked up of the edges a..b; `stored` is (indices, weight, eid)."""
    indices, weight, eid = stored
    for e in range(np.uint64(a), np.uint64(b)):
        prefetch(indices, pos[e])
    if eid.shape[0] > 0:
        for e in range(np.uint64(a), np.uint64(b)):
            prefetch(eid, pos[e])
    if weight.shape[0] > 0:
        for e in range(np.uint64(a), np.uint64(b)):
            prefetch(weight, pos[e])


@part
def look_up(a, b, stored, naming, local_of, found):
    """Sources, ids and weights of the edges a..b; `found` is (pos, ends, e_id, weight)."""
    indices, weight, eid = stored
    pos, src, e_id, w = found
    for e in range(np.uint64(a), np.uint64(b)):
        src[e] = np.int64(indices[np.uint64(pos[e])])
    if naming:
        for e in range(np.uint64(a), np.uint64(b)):
            prefetch_write(local_of, src[e])
    if eid.shape[0] > 0:
        for e in range(np.uint64(a), np.uint64(b)):
            e_id[e] = eid[np.uint64(pos[e])]
    if weight.shape[0] > 0:
        for e in range(np.uint64(a), np.uint64(b)):
            w[e] = weight[np.uint64(pos[e])]


@part
def name(a, b, n, src, local_of, n_id):
    """src[a:b] from global to local ids, new ones from n on; how many there are then."""
    for e in range(np.uint64(a), np.uint64(b)):
        v = np.uint64(src[e])
        old = local_of[v]
        new = old < 0  # no branch: which sources are new cannot be foreseen
        x = n if new else np.int64(old)
        n_id[np.uint64(n)] = v
        local_of[v] = x
        src[e] = x
        n += new
    return n


@part
def name_targets(dst, known, local_of, n_id):
    """Targets are numbered as they come, in `local_of` only where they are not `known` there; how many they are."""
    n = dst.shape[0]
    for i in range(n):
        n_id[i] = dst[i]
    if not known:
        for i in range(n):
            prefetch_write(local_of, dst[i])
        for i in range(n):
            if local_of[dst[i]] < 0:  # a target that comes twice goes by its first number
                local_of[dst[i]] = i
    return n


@part
def finish(lo, hi, named, looked, n, naming, target, ptr, m, stored, found, local_of, n_id):
    """What is still to be looked up and numbered of the rows lo..hi, and their targets; how many nodes there are.

    Targets are written from ends[m] on.
    """
    _, weight, _ = stored
    _, ends, _, w = found
    first, o = ptr[lo], ptr[hi]
    if naming:
        n = name(named, looked, n, ends, local_of, n_id)
    look_up(looked, o, stored, naming, local_of, found)
    if naming:
        n = name(looked, o, n, ends, local_of, n_id)
    for t in range(lo, hi):
        at = target[t] if target.shape[0] > 0 else t
        for e in range(np.uint64(m + ptr[t]), np.uint64(m + ptr[t + 1])):
            ends[e] = at
    if weight.shape[0] == 0:
        for e in range(np.uint64(first), np.uint64(o)):
            w[e] = np.float32(1.0)
    return n


@kernel
def uniform_hop(dst, rows, target, stored, k, how, key, known, local_of, ptr, pos, ends, e_id, chance, n_id):
    """Fill all from ptr on: k of each row's neighbours, all alike, and its self-loops. (edges, nodes)

    `ends` gets the sources, then right after them the targets; `chance` is (weight, prob, scale). Numbers of the nodes
    stay in `local_of`, and with `known` those of the targets are there already.
    """
    begin, first, last, indices, weight, eid = bare(stored)
    dst, rows, target, local_of, ptr, n_id = bare((dst, rows, target, local_of, ptr, n_id))
    w, prob, scale = bare(chance)
    of, found = bare((indices, weight, eid)), bare((pos, ends, e_id, w))
    pos, ends, e_id, w = found
    many, n, out = rows.shape[0], name_targets(dst, known, local_of, n_id), np.empty(max(k, 1), np.int64)
    o, looked, named = 0, 0, 0
    ptr[0] = 0
    for at in range(0, many, GROUP):
        drawn = o
        for t in range(at, min(at + GROUP, many)):
            if t + AHEAD < many:
                prefetch(begin, rows[t + AHEAD])
                prefetch(first, rows[t + AHEAD])
            v = rows[t]
            a, b = begin[v], first[v]
            size = last[v] - b
            sure(a, o, b - a, pos, prob, scale)
            o += b - a
            if size <= k:
                sure(b, o, size, pos, prob, scale)
                o += size
            else:
                uniform_row(b, size, k, o, base(key, v), how, out, pos, prob, scale)
                o += k
            ptr[t + 1] = o
        ask(drawn, o, pos, of)
        n = name(named, looked, n, ends, local_of, n_id)
        look_up(looked, drawn, of, True, local_of, found)
        named, looked = looked, drawn
    return o, finish(0, many, named, looked, n, True, target, ptr, o, of, found, local_of, n_id)


@kernel
def open_hop(dst, rows, stored, ks, known, local_of, where, ptr, n_id):
    """Make a hop by learned odds ready: where the rows lie, how many edges each gets, and the targets' numbers."""
    begin, first, last, _, _, _ = bare(stored)
    dst, local_of, n_id = bare((dst, local_of, n_id))
    extents(begin, first, last, rows, NO_PLACES, NO_PLACES, ks, where, ptr)
    name_targets(dst, known, local_of, n_id)


@kernel
def learned_rows(lo, hi, n, rows, target, stored, where, ks, how, key, odds, prefix, wide, tree, local_of, ptr, pos,
                 ends, e_id, chance, n_id):  # fmt: skip
    """Fill the rows lo..hi by learned odds, in prefix sums (of blocks where `wide` is given) or in a tree: what is
    None is not compiled.

    Sources are numbered from n on, and their number is returned; with n < 0 they keep their global ids.
    """
    _, _, _, indices, weight, eid = bare(stored)
    rows, target, local_of, ptr, n_id, ks = bare((rows, target, local_of, ptr, n_id, ks))
    w, prob, scale = bare(chance)
    of, found, drawn = bare((indices, weight, eid)), bare((pos, ends, e_id, w)), bare((pos, prob, scale))
    pos, ends, e_id, w = found
    where, odds = bare(where), bare(odds)
    most, naming = max(ks[0], 1), n >= 0
    if prefix is not None:
        tables = bare(prefix)
        mark, out = np.empty(cpu_prefix.GROUP * most, np.int64), np.empty(most, np.int64)
    if wide is not None:
        room = np.empty(wide), np.empty(wide, np.int64)
    if tree is not None:
        sums = bare((odds[0], tree[0], tree[1]))
        bits, inner = np.empty(cpu_tree.GROUP * most, np.uint64), np.empty(cpu_tree.TOP + cpu_tree.WIDE)
        outer, total = np.zeros(cpu_tree.BLOCKS + 1), np.empty(cpu_tree.GROUP)
        tops = np.empty(cpu_tree.GROUP, np.int64)
    looked = named = ptr[lo]
    for at in range(lo, hi, LEARNED):
        end = min(at + LEARNED, hi)
        if prefix is not None:
            if wide is None:
                prefix_group(at, end, hi, rows, where, ptr, ks, how, key, odds, indices, tables, mark, out, drawn)
            else:
                block_group(at, end, hi, rows, where, ptr, ks, how, key, odds, indices, tables, wide, mark, out, room,
                            drawn)  # fmt: skip
        if tree is not None:
            tree_group(at, end, hi, rows, where, ptr, ks, key, odds[2], sums, bits, inner, outer, total, tops, drawn)
        begin = ptr[at]
        ask(begin, ptr[end], pos, of)
        if naming:
            n = name(named, looked, n, ends, local_of, n_id)
        look_up(looked, begin, of, naming, local_of, found)
        named, looked = looked, begin
    return finish(lo, hi, named, looked, n, naming, target, ptr, ptr[rows.shape[0]], of, found, local_of, n_id)

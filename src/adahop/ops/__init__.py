"""The few operations everything is made of, each with a plain reference and fast forms; see `registry`."""

from adahop.ops import notice, random
from adahop.ops.buffers import Scratch, large_pages, pinned
from adahop.ops.drawing import (
    chances,
    draw,
    goes_by_sums,
    hop,
    inclusion,
    keep,
    labor,
    lifted,
    near,
    padded,
    pads,
    pick,
    plan,
    renew,
    target_rows,
    visit,
)
from adahop.ops.dropping import dropout, noisy
from adahop.ops.layout import normalise, prepend
from adahop.ops.learning import Sight, Weights, exp3, grow, push, track
from adahop.ops.numbering import forget, in_order, induced, number, relabel, relabel_within
from adahop.ops.pages import ask_for, in_file, no_more_than_asked
from adahop.ops.products import product
from adahop.ops.registry import OPS, Op, register, uncast
from adahop.ops.segments import lower_bound, pointer, ranges, segment_max, segment_of, segment_sum, spans
from adahop.ops.summing import (
    add_ends,
    attend,
    change,
    edge_dot,
    energies,
    fetch,
    full_sum,
    gather_heads,
    gather_sum,
    known_energies,
    may_wait,
    row_sums,
    rows_dot,
    softmax,
    spread,
    table,
    table_dot,
    table_rows,
    table_sum,
    widened,
)
from adahop.ops.summing.reference import Base
from adahop.ops.threads import alone, get_threads, helper, over, set_threads, threads
from adahop.ops.types import (
    DRAWS,
    Drawn,
    Edges,
    Exp3Rule,
    Near,
    Numbered,
    Odds,
    Plan,
    Prefix,
    Rows,
    Slots,
    TrackRule,
    Tree,
)

"""How kernels are compiled, and the instructions they use: vectors of sixteen numbers, prefetches, bit counts.

A `part` is written into whatever calls it: numba counts references to arrays that are handed to a call, atomically,
which costs more than most parts do. A division by zero gives inf or nan, not an error, as an error's way out keeps
numba from leaving such counts out. LLVM splits the vectors for processors whose own are shorter.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from llvmlite import ir
from numba import extending
from numba.core import types

from adahop.ops.random import A, B, C

intrinsic: Any = extending.intrinsic  # its types do not know that the first argument is numba's own
kernel: Any = nb.njit(nogil=True, cache=True, error_model="numpy")
part: Any = nb.njit(inline="always", error_model="numpy")
LINE = 64  # bytes of a cache line


@intrinsic
def bare(_, arrays):
    """A tuple with its arrays without their owners, whose references are not counted; the caller keeps them alive."""

    def codegen(context, builder, signature, args):
        kinds, out = signature.args[0].types, []
        for i, kind in enumerate(kinds):
            if not isinstance(kind, types.Array):
                out.append(builder.extract_value(args[0], i))
                continue
            array = context.make_array(kind)(context, builder, builder.extract_value(args[0], i))
            array.meminfo = ir.Constant(array.meminfo.type, None)
            out.append(array._getvalue())
        return context.make_tuple(builder, signature.return_type, out)

    return arrays(arrays), codegen


def _prefetch(write: int):
    @intrinsic
    def fetch(_, array, i):
        """Ask for the cache line of array[i], contiguous, i within it; a hint that changes nothing."""
        if not (isinstance(array, types.Array) and array.ndim == 1 and isinstance(i, types.Integer)):
            return None

        def codegen(context, builder, signature, args):
            of = context.make_array(signature.args[0])(context, builder, args[0])
            at = context.cast(builder, args[1], signature.args[1], types.intp)
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            call = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            line = builder.bitcast(builder.gep(of.data, [at]), byte)
            builder.call(call, [line, word(write), word(3), word(1)])
            return context.get_dummy_value()

        return types.void(array, i), codegen

    return fetch


prefetch, prefetch_write = _prefetch(0), _prefetch(1)  # of a line that will be read, and of one that will be written


@intrinsic
def per_line(_, array):
    """How many items of an array lie in a cache line, known when the kernel is compiled."""
    if not isinstance(array, types.Array):
        return None
    many = LINE // (array.dtype.bitwidth // 8)

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(64), many)

    return types.int64(array), codegen


@intrinsic
def real(_, x):
    """A number as float32: of uint16 its bits are those of float16, of int16 those of bfloat16."""
    if x not in (types.uint16, types.int16, types.float32):
        return None

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        if signature.args[0] == types.int16:
            word = ir.IntType(32)
            return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(x), codegen


WIDE, MANY = 16, 64
_INT, _SINGLE, _DOUBLE = ir.IntType(32), ir.FloatType(), ir.DoubleType()
_SINGLES = ir.VectorType(_SINGLE, WIDE)
_LANES = ir.Constant(ir.VectorType(_INT, WIDE), list(range(WIDE)))


def _place(context, builder, kind, array, i, of):
    """array[i:] as a pointer to the vector `of`."""
    start = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(start, [i]), of.as_pointer())


def _splat(builder, x, n=WIDE):
    one = builder.insert_element(ir.Constant(ir.VectorType(x.type, n), ir.Undefined), x, _INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, n), [0] * n))


def _load(context, builder, kind, array, i):
    """array[i : i + 16] as float32."""
    value = builder.load(_place(context, builder, kind, array, i, _SINGLES))
    value.align = 4
    return value


def _part(builder, x, lo, hi):
    """x in the lanes lo..hi, 0 in the others."""
    lo, hi = (_splat(builder, builder.trunc(at, _INT)) for at in (lo, hi))
    inside = builder.and_(builder.icmp_signed(">=", _LANES, lo), builder.icmp_signed("<", _LANES, hi))
    return builder.select(inside, x, ir.Constant(_SINGLES, None))


def _add_up(builder, x):
    """Prefix sums in float64: each lane adds the one 1, 2, 4, 8 before it."""
    of = ir.VectorType(_DOUBLE, WIDE)
    x, none = builder.fpext(x, of), ir.Constant(of, None)
    for far in (1, 2, 4, 8):
        back = [i - far if i >= far else WIDE for i in range(WIDE)]
        x = builder.fadd(x, builder.shuffle_vector(x, none, ir.Constant(ir.VectorType(_INT, WIDE), back)))
    return x


def _count(builder, bits, n):
    """How many of n bits are set, as int64."""
    word = ir.IntType(n)
    call = builder.module.declare_intrinsic("llvm.ctpop", (word,), ir.FunctionType(word, [word]))
    return builder.zext(builder.call(call, [builder.bitcast(bits, word)]), ir.IntType(64))


def _sum(builder, x):
    """Halves upon halves, always in the same order."""
    for n in (8, 4, 2, 1):
        low, high = (
            builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_INT, n), list(range(a, a + n)))) for a in (0, n)
        )
        x = builder.fadd(low, high)
    return builder.extract_element(x, _INT(0))


@intrinsic
def sum16(_, array, i):
    """array[i] + ... + array[i + 15] in float32."""

    def codegen(context, builder, signature, args):
        return _sum(builder, _load(context, builder, signature.args[0], *args))

    return types.float32(array, types.int64), codegen


@intrinsic
def sum_part(_, array, i, lo, hi):
    """The same of the lanes lo..hi alone."""

    def codegen(context, builder, signature, args):
        return _sum(builder, _part(builder, _load(context, builder, signature.args[0], *args[:2]), *args[2:]))

    return types.float32(array, types.int64, types.int64, types.int64), codegen


@intrinsic
def add16(_, out, o, array, i, times):
    """out[o : o + 16] += times * array[i : i + 16]."""

    def codegen(context, builder, signature, args):
        out, o, array, i, times = args
        place = _place(context, builder, signature.args[0], out, o, _SINGLES)
        more = builder.fmul(_splat(builder, times), _load(context, builder, signature.args[2], array, i))
        builder.store(builder.fadd(_load(context, builder, signature.args[0], out, o), more), place, align=4)
        return context.get_dummy_value()

    return types.void(out, types.int64, array, types.int64, types.float32), codegen


@intrinsic
def pick16(_, array, i, u):
    """The lane of array[i : i + 16] at which its prefix sums pass u * their total."""

    def codegen(context, builder, signature, args):
        sums = _add_up(builder, _load(context, builder, signature.args[0], *args[:2]))
        return _pick(builder, sums, args[2])

    return types.int64(array, types.int64, types.float64), codegen


@intrinsic
def pick_part(_, array, i, lo, hi, u):
    """The same with the lanes lo..hi alone."""

    def codegen(context, builder, signature, args):
        line = _load(context, builder, signature.args[0], *args[:2])
        sums = _add_up(builder, _part(builder, line, *args[2:4]))
        return _pick(builder, sums, args[4])

    return types.int64(array, types.int64, types.int64, types.int64, types.float64), codegen


def _pick(builder, sums, u):
    x = builder.fmul(u, builder.extract_element(sums, _INT(WIDE - 1)))
    return _count(builder, builder.fcmp_ordered("<=", sums, _splat(builder, x)), WIDE)


@intrinsic
def prefix16(_, array, i, n, out, o):
    """out[o : o + 16] = prefix sums of array[i : i + n], n <= 16, the last repeated; it is returned, too."""

    def codegen(context, builder, signature, args):
        array, i, n, out, o = args
        line = _load(context, builder, signature.args[0], array, i)
        sums = _add_up(builder, _part(builder, line, n.type(0), n))
        builder.store(sums, _place(context, builder, signature.args[3], out, o, sums.type), align=8)
        return builder.extract_element(sums, _INT(WIDE - 1))

    return types.float64(array, types.int64, types.int64, out, types.int64), codegen


def _passed(wide):
    @intrinsic
    def passed(_, sums, o, x):
        """How many of sums[o : o + 8 or 16] are not above x."""

        def codegen(context, builder, signature, args):
            sums, o, x = args
            value = builder.load(_place(context, builder, signature.args[0], sums, o, ir.VectorType(_DOUBLE, wide)))
            value.align = 8
            return _count(builder, builder.fcmp_ordered("<=", value, _splat(builder, x, wide)), wide)

        return types.int64(sums, types.int64, types.float64), codegen

    return passed


passed8, passed16 = _passed(8), _passed(16)


@intrinsic
def words_passed(_, words, i, lo, hi, x):
    """How many of the 16 uint32 from words[i] on are not above x; lanes before lo count, those from hi on do not."""

    def codegen(context, builder, signature, args):
        words, i, lo, hi, x = args
        of = ir.VectorType(_INT, WIDE)
        value = builder.load(_place(context, builder, signature.args[0], words, i, of))
        value.align = 4
        lo, hi, x = (_splat(builder, builder.trunc(word, _INT)) for word in (lo, hi, x))
        under = builder.and_(builder.icmp_unsigned("<=", value, x), builder.icmp_signed("<", _LANES, hi))
        return _count(builder, builder.or_(under, builder.icmp_signed("<", _LANES, lo)), WIDE)

    return types.int64(words, types.int64, types.int64, types.int64, types.int64), codegen


def _short(context, builder, kind, array, i, low, high):
    """`short32` of the 64 ids from array[i] on."""
    whole = ir.IntType(kind.dtype.bitwidth)
    x = builder.load(_place(context, builder, kind, array, i, ir.VectorType(whole, MANY)))
    x.align = whole.width // 8
    of = ir.VectorType(_INT, MANY)
    x = builder.trunc(x, of) if whole.width > 32 else x
    a, b, c, t13, t16 = (ir.Constant(of, [word] * MANY) for word in (A, B, C, 13, 16))
    low, high = (_splat(builder, word, MANY) for word in (low, high))
    x = builder.add(builder.mul(x, a), low)
    x = builder.mul(builder.xor(x, builder.lshr(x, t16)), b)
    x = builder.mul(builder.add(builder.xor(x, builder.lshr(x, t13)), high), c)
    return builder.xor(x, builder.lshr(x, t16))


@intrinsic
def below64(_, nodes, i, low, high, limit):
    """A bit for each of the 64 ids from nodes[i] on: whether its random number, `short32`, is below the limit."""

    def codegen(context, builder, signature, args):
        x = _short(context, builder, signature.args[0], *args[:4])
        return builder.bitcast(builder.icmp_unsigned("<", x, _splat(builder, args[4], MANY)), ir.IntType(MANY))

    return types.uint64(nodes, types.int64, types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def under64(_, nodes, p, i, low, high, times):
    """The same where the random number, as one in [0, 1), is below times * p[i]."""

    def codegen(context, builder, signature, args):
        nodes, p, i, low, high, times = args
        of = ir.VectorType(_DOUBLE, MANY)
        x = builder.uitofp(_short(context, builder, signature.args[0], nodes, i, low, high), of)
        limit = builder.load(_place(context, builder, signature.args[1], p, i, of))
        limit.align = 8
        limit = builder.fmul(limit, _splat(builder, times, MANY))
        x = builder.fmul(x, ir.Constant(of, [2.0**-32] * MANY))
        return builder.bitcast(builder.fcmp_ordered("<", x, limit), ir.IntType(MANY))

    return types.uint64(nodes, p, types.int64, types.uint32, types.uint32, types.float64), codegen


@intrinsic
def ones(_, bits):
    """How many bits are set."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def lowest(_, bits):
    """The place of the lowest bit that is set."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen

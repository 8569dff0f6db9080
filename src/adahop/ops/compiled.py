"""How kernels are compiled. A `part` is written into whatever calls it: numba counts references to arrays that are
handed to a call, atomically, which costs more than most parts do. A division by zero gives inf or nan, not an error,
as an error's way out keeps numba from leaving such counts out."""

from __future__ import annotations

from typing import Any

import numba as nb
from llvmlite import ir
from numba import extending

intrinsic: Any = extending.intrinsic  # its types do not know that the first argument is numba's own
kernel: Any = nb.njit(nogil=True, cache=True, error_model="numpy")
part: Any = nb.njit(inline="always", error_model="numpy")


@intrinsic
def bare(_, arrays):
    """A tuple of arrays without their owners, whose references are then not counted; the caller keeps them alive."""

    def codegen(context, builder, signature, args):
        kinds, out = signature.args[0].types, []
        for i, kind in enumerate(kinds):
            array = context.make_array(kind)(context, builder, builder.extract_value(args[0], i))
            array.meminfo = ir.Constant(array.meminfo.type, None)
            out.append(array._getvalue())
        return context.make_tuple(builder, signature.return_type, out)

    return arrays(arrays), codegen

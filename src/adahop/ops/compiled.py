"""How kernels are compiled. A `part` is written into whatever calls it: numba counts references to arrays that are
handed to a call, atomically, which costs more than most parts do. A division by zero gives inf or nan, not an error,
as an error's way out keeps numba from leaving such counts out."""

from __future__ import annotations

from typing import Any

import numba as nb

kernel: Any = nb.njit(nogil=True, cache=True, error_model="numpy")
part: Any = nb.njit(inline="always", error_model="numpy")

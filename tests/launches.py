"""The launches of the GPU's kernels on a machine without one: noted as Triton specialises them, and compiled.

Inside `noted()` an operation's Triton form is called up to its launches, forwards and backwards; what it would have
computed comes from the reference. A launch is a kernel with the types, the constants and the facts about its arguments
(divisible by 16, equal to 1) that Triton compiles it for: two launches that share a binary are one.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map_only

from adahop import ops
from adahop.ops.registry import Op
from adahop.policies import base

OPS = Path(inspect.getfile(Op)).parent


class Launch(NamedTuple):
    """What one binary is made from; `key` is Triton's own."""

    kernel: Any
    key: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__


class Binary(NamedTuple):
    launch: Launch
    seconds: float  # of the processor
    compiled: Any


class _Nowhere:
    """As much of Triton's driver as a compilation asks for: an H100 or H200 that nothing runs on."""

    def get_current_device(self) -> int:
        return -1  # no device's number, so that what is known of real ones stays as it is

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Noted(dict[tuple[str, str], Launch]):
    """Launches by kernel and key, as they were first met."""

    total = 0  # with those that were met before

    def note(self, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel, key = fn.jit_function, str(compile["key"])
        options = {k: compile[k] for k in ("num_warps", "num_ctas", "num_stages")}
        made = Launch(kernel, key, compile["signature"], compile["constants"], compile["configs"][0], options)
        self.setdefault((made.name, key), made)
        self.total += 1
        return True  # nothing is compiled now


class Stand:
    """What stands for the kernels where their launches are noted; see `pretended_cuda` for another."""

    def given(self, arguments: Any) -> Any:
        """The arguments of a launch as Triton is to see them."""
        return arguments

    def launch(self, op: Op, args: Any, options: Any) -> Any:
        """Call an operation's Triton form, for its launches alone."""
        return _there_and_back(op.cuda, args, options)

    def answer(self, op: Op, args: Any, options: Any) -> Any:
        """What its kernels would have computed."""
        return op.reference(*args, **options)


@contextlib.contextmanager
def noted(anywhere: bool = True, stand: Stand | None = None) -> Iterator[Noted]:
    """Inside, tensors `anywhere`, or only those of a GPU, are given to its kernels, whose launches are noted."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found, run, plain, stand = Noted(), JITFunction.run, Op.__call__, stand or Stand()

    def only_specialised(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert all(1 <= n < 2**31 if i == 0 else 1 <= n < 2**16 for i, n in enumerate(grid)), grid
        return run(self, *stand.given(args), grid=grid, warmup=True, **options)

    def shadowed(self: Op, *args: Any, **options: Any) -> Any:
        at, before = args[self.by], found.total
        if self.form(at if isinstance(at, Tensor) else at[0]) != "cuda":
            return plain(self, *args, **options)
        out = stand.launch(self, args, options)
        if out is NotImplemented:
            return self.reference(*args, **options)
        if found.total == before:  # plain torch
            return self.cuda(*args, **options)  # type: ignore[misc]
        return _as_wide(stand.answer(self, args, options), out)

    with pytest.MonkeyPatch.context() as patch:
        if anywhere:
            patch.setenv("ADAHOP_TRITON", "1")
            for owner in (ops, base):  # draws as on a device
                patch.setattr(owner, "goes_by_sums", lambda at: False)
        patch.setattr(JITFunction, "run", only_specialised)
        patch.setattr(Op, "__call__", shadowed)
        patch.setattr(knobs.runtime, "jit_cache_hook", found.note)
        patch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", _Nowhere())  # by version
        yield found


def _as_wide(answer: Any, out: Any) -> Any:
    """An answer in the type and the shape that the Triton form has, whose rows may end in zeros for longer."""
    if not isinstance(answer, Tensor):
        return answer
    assert out.dtype == answer.dtype and out.shape[:-1] == answer.shape[:-1], (out.shape, answer.shape)
    return answer if out.shape == answer.shape else pad(answer, (0, out.shape[-1] - answer.shape[-1]))


def _there_and_back(form: Any, args: Any, options: Any) -> Any:
    """What an operation's form returns, after the launches of its gradients too."""
    args, options = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, (args, options)
    )
    out = form(*args, **options)
    made, asked = ([t for t in tree_leaves(of) if isinstance(t, Tensor) and t.requires_grad]
                   for of in (out, (args, options)))  # fmt: skip
    if made and asked:
        torch.autograd.grad(made, asked, [torch.ones_like(t) for t in made], allow_unused=True)
    return out


def compiled(launch: Launch) -> Binary:
    """For sm_90, as `noted` launches are."""
    from triton import compile
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    begin = os.times()
    made = compile(source, target=_Nowhere().get_current_target(), options=launch.options)
    return Binary(launch, sum(os.times()[:4]) - sum(begin[:4]), made)  # the assembler is a process of its own


def modules() -> list[ModuleType]:
    """Where the library's kernels are."""
    files = sorted(OPS.rglob("cuda*.py"))
    names = [".".join(("adahop.ops", *file.relative_to(OPS).with_suffix("").parts)) for file in files]
    return [importlib.import_module(name) for name in names]


def kernels() -> dict[str, Any]:
    """Every function of theirs that Triton compiles, by module and name: launched, or called by one that is."""
    from triton.runtime.jit import JITFunction

    return {
        f"{f.__module__}.{f.__name__}": f for m in modules() for f in vars(m).values() if isinstance(f, JITFunction)
    }


def reached(launched: list[Any]) -> set[str]:
    """These kernels and the functions that they call."""
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    while launched:
        f = launched.pop()
        if found.setdefault(f"{f.__module__}.{f.__name__}", f) is f:
            called = (f.fn.__globals__.get(name) for name in f.fn.__code__.co_names)
            launched += [g for g in called if isinstance(g, JITFunction) and g not in found.values()]
    return set(found)

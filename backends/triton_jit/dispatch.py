"""One launch of one kernel, on a device or in the interpreter.

The rule kept here: every launch of the portable mechanism goes through here, and no launch of any
comes before the kernels' cache was seen to. The first launch of a kernel for arrays that lie in one
way goes through Triton, which compiles and caches; the later ones hand the addresses to what that
compiled, without Triton's sorting of some eighty arguments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from triton import knobs

from portattn.backends.triton_jit import compiler_key, interpreted, kernel_cache

if interpreted.on():
    interpreted.mend()
else:
    kernel_cache.usable()
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        kernel_cache.ask_ahead(10 * major + minor)


_RUNTIME = knobs.runtime
_LATER = 0.5
"""Seconds that a compilation beside another one waits: code is generated under Python's lock, and
what the caller waits for longest goes first."""


def dispatch(
    kernel: Any,
    programs: int,
    tile: Any,
    *args: Any,
    early: bool = False,
    only_compile: bool = False,
    **named: Any,
) -> Any:
    """Run ``programs`` programs of ``kernel``, with ``tile.num_warps`` and ``tile.num_stages``.
    ``early``: they may start while the kernel before runs, for which they wait themselves. Returns
    what was compiled for it, which is all that ``only_compile`` does."""
    if programs == 0:
        return None
    if interpreted.on():
        # log2(0) is -inf and meant, in NumPy as on a GPU.
        with interpreted.LOCK, np.errstate(all="ignore"):
            kernel[(programs,)](*args, **named)
        return None
    start = partial(kernel.warmup, grid=(programs,)) if only_compile else kernel[(programs,)]
    return start(
        *args,
        **named,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # Triton 3.10 changes the default, and with it the bits
        **({"launch_pdl": True} if early else {}),  # not an option of every backend of Triton
    )


class Launch:
    """A launch for arrays that lie in one way: everything but their addresses.

    ``first`` runs the kernel through Triton on the arrays. ``boxes`` are the descriptors of the
    tensors that go by the tensor memory accelerator, by their place among the arrays; ``rest`` is
    what follows the arrays, the compile-time constants included.
    """

    __slots__ = ("_asked", "_boxes", "_first", "_maps", "_programs", "_rest", "_straight")

    def __init__(
        self,
        first: Callable[..., Any],
        programs: int,
        rest: tuple[Any, ...],
        boxes: Mapping[int, Any] | None = None,
    ) -> None:
        self._first = first
        self._programs = programs
        self._rest = rest
        self._boxes = dict(boxes or {})
        for box in self._boxes.values():
            box.base = None  # a launch outlives the arrays
        self._straight: Straight | None = None
        self._asked = threading.Event()
        self._maps: dict[tuple[int, int], list[Any]] = {}

    def compile_beside(self, arrays: tuple[Any, ...], device: Any) -> None:
        """Compile for these tensors in a thread of its own, beside what the caller compiles: what
        starts this launch meanwhile waits for it, and meets its errors itself."""

        def compile_it() -> None:
            with contextlib.suppress(Exception), torch.cuda.device(device):
                compiler_key.wait()  # with which the other one begins as well
                if self._asked.wait(_LATER):
                    return  # the launch is here, and compiles it
                torch.cuda.Event().record()  # gives the thread a context, which Triton asks about
                self._first(*arrays, only_compile=True)

        threading.Thread(target=compile_it, name="portattn-compile").start()

    def start(self, arrays: tuple[Any, ...]) -> None:
        """Launch on these tensors (None: absent), on the current device and stream."""
        boxes, straight = self._boxes, self._straight
        if straight is None or not straight.usable():
            self._asked.set()
            given = [moved(boxes[i], x) if i in boxes else x for i, x in enumerate(arrays)]
            self._straight = Straight.of(self._first(*given))
            return
        flat: list[Any] = []
        for i, x in enumerate(arrays):
            if x is None:
                flat.append(None)
            elif i in boxes:
                flat += self._map(straight, i, x)
            else:
                flat.append(x.data_ptr())
        straight.start(self._programs, (*flat, *self._rest))

    def _map(self, straight: Straight, place: int, x: Any) -> list[Any]:
        """A tensor map and what goes with it; an allocator hands the same addresses out again."""
        key = (place, x.data_ptr())
        found: list[Any] = remembered(
            self._maps, key, lambda: straight.tensor_map(moved(self._boxes[place], x), place)
        )
        return found


class Straight:
    """What Triton compiled, started without its Python: by the function that takes addresses."""

    __slots__ = ("_function", "_head", "_launch", "_maps", "_tail")

    def __init__(self, compiled: Any, launch: Any, maps: Mapping[int, Any]) -> None:
        run = compiled.run
        self._launch = launch
        self._function = compiled.function
        self._maps = maps
        self._head = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self._tail = (compiled.packed_metadata, None, None, None)

    @staticmethod
    def of(compiled: Any) -> Straight | None:
        """For a compiled kernel; None where its launcher does not look as that of Triton 3.6."""
        run: Any = getattr(compiled, "run", None)
        launch = getattr(run, "launch", None)
        if launch is None or not hasattr(run, "launch_pdl"):
            return None
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        maps: dict[int, Any] = {}
        if getattr(launch, "__closure__", None):  # it sorts descriptors for what is wanted
            names = launch.__code__.co_freevars
            inside = {n: c.cell_contents for n, c in zip(names, launch.__closure__, strict=True)}
            if not {"launcher", "tensordesc_meta", "tensordesc_indices"} <= set(inside):
                return None
            places, about = sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"]
            maps = dict(zip(places, about, strict=True))
            launch = inside["launcher"]
        return Straight(compiled, launch, maps)

    @staticmethod
    def usable() -> bool:
        """Whether nobody watches launches."""
        enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
        if enter is not None and getattr(enter, "calls", True):
            return False
        return leave is None or not getattr(leave, "calls", True)

    def tensor_map(self, box: Any, place: int) -> list[Any]:
        """The arguments that stand for a descriptor, parameter number ``place``."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return list(make_tensordesc_arg(box, self._maps[place]))

    def start(self, programs: int, args: Any) -> None:
        """Launch on the current device and stream."""
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        self._launch(programs, 1, 1, stream, self._function, *self._head, *self._tail, *args)


def moved(box: Any, x: Any) -> Any:
    """A descriptor of ``x``, which lies as the tensor of ``box`` did, without a second check."""
    new = object.__new__(type(box))
    new.__dict__.update(box.__dict__)
    new.base = x
    return new


MEMO = 64
"""Launches that a plan remembers: ways for its arrays to lie, and kernels compiled for them."""


def remembered(memo: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What ``memo`` has for ``key``, made if there is nothing. Several threads may ask: one that
    comes second makes it again, and either will do."""
    found = memo.get(key)
    if found is None:
        if len(memo) >= MEMO:
            memo.clear()
        found = memo[key] = make()
    return found

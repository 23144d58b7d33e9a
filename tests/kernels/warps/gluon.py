# SPDX-License-Identifier: Apache-2.0
"""What Gluon's names mean to a warp on the host, and the launch of a kernel that is made of them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.kernels.warps.schedule import Barrier, Group, Program, Ready, Scheduler, Task, Warp
from tests.kernels.warps.tensors import Layout, Matrix, Pointer, Shared, SliceLayout, Value, bare


@dataclass
class Product:
    """A matrix product of a group's four warps: what each of them has asked for, and what came of it."""

    asked: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    results: dict[int, "Value"] = field(default_factory=dict)

    def compute(self) -> None:
        for number, (a, b, acc) in self.asked.items():
            rows = a.matrix()[16 * number : 16 * number + 16] if isinstance(a, Shared) else a.data
            found = rows.astype(np.float32) @ b.matrix().astype(np.float32)
            self.results[number] = Value(found if acc is None else acc.data + found)


class Kernel:
    """Stands in for a jitted kernel: ``kernel[(num_programs,)](…)`` runs it under the schedule of a seed.

    ``instead``: what some of the names that it uses are to mean, for a kernel with a fault.
    """

    def __init__(self, jitted: Any, seed: int, instead: "Fault | None" = None) -> None:
        self.jitted, self.seed = jitted, seed
        self.instead: Fault = instead or (lambda gluon: {})

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            scheduler = Scheduler(self.seed)
            programs = [Program(scheduler, number, grid[0]) for number in range(grid[0])]
            try:
                for program in programs:
                    gluon = Gluon(program, num_warps)
                    rebuilt(self.jitted, gluon.names() | self.instead(gluon), {})(*map(_argument, args), **constants)
                with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                    scheduler.run()
            finally:
                for task in scheduler.tasks:
                    if isinstance(task, Warp):
                        task.stop()

        return launch


Fault = Callable[["Gluon"], dict[str, Any]]


def _argument(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return Pointer.to(given)
    if isinstance(given, tuple):
        return type(given)(*map(_argument, given)) if hasattr(given, "_fields") else tuple(map(_argument, given))
    return given


def rebuilt(jitted: Any, names: dict[str, Any], known: dict[Any, FunctionType]) -> FunctionType:
    """The Python function of a jitted one, and of all that it calls, with other things behind Gluon's names."""
    if jitted not in known:
        function = jitted.fn
        around: dict[str, Any] = {}
        known[jitted] = FunctionType(function.__code__, around, function.__name__, function.__defaults__)
        for name, value in function.__globals__.items():
            if name in names:
                around[name] = names[name]
            elif hasattr(value, "fn") and hasattr(value, "src"):
                around[name] = rebuilt(value, names, known)
            else:
                around[name] = value.value if type(value).__name__ == "constexpr" else value
    return known[jitted]


class Gluon:
    """What Gluon's names mean within one program."""

    def __init__(self, program: Program, num_warps: int) -> None:
        self.program, self._default_warps, self._barriers = program, num_warps, 0

    def names(self) -> dict[str, Any]:
        of_barriers = ("init", "wait", "expect", "arrive")
        return {
            "gl": self,
            "mbarrier": SimpleNamespace(
                **{name: getattr(self, f"mbarrier_{name}") for name in of_barriers}, MBarrierLayout=lambda: Barrier
            ),
            "async_copy": SimpleNamespace(mbarrier_arrive=self.arrive_after_copies),
            "barrier": self.barrier, "bulk_load": self.bulk_load, "fence_async_shared": lambda: None,
            "gather_load": self.gather_load, "warpgroup_mma": self.warpgroup_mma,
            "warpgroup_mma_wait": self.warpgroup_mma_wait,
            "reinterpret": lambda shared, dtype, shape, layout: shared.seen_as(shape),
        }  # fmt: skip

    @property
    def warp(self) -> Warp:
        warp = self.program.scheduler.running
        assert warp is not None
        return warp

    # Numbers and layouts.

    int32, int64, float32 = np.int32, np.int64, np.float32
    BlockedLayout = NVMMADistributedLayout = NVMMASharedLayout = DotOperandLayout = SwizzledSharedLayout = Layout
    SliceLayout = SliceLayout
    constexpr = object
    static_range = range
    to_tensor = Value
    minimum = staticmethod(lambda a, b: Value(np.minimum(bare(a), bare(b))))
    maximum = staticmethod(lambda a, b: Value(np.maximum(bare(a), bare(b))))
    where = staticmethod(lambda wanted, a, b: Value(np.where(bare(wanted), bare(a), bare(b))))
    exp2 = staticmethod(lambda x: Value(np.exp2(x.data)))
    log2 = staticmethod(lambda x: Value(np.log2(x.data)))
    max = staticmethod(lambda x, axis: Value(x.data.max(axis)))
    sum = staticmethod(lambda x, axis: Value(x.data.sum(axis)))
    zeros_like = staticmethod(lambda x: Value(np.zeros_like(x.data)))
    convert_layout = staticmethod(lambda x, layout: x)

    def full(self, shape: list[int], value: Any, dtype: Any, layout: Layout) -> Value:
        return Value(np.full(shape, bare(value), dtype))

    def zeros(self, shape: list[int], dtype: Any, layout: Layout) -> Value:
        rows = self.warp.part(shape[0])
        return Value(np.zeros((rows.stop - rows.start, *shape[1:]), dtype))

    def arange(self, begin: int, end: int, layout: SliceLayout) -> Value:
        """Along rows, the warp's own."""
        found = np.arange(begin, end)
        return Value(found[self.warp.part(end - begin)] if layout.dim == 1 else found)

    # Programs and warps.

    def program_id(self, axis: int) -> Value:
        return Value(self.program.number)

    def num_programs(self, axis: int) -> Value:
        return Value(self.program.num_programs)

    def num_warps(self) -> int:
        return len(self.warp.group.warps)

    def warp_specialize(self, functions: list[Any], more_warps: list[int], registers: list[int]) -> None:
        for number, ((run, args), num_warps) in enumerate(
            zip(functions, [self._default_warps, *more_warps], strict=True)
        ):
            name = f"{run.__name__} {number} of program {self.program.number}"
            self.program.groups.append(Group(self.program, name, num_warps, lambda run=run, args=args: run(*args)))

    def barrier(self) -> None:
        """All warps of the group."""
        if self.program.scheduler.running is None:
            return  # before warps part
        warp = self.warp
        warp.num_barriers += 1
        number = warp.num_barriers
        warp.pause(lambda: all(other.done or other.num_barriers >= number for other in warp.group.warps), "its group")

    # Memory.

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
        self.warp.pause()
        return Value(pointer.read(mask, other))

    def store(self, pointer: Pointer, value: Value, mask: Any = True) -> None:
        self.warp.pause()
        places, wanted = np.broadcast_arrays(pointer.places.data, bare(mask))
        assert (places[wanted] >= 0).all()
        pointer.memory[places[wanted]] = np.broadcast_to(value.data, places.shape)[wanted]

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> Value:
        """Once for the whole group."""
        self.warp.pause()
        warp, found = self.warp, self.warp.group.atomics
        if warp.num_atomics == len(found):
            place = int(pointer.places)
            found.append(int(pointer.memory[place]))
            pointer.memory[place] += value
        warp.num_atomics += 1
        return Value(found[warp.num_atomics - 1])

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout is Barrier:
            self._barriers += 1
            barriers = [Barrier(f"{i} of the kernel's barriers no. {self._barriers}") for i in range(shape[0])]
            return SimpleNamespace(index=lambda i: barriers[operator.index(i)])
        poison = np.nan if np.issubdtype(dtype, np.floating) else -(1 << 30)
        return Shared(self.program.scheduler, np.full(int(np.prod(shape)), poison, dtype), shape)

    def bulk_load(self, matrix: Matrix, place: list[Any], full: Barrier, target: Shared) -> None:
        """One thread of the group asks for it."""
        self.warp.pause()
        if self.warp.number:
            return
        assert list(target.shape) == matrix.box
        everything, (row, column) = slice(None), map(int, place)
        target.fill(everything, np.nan)

        def land() -> None:
            target.fill(everything, matrix.read(row, column))
            full.land(2 * int(np.prod(target.shape)))

        self._later(land, f"copy of {target.shape}")

    def gather_load(self, target: Shared, pointers: Pointer) -> None:
        """Each warp's rows."""
        self.warp.pause()
        warp, rows = self.warp, self.warp.part(target.shape[0])
        target.fill(rows, np.nan)
        warp.num_copies += 1

        def land() -> None:
            target.fill(rows, pointers.read())
            warp.num_copies -= 1

        self._later(land, f"rows of {warp.name}")

    def arrive_after_copies(self, full: Barrier, increment_count: bool) -> None:
        """The warp's arrival, once all that it has asked for so far has landed; the count grows by it."""
        assert increment_count
        self.warp.pause()
        full.pending += 1
        warp = self.warp
        self._later(lambda: full.arrive(1), f"arrival of {warp.name}", lambda: warp.num_copies == 0)

    def _later(self, turn: Callable[[], None], name: str, ready: Ready = lambda: True) -> None:
        def do() -> None:
            turn()
            task.done = True

        task = Task(ready, do, name)
        self.program.scheduler.add(task)

    # Barriers: one thread of a group speaks for it, all of them wait.

    def mbarrier_init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def mbarrier_wait(self, barrier: Barrier, parity: Any, pred: Any = True) -> None:
        expected, wanted = int(parity), bool(pred)
        about = f"parity {expected} of {barrier.name}, then in phase {barrier.phase}"
        self.warp.pause(lambda: not wanted or barrier.phase & 1 != expected, about)

    def mbarrier_expect(self, barrier: Barrier, num_bytes: int) -> None:
        self.warp.pause()
        if self.warp.number == 0:
            barrier.bytes += num_bytes
            barrier.arrive(1)

    def mbarrier_arrive(self, barrier: Barrier, count: int, pred: Any = True) -> None:
        self.warp.pause()
        if self.warp.number == 0 and pred:
            barrier.arrive(count)

    # Products.

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False
    ) -> tuple[Product, int]:
        assert is_async
        self.warp.pause()
        warp, products = self.warp, self.warp.group.products
        if warp.num_products == len(products):
            products.append(Product())
        number, product = warp.num_products, products[warp.num_products]
        warp.num_products += 1
        product.asked[warp.number] = a, b, acc if use_acc else None
        if len(product.asked) == len(warp.group.warps):
            before = products[number - 1] if number else None
            name = f"product {number} of {warp.group.name}"
            self._later(product.compute, name, lambda: before is None or bool(before.results))
        return product, warp.number

    def warpgroup_mma_wait(self, num_outstanding: int, deps: Sequence[tuple[Product, int]]) -> Value:
        warp = self.warp
        last = warp.num_products - num_outstanding - 1
        warp.pause(lambda: last < 0 or bool(warp.group.products[last].results))
        ((product, number),) = deps
        return product.results[number]

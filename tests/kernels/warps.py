# SPDX-License-Identifier: Apache-2.0
"""Gluon kernels without a GPU, warp by warp: their own source, under schedules that a GPU shows once in a million.

Each warp is a thread of which one runs at a time. At every access to memory and every barrier another may go on: which,
a seed decides. Bulk copies and matrix products are tasks of their own, done as late or as early as the schedule has it;
what a copy is to fill holds NaN from the moment that it is asked for. So a kernel that reads too early, hands a buffer
back too early, or waits for the wrong phase computes something wrong, or nothing at all, under some seed.

What is taken for granted: a matrix product begins when all four warps of a group have asked for it, products of a group
run one after the other, and each is over for all four warps at once. Nothing else holds the warps of a group together,
not even a change of layout, which may go through shared memory. Fences are taken to be in place, and registers to be
each warp's own: what ptxas makes of them other tests look at.

A tensor's rows are shared out among the warps of a group in equal parts, in order; vectors and numbers each warp has
whole. Only what ``hopper_kernel`` uses of Gluon is here.
"""

import operator
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

COLUMNS = 64
"""Of a part of a matrix in shared memory: parts lie one after the other, as swizzles of 128 bytes have it."""

Ready = Callable[[], bool]


class Deadlock(RuntimeError):
    """Warps wait, and nothing is left that could wake one."""


class Task:
    """Something that goes on by one turn at a time, once it is ready."""

    done = False

    def __init__(self, ready: Ready, turn: Callable[[], None], name: str) -> None:
        self.ready, self.turn, self.name = ready, turn, name
        self.priority = 0.0


class Scheduler:
    """Gives turns by priorities, which change at random: so a warp may fall behind by as much as barriers let it.

    (Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.) A fair
    draw each time, which every second seed makes, hardly ever leaves one warp behind.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_fair = seed % 2 == 1
        self.tasks: list[Task] = []
        self.running: Warp | None = None

    def add(self, task: Task) -> None:
        task.priority = self.random.random()
        self.tasks.append(task)

    def run(self) -> None:
        while self.tasks:
            ready = [task for task in self.tasks if task.ready()]
            if not ready:
                raise Deadlock("; ".join(task.name for task in self.tasks))
            if self.is_fair or self.random.random() < 0.05:
                chosen = self.random.choice(ready)
                chosen.priority = self.random.random()
            else:
                chosen = max(ready, key=lambda task: task.priority)
            chosen.turn()
            if chosen.done:
                self.tasks.remove(chosen)


class Warp(Task):
    """One warp of a group, in a thread that runs only when it is its turn."""

    def __init__(self, group: "Group", number: int, run: Callable[[], None]) -> None:
        super().__init__(lambda: True, self._go_on, f"warp {number} of {group.name}")
        self.group, self.number = group, number
        self.num_products = self.num_atomics = self.num_barriers = self.num_copies = 0
        self._run, self._failed = run, None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._stops = False
        self._thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        self._turn.acquire()
        try:
            if not self._stops:
                self._run()
        except BaseException as error:
            self._failed = error
        self.done = True
        self._back.release()

    def _go_on(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self.group.scheduler.running = self
        self._turn.release()
        self._back.acquire()
        self.group.scheduler.running = None
        if self._failed is not None:
            raise self._failed

    def pause(self, ready: Ready = lambda: True) -> None:
        """Let others go on, at least until it is ready."""
        self.ready = ready
        self._back.release()
        self._turn.acquire()
        if self._stops:
            raise SystemExit

    def stop(self) -> None:
        """End the thread of a schedule that has failed."""
        self._stops = True
        if self._thread.is_alive():
            self._turn.release()
            self._thread.join()

    def part(self, rows: int) -> slice:
        """The rows of a tensor that are this warp's."""
        each = rows // len(self.group.warps)
        return slice(self.number * each, (self.number + 1) * each)


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


class Group:
    """Warps that run one function."""

    def __init__(self, program: "Program", name: str, num_warps: int, run: Callable[[], None]) -> None:
        self.program, self.name, self.scheduler = program, name, program.scheduler
        self.warps = [Warp(self, number, run) for number in range(num_warps)]
        self.products: list[Product] = []
        self.atomics: list[int] = []
        for warp in self.warps:
            self.scheduler.add(warp)


@dataclass
class Program:
    """One program of a launch."""

    scheduler: Scheduler
    number: int
    num_programs: int
    groups: list[Group] = field(default_factory=list)


class Value:
    """A number, or a warp's part of a tensor."""

    def __init__(self, data: Any) -> None:
        self.data = data.data if isinstance(data, Value) else data

    def to(self, dtype: Any) -> "Value":
        return Value(np.asarray(self.data).astype(dtype))

    def __getitem__(self, places: Any) -> "Value":
        return Value(self.data[places])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=Layout())


def _bare(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _add_operators() -> None:
    names = (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "and_",
        "or_",
        "xor",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
    )
    for name in names:
        of = getattr(operator, name)
        python = name.rstrip("_")
        setattr(Value, f"__{python}__", lambda a, b, of=of: Value(of(np.asarray(a.data), _bare(b))))
        setattr(Value, f"__r{python}__", lambda a, b, of=of: Value(of(_bare(b), np.asarray(a.data))))


_add_operators()


class Layout:
    """Any; ``dim`` is the dimension that a slice leaves out."""

    def __init__(self, *_: Any) -> None:
        self.parent = self

    @staticmethod
    def get_default_for(*_: Any) -> "Layout":
        return Layout()


class SliceLayout(Layout):
    def __init__(self, dim: int, parent: Layout) -> None:
        super().__init__()
        self.dim = dim


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory: np.ndarray, places: Any = 0) -> None:
        self.memory, self.places = memory, Value(places)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @staticmethod
    def to(tensor: torch.Tensor) -> "Pointer":
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return Pointer(whole.numpy(), tensor.storage_offset())

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.places + more)

    def read(self, mask: Any = True, other: Any = 0) -> np.ndarray:
        places, wanted = np.broadcast_arrays(self.places.data, _bare(mask))
        assert (places[wanted] >= 0).all()
        assert (places[wanted] < len(self.memory)).all()
        return np.where(wanted, self.memory[np.where(wanted, places, 0)], _bare(other))


@dataclass
class Matrix:
    """A tensor descriptor: boxes of a matrix in memory, zero where they reach past its end."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    box: list[int]
    layout: object = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float16)

    def read(self, row: int, column: int) -> np.ndarray:
        matrix = torch.as_strided(self.base, self.shape, self.strides).numpy()
        assert row >= 0
        assert 0 <= column <= self.shape[1] - self.box[1]
        found = np.zeros(self.box, matrix.dtype)
        inside = matrix[row : row + self.box[0], column : column + self.box[1]]
        found[: len(inside)] = inside
        return found


class Shared:
    """Shared memory seen as tensors, one after the other; of matrices each 64 columns lie together."""

    def __init__(self, scheduler: Scheduler, memory: np.ndarray, shape: Sequence[int], is_turned: bool = False) -> None:
        self.scheduler, self.memory, self.shape, self.is_turned = scheduler, memory, tuple(shape), is_turned
        self.dtype = memory.dtype

    def index(self, i: Any) -> "Shared":
        size, i = int(np.prod(self.shape[1:])), operator.index(i)
        assert 0 <= i < self.shape[0]
        return self.seen_as(self.shape[1:], self.memory[i * size : (i + 1) * size])

    def permute(self, order: tuple[int, int]) -> "Shared":
        assert order == (1, 0)
        return Shared(self.scheduler, self.memory, self.shape, is_turned=True)

    def seen_as(self, shape: Sequence[int], memory: np.ndarray | None = None) -> "Shared":
        return Shared(self.scheduler, self.memory if memory is None else memory, shape)

    def parts(self) -> np.ndarray:
        """[rows, parts, columns of a part], a view."""
        rows, columns = self.shape
        return self.memory.reshape(columns // COLUMNS, rows, COLUMNS).transpose(1, 0, 2)

    def matrix(self) -> np.ndarray:
        found = self.parts().reshape(self.shape)
        return found.T if self.is_turned else found

    def load(self, layout: Layout) -> Value:
        """By warps: of a matrix each its rows."""
        warp = self._warp()
        return Value(self.memory.copy() if len(self.shape) == 1 else self.matrix()[warp.part(self.shape[0])])

    def store(self, value: Value) -> None:
        warp = self._warp()
        if len(self.shape) == 1:
            self.memory[...] = value.data
        else:
            self.fill(warp.part(self.shape[0]), value.data)

    def _warp(self) -> Warp:
        warp = self.scheduler.running
        assert warp is not None
        warp.pause()
        return warp

    def fill(self, rows: slice, data: Any) -> None:
        parts = self.parts()[rows]
        parts[...] = data if np.ndim(data) == 0 else np.reshape(data, parts.shape)


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes have landed."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        assert self.pending >= 0, "more have arrived than are waited for"
        self._turn()

    def land(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Kernel:
    """Stands in for a jitted kernel: ``kernel[(num_programs,)](…)`` runs it under the schedule of a seed."""

    def __init__(self, jitted: Any, seed: int) -> None:
        self.jitted, self.seed = jitted, seed

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            scheduler = Scheduler(self.seed)
            programs = [Program(scheduler, number, grid[0]) for number in range(grid[0])]
            try:
                for program in programs:
                    names = Gluon(program, num_warps).names()
                    rebuilt(self.jitted, names, {})(*map(_argument, args), **constants)
                with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                    scheduler.run()
            finally:
                for task in scheduler.tasks:
                    if isinstance(task, Warp):
                        task.stop()

        return launch


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
        self.program, self._default_warps = program, num_warps

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
    minimum = staticmethod(lambda a, b: Value(np.minimum(_bare(a), _bare(b))))
    maximum = staticmethod(lambda a, b: Value(np.maximum(_bare(a), _bare(b))))
    where = staticmethod(lambda wanted, a, b: Value(np.where(_bare(wanted), _bare(a), _bare(b))))
    exp2 = staticmethod(lambda x: Value(np.exp2(x.data)))
    log2 = staticmethod(lambda x: Value(np.log2(x.data)))
    max = staticmethod(lambda x, axis: Value(x.data.max(axis)))
    sum = staticmethod(lambda x, axis: Value(x.data.sum(axis)))
    zeros_like = staticmethod(lambda x: Value(np.zeros_like(x.data)))
    convert_layout = staticmethod(lambda x, layout: x)

    def full(self, shape: list[int], value: Any, dtype: Any, layout: Layout) -> Value:
        return Value(np.full(shape, _bare(value), dtype))

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
        warp.pause(lambda: all(other.done or other.num_barriers >= number for other in warp.group.warps))

    # Memory.

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Value:
        self.warp.pause()
        return Value(pointer.read(mask, other))

    def store(self, pointer: Pointer, value: Value, mask: Any = True) -> None:
        self.warp.pause()
        places, wanted = np.broadcast_arrays(pointer.places.data, _bare(mask))
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
            barriers = [Barrier() for _ in range(shape[0])]
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
        self.warp.pause(lambda: not wanted or barrier.phase & 1 != expected)

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

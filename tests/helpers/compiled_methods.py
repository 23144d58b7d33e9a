# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel of a method for a GPU that is not present, and return the resource usage of each.

The interpreter accepts code that the compiler refuses, such as a name that changes its type in a loop. Nothing is run
here.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.helpers.batches import random_batch
from tests.helpers.offline_compiler import SHARED_KIB, card, compile_with, resource_usage
from vllm_sparse_kernels.attention import FlashAttention, flash_engine, widest_block
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.layer import Layer, layer_plan, run
from vllm_sparse_kernels.methods import METHODS
from vllm_sparse_kernels.selection.engine import SelectSpec, portable_refusal

Usage = dict[str, Any]
"""Maxima over the variants of a kernel: ``shared_bytes``, ``registers`` of a thread, ``registers_per_program``, and
``stack_bytes`` of a thread, which hold spilled registers; the number of ``variants``, and the ``errors`` of variants
that fail.
"""

FIELDS = ("shared_bytes", "registers", "registers_per_program", "stack_bytes")

HEAD_DIMS = (64, 128, 256, 512)
"""Head dims for which every card's kernels are compiled, or refused."""

MAX_REGISTERS, MAX_PROGRAM_REGISTERS = 255, 1 << 16
"""Registers that a thread and a program can have, on every card (CUDA C++ Programming Guide)."""


def compiled(target: int, head_dim: int, *methods: str) -> dict[str, dict[str, Usage]]:
    """Return ``compiled_kernels`` of methods, by default of all, from a process that does not interpret kernels."""
    return compile_with(compiled_kernels, target, head_dim, methods or tuple(METHODS))


def problems(table: dict[str, dict[str, Usage]], limit_bytes: int) -> dict[str, str]:
    """Return why kernels cannot run on a card with this shared memory, by method and kernel; empty if all can."""
    limits = {
        "shared_bytes": limit_bytes, "registers": MAX_REGISTERS, "registers_per_program": MAX_PROGRAM_REGISTERS
    }  # fmt: skip
    reasons_by_kernel = {}
    for method, kernels in table.items():
        for kernel, usage in kernels.items():
            over = [f"{usage[name]} {name}, the card has {most}" for name, most in limits.items() if usage[name] > most]
            if reasons := [*usage["errors"], *over]:
                reasons_by_kernel[f"{method}: {kernel}"] = "; ".join(reasons)
    return reasons_by_kernel


def compiled_kernels(capability: int, head_dim: int, names: Sequence[str]) -> dict[str, dict[str, Usage]]:
    """Compile the kernels of each method: at its defaults, with everything kept, and along its ladder.

    Each setting runs on the engine ``portable``, and on ``flash`` if its kernels support the layer. FlashAttention's
    own kernels belong to vLLM, and separate tests compile hopper's.

    Args:
        capability: of the card, such as 89.
        head_dim: of the layer, whose dtype is bf16.
        names: methods.

    Returns:
        The usage by method and kernel. Layers that do not fit the card's shared memory stay dense
        (``Fallback.SHARED_MEMORY``), and launch no kernel. The result is empty if no block of keys fits the card, and a
        method has no kernels if none of its settings fits.
    """
    if widest_block(head_dim, SHARED_KIB[capability] << 10) is None:
        return {}
    table: dict[str, dict[str, Usage]] = {}
    batch = random_batch([(3000, 300), (0, 200)], 8, 2, head_dim, page_size=16, dtype=torch.bfloat16)
    for name in names:
        kernels = table[name] = {}
        with card(capability), recorded(kernels):
            launch_all(batch, capability, name)
    return table


def recorded(kernels: dict[str, Usage]) -> ExitStack:
    """Within the context, compile kernels, record their usage, and launch nothing."""
    launch, known = JITFunction.run, set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        usage = kernels.setdefault(self.fn.__name__, {"variants": 0, "errors": []} | dict.fromkeys(FIELDS, 0))
        try:
            compiled = launch(self, *args, grid=grid, warmup=True, **options)
            assert compiled.metadata.target.arch == driver.active.get_current_target().arch
        except Exception as error:  # any error of the compiler: other kernels are still compiled
            usage["errors"].append(f"{type(error).__name__}: {error}"[:500])
            return None
        if compiled.hash not in known:
            known.add(compiled.hash)
            registers, stack_bytes = resource_usage(compiled.asm["cubin"])
            per_program = registers * 32 * compiled.metadata.num_warps
            now = dict(zip(FIELDS, (compiled.metadata.shared, registers, per_program, stack_bytes)))
            usage.update({field: max(usage[field], now[field]) for field in FIELDS})
            usage["variants"] += 1
        return compiled

    stack = ExitStack()
    stack.enter_context(patch.object(JITFunction, "run", compile_only))
    stack.enter_context(patch.object(torch, "empty", torch.zeros))
    return stack


def launch_all(batch: Batch, capability: int, name: str) -> None:
    """Run a layer at each setting of a method."""
    for layer in layers_of(name, batch.cache.head_dim):
        call = layer.new_call(batch.q, batch.cache, batch.rows, batch.scale)
        run(layer, call, torch.zeros_like(batch.q))
        flash = flash_engine(FlashAttention.of_version(3 if capability == 90 else 2, no_attention))
        if layer.options is None and not call.index.has_stripes and batch.cache.head_dim <= 256:
            flash.attend(call, torch.zeros_like(batch.q))


def layers_of(name: str, head_dim: int) -> Iterator[Layer]:
    spec, device = METHODS[name], torch.device("cpu")
    settings = (spec.parameters(), spec.full, *(spec.parameters(**step).group_key for step in spec.ladder))
    for method in dict.fromkeys(settings):
        plan = layer_plan([method] * 8)
        if all(portable_refusal(SelectSpec(group.method, device, head_dim)) is None for group in plan.groups):
            yield replace(Layer.of(plan, head_dim, device), by_kernels=True)
            if name == "a_shape":  # as in layers with streaming heads, whose index has the blocks of top_p
                narrow = METHODS["top_p"].parameters().finest_block_tokens
                yield replace(Layer.of(plan, head_dim, device, block_tokens=narrow), by_kernels=True)


def no_attention(q: torch.Tensor, out: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace FlashAttention's function."""
    return out, torch.zeros(1, len(q))

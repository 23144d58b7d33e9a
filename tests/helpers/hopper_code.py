# SPDX-License-Identifier: Apache-2.0
"""Figures of the Hopper engine's machine code, compiled without a GPU.

A case is a head dim, a block size in tokens, the lists, sinks and pages of 16 tokens, and a dtype.
"""

import re
from collections.abc import Sequence

from tests.helpers.batches import new_index
from tests.helpers.offline_compiler import Code, Recorder, compiling_for

STEPS = [[(300, 200)], [(0, 1), (77, 333), (1000, 129)], [(128, 1024)]]
"""Batches for which one compiled variant of each of the two kernels must be enough."""

WAIT_SCORES, WAIT_VALUES = r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0"


def figures_of(cases: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the figures of hopper by case, compiled by the installed Triton. Does not work in Triton's interpreter."""
    from vllm_sparse_kernels.attention.hopper import engine as hopper

    figures = {}
    for case in cases:
        kernels = hopper.hopper_kernel, hopper.prepare_kernel
        recorders = Recorder(kernels[0]), Recorder(kernels[1])
        hopper.hopper_kernel, hopper.prepare_kernel = recorders
        try:
            with compiling_for():
                for lengths in STEPS:
                    attend(case, lengths)
        finally:
            hopper.hopper_kernel, hopper.prepare_kernel = kernels
        variants = sum(len({id(compiled) for compiled in recorder.compiled}) for recorder in recorders)
        figures[case] = step_figures(Code.of(recorders[0].compiled[0])) | {"variants": variants}
    return figures


def attend(case: str, lengths: Sequence[tuple[int, int]]) -> None:
    """Call hopper once on CPU tensors, with rows of (context_len, query_len)."""
    import torch

    from vllm_sparse_kernels import PagedCache, Rows, StripeLayout
    from vllm_sparse_kernels.attention.hopper import engine as hopper
    from vllm_sparse_kernels.call import Call

    head_dim, block, lists, name = case.split("-")
    dtype, num_heads = {"bf16": torch.bfloat16, "fp16": torch.float16}[name], 8
    contexts, queries = zip(*lengths, strict=True)
    starts = tuple(sum(queries[:i]) for i in range(len(queries)))
    rows = Rows(starts, queries, contexts, torch.zeros(len(lengths), 16, dtype=torch.int32))
    stripes = StripeLayout.per_tile(rows, 64)
    index = new_index(
        rows, num_heads, int(block), dict.fromkeys(range(num_heads), stripes) if "stripes" in lists else None
    )
    page_size = 16 if "pages" in lists else 128
    cache = PagedCache(*torch.zeros(4, page_size, 2, 2 * int(head_dim), dtype=dtype).split(int(head_dim), -1))
    q = torch.zeros(sum(queries), num_heads, int(head_dim), dtype=dtype)
    sinks = torch.zeros(num_heads, dtype=dtype) if "sinks" in lists else None
    hopper.attend(Call(q, cache, index, 1.0), torch.empty_like(q), sinks=sinks)


def exponents(case: str) -> int:
    """Return the exponents per step and thread (of 128): scores are [64, 64] at head_dim 256, otherwise [64, 128]."""
    return 32 if case.startswith("256-") else 64


def step_figures(code: Code) -> dict[str, int]:
    """Return the figures that determine the speed of hopper."""
    begins = [i for i, line in enumerate(code.sass) if re.search(WAIT_SCORES, line)]
    ends = [i for i, line in enumerate(code.sass) if re.search(WAIT_VALUES, line)]
    steps = [(begin, next(end for end in ends if end > begin)) for begin in begins]
    products = code.places(r"HGMMA[\w.]*")
    until = [(begin, next((i for i in products if i > begin), len(code.sass))) for begin in begins]
    return {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "instructions": len(code.sass),
        "overlapped_steps": len(steps),
        "fewest_exponents_beside": min((code.count(r"MUFU\.EX2", *step) for step in steps), default=0),
        "spills_within_steps": sum(code.count("STL|LDL", *step) for step in steps),
        "spills": code.count("STL|LDL"),
        "most_moves": max((code.count(r"PRMT|MOV|IMAD\.MOV[\w.]*", *step) for step in until), default=0),
        "hasty_arrivals": hasty_arrivals(code.sass),
        "barriers_in_data": barriers_in_data(code.sass),
    }


def hasty_arrivals(sass: Sequence[str]) -> int:
    """Count arrivals of a thread at a barrier before other warps have finished their part of a product.

    Each warp waits for its own part of a product. Triton synchronises all warps before the thread arrives, unless it
    finds a barrier shortly before the wait.
    """
    last, count = "BAR.SYNC", 0
    for line in sass:
        if re.search(r"BAR\.SYNC|WARPGROUP\.DEPBAR|HGMMA", line):
            last = line
        elif "SYNCS.ARRIVE" in line:
            count += "BAR.SYNC" not in last
    return count


def barriers_in_data(sass: Sequence[str]) -> int:
    """Count barriers that share memory with data: Triton reuses the memory of a barrier that is no longer used.

    It does not invalidate the barrier first, although PTX requires this. Kernels with such a barrier occasionally gave
    different results on a card with other processes.
    """
    made, data = (
        {match[1] for line in sass if (match := re.search(name + r".*\+(0x\w+)\]", line))}
        for name in (r"SYNCS\.EXCH", r"(?:STS|STSM|LDS|LDSM)\b")
    )
    return len(made & data)

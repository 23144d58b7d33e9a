# SPDX-License-Identifier: Apache-2.0
"""Test cases of SALE and the paper's steps in float64: blocks that are surely kept, and blocks that float32 may
keep."""

import torch

from tests.helpers.batches import every_head, new_index, random_batch
from tests.helpers.method_cases import DEVICE, kept_blocks, row_parts
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.index import SparseIndex
from vllm_sparse_kernels.methods.sale import means as sale_means, method as module, rounding as sale_rounding
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.sale.rounding import RoundedKeys, RoundedQueries
from vllm_sparse_kernels.methods.sale.scores import marks_bytes
from vllm_sparse_kernels.rows import ceil_div
from vllm_sparse_kernels.selection.engine import SelectSpec, hopper_refusal
from vllm_sparse_kernels.selection.slabs import slabs_of

ROUNDING = 1e-4
"""Distance from a half, in steps, within which float32 may round the other way."""
ERROR = 1e-4
"""Error of a score and of the threshold in float32, in units of the softmax's exponent."""


def make_batch(lengths, num_heads=2, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32, **kwargs) -> Batch:
    """Return a batch whose queries and keys have a nonzero mean, which smoothing removes."""
    batch = random_batch(lengths, num_heads, num_kv_heads, head_dim, page_size, dtype, DEVICE, gap_tokens=3, **kwargs)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for x in (batch.q, batch.cache.keys):
        x.add_(torch.randn(x.shape[-2:], generator=generator, device=DEVICE).to(dtype))
    return batch


def regions(method: Sale, position: int, length: int) -> list[tuple[slice, int, int]]:
    """Return (queries, start of the local region, causal 32-key blocks) for each 64-query block of a tile at
    ``position``."""
    blocks = []
    for first in range(0, length, 64):
        queries = slice(first, min(first + 64, length))
        num_blocks = ceil_div(position + queries.stop, 32)
        middle = num_blocks * 32 - method.sink_tokens
        segments = middle // 128
        while segments > 0 and middle - segments * 128 < method.local_tokens:
            segments -= 1
        blocks.append((queries, method.sink_tokens + max(segments, 0) * 128, num_blocks))
    return blocks


def rounded(x: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round [n, d] to 1/7 of the largest magnitude of equal ``groups``. Return it, the steps, and the number of values
    near a half."""
    largest = torch.zeros(int(groups.max()) + 1, dtype=x.dtype, device=x.device)
    largest = largest.scatter_reduce(0, groups, x.abs().amax(1), "amax")
    steps = (largest / 7)[groups]
    in_steps = x / steps[:, None].clamp_min(1e-30)
    near = ((in_steps - in_steps.floor() - 0.5).abs() < ROUNDING).sum(1)
    return in_steps.round() * steps[:, None], steps, near


def compared_as(fits: bool = True) -> torch.dtype:
    """Return the dtype in which the kernel compares scores that fit (or do not fit) half precision."""
    in_half = hopper_refusal(SelectSpec(Sale(), torch.device(DEVICE), 128)) is None
    return torch.float16 if fits and in_half else torch.float32


def definition(batch: Batch, method: Sale, row: int, head: int):
    """Compute the paper's steps in float64. Return (surely, maybe) kept for each tile: bool [64-query blocks, causal
    32-key blocks].

    The two differ if float32 could decide otherwise: by its error, or by integers that round the other way.
    """
    rows, scale = batch.rows, batch.scale
    q, k = row_parts(batch, row, head)
    j = torch.arange(len(k), device=DEVICE)
    smooth_k, smooth_q = k - k.mean(0), q - q.mean(0)
    k4, k_steps, k_near = rounded(smooth_k, j // 32 * 4 + j % 8 // 2)
    q4, q_steps, q_near = rounded(smooth_q, torch.arange(len(q), device=DEVICE))
    for i_tile in rows.tiles_of(row):
        tile = rows.tile_list[i_tile]
        blocks = regions(method, tile.position, tile.length_tokens)
        kept = torch.ones(2, len(blocks), blocks[-1][2], dtype=torch.bool, device=DEVICE)
        for i, (queries, local, num_blocks) in enumerate(blocks):
            first = tile.token - rows.query_starts[row]
            mine, end = slice(first + queries.start, first + queries.stop), tile.position + queries.stop
            exact = q[mine] @ k[:end].T * scale
            exact.masked_fill_(j[:end] > j[end - len(exact) : end, None], -torch.inf)
            sink_local = exact[:, (j[:end] < method.sink_tokens) | (j[:end] >= local)]
            m = sink_local.amax(1, keepdim=True)
            l = (sink_local - m).exp().sum(1, keepdim=True)  # noqa: E741
            middle = slice(method.sink_tokens, local)
            product, bias = q4[mine] @ k4[middle].T, smooth_k[middle] @ q.mean(0)
            estimate = product + bias + (q[mine] @ k.mean(0))[:, None]
            half = compared_as() == torch.float16
            error = ERROR + half * scale * (2**-11 * (product + bias).abs() + 2**-10 * bias.abs())
            error = error + scale * 7 * q_steps[mine, None] * k_steps[middle] * (q_near[mine, None] + k_near[middle])
            for which, sign in enumerate((-1, 1)):
                passed = (estimate * scale + sign * error - m).exp() / l >= method.tau
                kept[which, i, method.sink_tokens // 32 : local // 32] = passed.any(0).view(-1, 32).any(1)
                kept[which, i, num_blocks:] = False
        yield i_tile, kept[0], kept[1]


def assert_agrees(batch: Batch, method: Sale, index: SparseIndex) -> None:
    """Check that every block that the paper's steps surely keep is kept, and no block that they surely drop."""
    kept = total = undecided = 0
    fine = index.block_tokens // 32
    for row in range(batch.rows.num_rows):
        for head in range(batch.num_heads):
            for i_tile, surely, maybe in definition(batch, method, row, head):
                tile = batch.rows.tile_list[i_tile]
                ours = kept_blocks(index, head, i_tile)
                surely, maybe = (
                    torch.nn.functional.pad(x.any(0), (0, len(ours) * fine - x.shape[1])).view(-1, fine).any(1)
                    for x in (surely, maybe)
                )
                diagonal = index.first_diagonal_block(tile)
                assert bool(ours[surely].all()), f"head {head}, tile {i_tile}: lacks {(surely & ~ours).nonzero()}"
                extra = (ours & ~maybe)[:diagonal]
                assert not bool(extra.any()), f"head {head}, tile {i_tile}: {extra.nonzero()} are not to be kept"
                kept, total = kept + int(ours.sum()), total + len(ours)
                undecided += int((surely != maybe).sum())
    assert undecided <= 3 + 0.03 * total, f"{undecided} of {total} blocks prove nothing"
    assert total < 100 or 0.1 < kept / total < 0.9, f"{kept} of {total}: this data tells little"


def rounded_by_kernels(method: Sale, batch: Batch) -> tuple[RoundedQueries, RoundedKeys]:
    """Round all rows, whose keys fit a single slab."""
    index = new_index(batch.rows, batch.num_heads, 32)
    call = batch.call(index, every_head(method, batch.num_heads))
    means = sale_means.row_means(call)
    dtype = module.integer_dtype(batch.q.device)
    (slab,) = slabs_of(batch.rows, batch.num_heads, marks_bytes)
    return sale_rounding.round_queries(call, means, dtype), sale_rounding.round_keys(call, means, slab, dtype)

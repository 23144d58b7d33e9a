"""Random batches over a shuffled paged cache whose unused places are poisoned with NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_sparse_kernels.index import SparseIndex, StripeLayout
from vllm_sparse_kernels.paged import PagedCache
from vllm_sparse_kernels.rows import Rows, ceil_div


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor  # [num_tokens, num_heads, head_dim]
    cache: PagedCache
    rows: Rows
    scale: float

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    def empty_out(self) -> torch.Tensor:
        return torch.full_like(self.q, float("nan"))


def random_batch(
    lengths: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    layout: str = "NHD",
    gap_tokens: int = 0,
) -> Batch:
    """Rows of (context_len, query_len) with standard normal q, k, v.

    Pages are dealt out in random order, with spare ones between; every place of the cache that no position owns is NaN,
    and so are the ``gap_tokens`` tokens of q between rows. Keys and values are halves of one tensor, as in vLLM, of
    physical ``layout`` NHD or HND.
    """
    generator = torch.Generator(device).manual_seed(seed)
    pages_needed = [ceil_div(c + n, page_size) for c, n in lengths]
    num_pages = sum(pages_needed) + 3
    shape = (num_pages, page_size, num_kv_heads, 2 * head_dim)
    if layout == "HND":
        storage = torch.full((shape[0], shape[2], shape[1], shape[3]), float("nan"), dtype=dtype, device=device)
        storage = storage.transpose(1, 2)
    else:
        storage = torch.full(shape, float("nan"), dtype=dtype, device=device)
    keys, values = storage.split(head_dim, -1)
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    # One entry past each row's last page would be outside the cache: reading it is an error that shows.
    block_table = torch.full((len(lengths), max(pages_needed) + 1), num_pages + 7, dtype=torch.int32, device=device)
    tokens, next_token, next_page = [], 0, 0
    for row, (context_len, query_len) in enumerate(lengths):
        pages = order[next_page : next_page + pages_needed[row]]
        block_table[row, : len(pages)] = pages
        positions = torch.arange(context_len + query_len, device=device)
        slots = (pages[positions // page_size].long(), positions % page_size)
        for side in (keys, values):
            new = torch.randn(len(positions), num_kv_heads, head_dim, generator=generator, device=device)
            side[slots] = new.to(dtype)
        tokens.append(next_token)
        next_token += query_len + gap_tokens
        next_page += len(pages)
    q = torch.full((next_token, num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    for token, (_, query_len) in zip(tokens, lengths, strict=True):
        new = torch.randn(query_len, num_heads, head_dim, generator=generator, device=device)
        q[token : token + query_len] = new.to(dtype)
    contexts, queries = zip(*lengths, strict=True)
    rows = Rows(tuple(tokens), tuple(queries), tuple(contexts), block_table)
    return Batch(q, PagedCache(keys, values), rows, head_dim**-0.5)


def repaged(batch: Batch, page_size: int, layout: str = "NHD", seed: int = 1) -> Batch:
    """The same queries, keys and values over other pages."""
    rows, cache = batch.rows, batch.cache
    lengths = list(zip(rows.context_lens, rows.query_lens, strict=True))
    other = random_batch(
        lengths, batch.num_heads, cache.num_kv_heads, cache.head_dim, page_size, batch.q.dtype, str(batch.q.device),
        seed, layout,
    )  # fmt: skip
    for row, seq_len in enumerate(rows.seq_lens):
        positions = torch.arange(seq_len, device=rows.device)
        pages = other.rows.block_table[row, positions // page_size].long()
        for side, values in zip((other.cache.keys, other.cache.values), cache.gather(rows.block_table[row], seq_len)):
            side[pages, positions % page_size] = values
    moved = Rows(rows.tokens, rows.query_lens, rows.context_lens, other.rows.block_table)
    return Batch(batch.q, other.cache, moved, batch.scale)


def random_index(
    batch: Batch, block_tokens: int, density: float, stripes: int = 0, seed: int = 0, share_group: bool = False
) -> SparseIndex:
    """An index of random blocks, each kept with probability ``density``, and up to ``stripes`` random positions a tile.

    With ``share_group`` the query heads of a kv head keep the same blocks.
    """
    rows, num_heads = batch.rows, batch.num_heads
    generator = torch.Generator(rows.device).manual_seed(seed)
    layouts = {h: StripeLayout.per_tile(rows, stripes) for h in range(num_heads)} if stripes else None
    index = SparseIndex.allocate(rows, num_heads, block_tokens, layouts)
    index.block_ids.fill_(-1)
    group = num_heads // batch.cache.num_kv_heads
    kept = torch.empty(0)
    for i_tile, tile in enumerate(rows.tile_list):
        for head in range(num_heads):
            if not share_group or head % group == 0:
                draw = torch.rand(index.num_causal_blocks(tile), generator=generator, device=rows.device)
                kept = draw < density
            index.set_blocks(head, i_tile, kept)
            if stripes and tile.position:
                chosen = torch.randint(
                    0, tile.position, (min(stripes, tile.position),), generator=generator, device=rows.device
                )
                index.set_stripes(head, i_tile, chosen)
    return index

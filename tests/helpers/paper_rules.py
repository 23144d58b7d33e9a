# SPDX-License-Identifier: Apache-2.0
"""Selection rules of four methods, re-expressed from the papers and from the behaviour of released code.

Nothing here uses the package's own references: masks are computed in float64 from whole prompts of one head, one block
of queries at a time, so that tests can compare two independent statements of each rule.
"""

import math

import torch

BLOCK = 128
"""b_q and b_kv of AnchorAttention."""

LOG2_E = math.log2(math.e)


def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the intersection over the union of two masks.

    Args:
        a: Bool, of any shape.
        b: Bool, of the same shape.

    Returns:
        A number from 0 to 1; 1 for two empty masks.
    """
    union = int((a | b).sum())
    return int((a & b).sum()) / union if union else 1.0


def anchor_paper(q: torch.Tensor, k: torch.Tensor, scale: float, theta: float, step: int) -> torch.Tensor:
    """Return the pairs of AnchorAttention's equations 1 to 3, with groups of ``step`` blocks (section 3.4).

    Args:
        q: [n, head_dim] float64, all queries of a prompt.
        k: [n, head_dim] float64.
        scale: Factor from q·k to scores.
        theta: θ.
        step: Blocks of queries that share one selection.

    Returns:
        Bool [n, n], causal.
    """
    num_tokens, keys = len(q), torch.arange(len(q))
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for group_start in range(0, num_tokens, BLOCK * step):
        group_end = min(group_start + BLOCK * step, num_tokens)
        is_anchor = (keys < BLOCK) | (keys >= group_start)
        wanted = torch.zeros(num_tokens, dtype=torch.bool)
        for first in range(group_start, group_end, BLOCK):
            block = slice(first, min(first + BLOCK, group_end))
            positions = keys[block, None]
            scores = (q[block] @ k.T * scale).masked_fill(keys > positions, -torch.inf)
            anchor = scores[:, is_anchor].amax(1).mean()  # avgpool(x_a), equation 1
            wanted |= anchor - k @ q[block].mean(0) * scale <= theta  # equation 2
        mask[group_start:group_end] = is_anchor | (wanted & (keys < group_start))
    return mask.tril_()


def anchor_released(
    q: torch.Tensor, k: torch.Tensor, scale: float, theta: float, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs that AnchorAttention's released code attends.

    The code handles the first multiple of 128 · ``step`` tokens in three passes, and the other queries densely.
    Its first pass covers the first group of keys and the query's own group; its second pass votes on blocks of keys
    from the second block of the prompt to the last but one block before the group, in units of log2.

    Args:
        q: [n, head_dim] float64, all queries of a prompt.
        k: [n, head_dim] float64.
        scale: Factor from q·k to scores.
        theta: ``difference``, in natural units.
        step: Blocks of queries that share one selection.

    Returns:
        Bool [n, n], causal; and bool [n, n], the pairs of the block of keys before each group that no pass visits.
    """
    num_tokens, span = len(q), BLOCK * step
    num_sparse = num_tokens - num_tokens % span
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
    skipped = torch.zeros_like(mask)
    scale2 = scale * LOG2_E
    for group in range(num_sparse // span):
        begin, end = group * span, (group + 1) * span
        mask[begin:end] = False
        # First pass: each block of queries with the keys up to the first group's end, then with its own group's keys.
        maxima = []
        for first in range(begin, end, BLOCK):
            queries = torch.arange(first, first + BLOCK)
            initial_end = min(span, first + BLOCK)
            visited = torch.cat([torch.arange(initial_end), torch.arange(max(begin, initial_end), end)])
            scores2 = q[queries] @ k[visited].T * scale2
            is_causal = visited[None] <= queries[:, None]
            maxima.append(scores2.masked_fill(~is_causal, -1e6).amax(1))
            mask[first : first + BLOCK, visited] = is_causal
        # Second pass: the mean queries of the group against blocks of keys.
        mean_queries = q[begin:end].view(step, BLOCK, -1).mean(1)
        mean_anchors = torch.stack([maximum.mean() for maximum in maxima])
        for first_key in range(BLOCK, begin - BLOCK, BLOCK):
            scores2 = mean_queries @ k[first_key : first_key + BLOCK].T * scale2
            votes = (scores2 + theta * LOG2_E >= mean_anchors[:, None]).sum(0) > 0
            mask[begin:end, first_key : first_key + BLOCK] |= votes
        if begin > span:
            skipped[begin:end, begin - BLOCK : begin] = True
    return mask.tril_(), skipped


def sale_local_blocks(num_blocks: int) -> int:
    """Return the number of 32-key blocks of a local region.

    Without the sink block, whole groups of four blocks are tested from the front. The local region has the other
    blocks, at least four.

    Args:
        num_blocks: Causal 32-key blocks of a block of queries.

    Returns:
        A number of blocks; all but the sink block if there are no more than four others.
    """
    others = num_blocks - 1
    if others <= 4:
        return others
    return 4 + (others - 4) % 4


def sale(
    q: torch.Tensor, k: torch.Tensor, scale: float, tau: float, *, pairs_share: bool, rounds_bias: bool, strict: bool
) -> torch.Tensor:
    """Return the blocks that SALE's Algorithm 1 keeps, with SageAttention-2's quantisation in 4 bits.

    The flags select the ways in which the released code differs from this package.

    Args:
        q: [n, head_dim] float64, all queries of a prompt.
        k: [n, head_dim] float64.
        scale: Factor from q·k to scores.
        tau: τ.
        pairs_share: Whether queries r and r + 8 of each 16 share a scale; otherwise each query has its own.
        rounds_bias: Whether the mean query's part of a score is rounded to an integer in units of both scales.
        strict: Whether a score must exceed the threshold and not only reach it.

    Returns:
        Bool [blocks of 64 queries, blocks of 32 keys].
    """
    num_tokens = len(q)
    mean_q, smooth_k = q.mean(0), k - k.mean(0)
    smooth_q = q - mean_q
    query_scales = smooth_q.abs().amax(1) / 7
    if pairs_share:
        partner = torch.arange(num_tokens) ^ 8
        has_partner = partner < num_tokens
        partner = partner.where(has_partner, torch.arange(num_tokens))
        query_scales = torch.maximum(query_scales, query_scales[partner])
    thread = torch.arange(num_tokens) // 32 * 4 + torch.arange(num_tokens) % 8 // 2
    largest = torch.zeros(int(thread.max()) + 1, dtype=k.dtype)
    largest.scatter_reduce_(0, thread, smooth_k.abs().amax(1), "amax")
    key_scales = (largest / 7)[thread]
    whole_q = (smooth_q / query_scales[:, None]).round()
    whole_k = (smooth_k / key_scales[:, None]).round()
    bias = smooth_k @ mean_q
    num_query_blocks, num_key_blocks = -(-num_tokens // 64), -(-num_tokens // 32)
    kept = torch.zeros(num_query_blocks, num_key_blocks, dtype=torch.bool)
    for i in range(num_query_blocks):
        rows = torch.arange(i * 64, min(i * 64 + 64, num_tokens))
        num_blocks = int(rows[-1]) // 32 + 1
        local_start = (num_blocks - sale_local_blocks(num_blocks)) * 32
        exact_keys = torch.cat([torch.arange(32), torch.arange(max(local_start, 32), int(rows[-1]) + 1)])
        exact_keys = exact_keys[exact_keys <= rows[-1]]
        # Smoothing shifts all scores of a query alike, so it cancels against the threshold.
        scores = q[rows] @ smooth_k[exact_keys].T * scale
        scores = scores.masked_fill(exact_keys[None] > rows[:, None], -torch.inf)
        row_max = scores.amax(1)
        row_sum = (scores - row_max[:, None]).exp().sum(1)
        tested = torch.arange(32, max(local_start, 32))
        steps = query_scales[rows, None] * key_scales[tested]
        additional = bias[tested].expand(len(rows), -1)
        if rounds_bias:
            additional = (additional / steps).round() * steps
        estimate = (whole_q[rows] @ whole_k[tested].T * steps + additional) * scale
        threshold = (row_max + (row_sum * tau).log())[:, None]
        passed = (estimate > threshold) if strict else (estimate >= threshold)
        kept[i, 0] = True
        kept[i, 1 : local_start // 32] = passed.any(0).view(-1, 32).any(1)
        kept[i, local_start // 32 : num_blocks] = True
    return kept


def share_prefill(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, gamma: float, max_sparsity: float, max_distance: float
) -> list[torch.Tensor | None]:
    """Apply SharePrefill's Algorithms 1 to 4 to heads of a single cluster.

    A block has 128 queries and 64 keys. QK is averaged over the pairs that the causal mask leaves.

    Args:
        queries: [num_heads, tokens, head_dim] float64.
        keys: [num_heads, tokens, head_dim] float64, of each query head.
        scale: Factor from q·k to scores.
        gamma: γ.
        max_sparsity: δ.
        max_distance: τ.

    Returns:
        For each head in order, the kept pairs [tokens, tokens] without the causal mask; None where the head takes
        vertical-slash.
    """
    num_tokens = queries.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril_()
    # Algorithm 3 compares the last 128 queries, which may start within a block of the map.
    pairs = _block_sums(causal.double(), 128, 64)
    last_pairs = _block_sums(causal[-128:].double(), 128, 64)
    pivot: tuple[torch.Tensor, torch.Tensor] | None = None
    masks: list[torch.Tensor | None] = []
    for q, k in zip(queries, keys, strict=True):
        scores = (q @ k.T * scale).masked_fill_(~causal, 0)
        estimate = (_block_sums(scores[-128:], 128, 64) / last_pairs)[0].softmax(0)
        uniform = torch.full_like(estimate, 1 / len(estimate))
        if _distance(estimate, uniform) >= max_sparsity:
            masks.append(None)
        elif pivot is None:
            averages = (_block_sums(scores, 128, 64) / pairs).masked_fill(pairs == 0, -math.inf)
            probabilities, order = averages.softmax(1).flatten().sort(descending=True)
            needed = int((probabilities.cumsum(0) < gamma * probabilities.sum()).sum()) + 1
            pattern = torch.zeros(pairs.numel(), dtype=torch.bool)
            pattern[order[:needed]] = True
            pivot = estimate, pattern.view_as(pairs)
            masks.append(torch.ones_like(causal))
        elif _distance(estimate, pivot[0]) < max_distance:
            kept = pivot[1].repeat_interleave(128, 0).repeat_interleave(64, 1)
            masks.append(kept[:num_tokens, :num_tokens])
        else:
            masks.append(None)
    return masks


def minference_lines(
    q: torch.Tensor, k: torch.Tensor, scale: float, num_verticals: int, num_slashes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lines of MInference's Algorithm 2, computed from the last 64 queries.

    Args:
        q: [n, head_dim] float64, all queries of a prompt.
        k: [n, head_dim] float64.
        scale: Factor from q·k to scores.
        num_verticals: k_v.
        num_slashes: k_s.

    Returns:
        Bool [n], whether a key is on a kept vertical; bool [n], whether a distance is a kept slash.
    """
    num_tokens = len(q)
    columns, diagonals = torch.zeros(2, num_tokens, dtype=torch.float64)
    for position in range(max(num_tokens - 64, 0), num_tokens):
        weights = (k[: position + 1] @ q[position] * scale).softmax(0)
        columns[: position + 1] += weights
        diagonals[: position + 1] += weights.flip(0)
    verticals, slashes = torch.zeros(2, num_tokens, dtype=torch.bool)
    verticals[columns.topk(num_verticals).indices] = True
    slashes[diagonals.topk(num_slashes).indices] = True
    return verticals, slashes


def minference(verticals: torch.Tensor, slashes: torch.Tensor, tile: int, block: int) -> torch.Tensor:
    """Return the pairs on MInference's lines, where a slash keeps the whole blocks that it crosses.

    The distance 0 counts as a slash.

    Args:
        verticals: Bool [n], by key.
        slashes: Bool [n], by distance.
        tile: Queries of a block; 1 for single pairs.
        block: Keys of a block; 1 for single pairs.

    Returns:
        Bool [n, n], causal.
    """
    num_tokens = len(verticals)
    mask, keys = torch.zeros(num_tokens, num_tokens, dtype=torch.bool), torch.arange(num_tokens)
    slashes = slashes.index_fill(0, torch.tensor([0]), True)
    padding = -num_tokens % block
    for first in range(0, num_tokens, tile):
        distances = torch.arange(first, min(first + tile, num_tokens))[:, None] - keys
        crossed = (slashes[distances.clamp(min=0)] & (distances >= 0)).any(0)
        blocks = torch.nn.functional.pad(crossed, (0, padding)).view(-1, block).any(1)
        mask[first : first + tile] = blocks.repeat_interleave(block)[:num_tokens] | verticals
    return mask.tril_()


def _block_sums(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the sums of blocks of ``rows`` × ``columns`` values, with smaller blocks at the end."""
    split = [part.sum(0) for part in values.split(rows)]
    return torch.stack([torch.stack([piece.sum() for piece in part.split(columns)]) for part in split])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the square root of the Jensen-Shannon divergence of two positive distributions, in natural logarithms."""
    middle = (a + b) / 2
    entropies = [-(p * p.log()).sum() for p in (a, b, middle)]
    return math.sqrt(max(0.0, float(entropies[2] - (entropies[0] + entropies[1]) / 2)))

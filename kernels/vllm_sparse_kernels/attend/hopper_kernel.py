"""The Gluon kernel of ``hopper``: one producer and two consumer groups, persistent, heaviest work first.

A work item is one (query head, tile). The producer takes items off a counter, loads a tile's queries and then its keys
and values step by step, 128 keys a step: one block of 128, two of 64 or four of 32 by bulk copies, or 128 stripes
gathered. Each consumer group owns 64 of the tile's queries. While one step's scores go through the softmax, the product
of the step before with its values runs; while the consumers write an item out, the producer loads the next one.

An item's steps run from the diagonal backwards, then through the stripes:

    step 0            the list's last blocks, as many as leave whole steps before it; always masked
    masked steps      further blocks that touch the diagonal (tiles may lie askew)
    block steps       all queries see all keys
    stripe steps      the last one, where it is not full, masked

ptxas likes to hoist the wait for P·V above all exponents of the step, which undoes the overlap. Waiting for the next
step's keys between the two keeps it where it stands, with every Triton from 3.6 to 3.9; a test reads that off the SASS.
"""

from vllm_sparse_kernels.gluon_names import (
    async_copy,
    barrier,
    bulk_load,
    fence_async_shared,
    gather_load,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STEP = gl.constexpr(128)
"""Keys of a step."""

HALF = gl.constexpr(64)
"""Queries of a consumer group, and the columns of 16 bits that shared memory's swizzle of 128 bytes spans."""

SWEEP = gl.constexpr(8)
"""Rows of a swizzled atom: the smallest piece of a step that is a tile of its own."""

WORDS = gl.constexpr(8)
"""Room for what the producer tells of an item: head, first token, number and position of queries, blocks, stripes."""

MINUS_INFINITY = gl.constexpr(float("-inf"))
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _item(index, order, rank, num_tiles, NUM_HEADS: gl.constexpr, FIELDS: gl.constexpr):
    """What a rank of the order stands for; past the last one, anything."""
    entry = gl.load(order + rank, mask=rank < num_tiles * NUM_HEADS, other=0)
    i_head, i_tile = entry % NUM_HEADS, entry // NUM_HEADS
    fields = index.tiles + i_tile * FIELDS
    token, length, first = gl.load(fields + 1), gl.load(fields + 2), gl.load(fields + 3)
    num_blocks = gl.load(index.block_counts + i_head * num_tiles + i_tile)
    num_stripes = gl.load(index.stripe_counts + i_head * num_tiles + i_tile)
    return i_head, i_tile, token, length, first, num_blocks, num_stripes


@gluon.jit
def _first_step(num_blocks, BLOCKS: gl.constexpr):
    """How many blocks step 0 takes, so that whole steps are left."""
    return (num_blocks - 1) % BLOCKS + 1


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, cache, matrix, index, lists, counter, num_tiles, buffers, barriers,
    GROUP: gl.constexpr, SHAPE: gl.constexpr, STRIPES: gl.constexpr,
):  # fmt: skip
    """Takes items off the counter and loads what they need, until none is left.

    What the next item is has been looked up by the time that its turn comes: three loads, each for the next one.
    """
    NUM_HEADS: gl.constexpr = SHAPE[0]
    BLOCK_N: gl.constexpr = SHAPE[1]
    D: gl.constexpr = SHAPE[2]
    FIELDS: gl.constexpr = SHAPE[4]
    places, stripe_places, order = lists
    q_tiles, k_pieces, v_pieces, items = buffers
    q_full, q_empty = barriers[0], barriers[1]
    loaded = (k_pieces, v_pieces, barriers)
    i_item, i_step, num_mended = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    rank = gl.program_id(0)
    following = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    i_head, i_tile, token, length, first, num_blocks, num_stripes = _item(
        index, order, rank, num_tiles, NUM_HEADS, FIELDS
    )
    while rank < num_tiles * NUM_HEADS:
        rank = following
        following = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        i_kv = i_head // GROUP
        slot = i_item % 2
        mbarrier.wait(q_empty.index(slot), (i_item // 2 & 1) ^ 1)
        _publish(items, slot, i_head, token, length, first, num_blocks, num_stripes)
        mbarrier.expect(q_full.index(slot), 2 * HALF * D * 2)
        column = i_head * matrix.columns_per_query_head
        for half in gl.static_range(2):
            for part in gl.static_range(D // HALF):
                target = q_tiles.index((slot * 2 + half) * (D // HALF) + part)
                bulk_load(q_desc, [token + half * HALF, column + part * HALF], q_full.index(slot), target)

        listed = places + i_head.to(gl.int64) * index.stride_blocks + gl.load(index.block_offsets + i_tile)
        offset, column = i_kv * matrix.rows_per_head, i_kv * matrix.columns_per_head
        # Past the row's end the cache holds anything, NaN too, and 0 · NaN would still be NaN.
        row_end = gl.load(index.seq_lens + gl.load(index.tiles + i_tile * FIELDS))
        tail = row_end - (first + length - 1) // BLOCK_N * BLOCK_N
        mends = tail < BLOCK_N
        where = (listed, num_blocks, offset, column)
        _load_first_step(k_desc, v_desc, loaded, i_step, where, tail, num_mended & 1, SHAPE)
        num_mended += mends.to(gl.int32)
        rest = _first_step(num_blocks, STEP // BLOCK_N)
        num_steps = 1 + (num_blocks - rest) // (STEP // BLOCK_N)
        for i in range(1, num_steps):
            begin = num_blocks - rest - i * (STEP // BLOCK_N)
            _load_step(k_desc, v_desc, loaded, i_step + i, where, begin, SHAPE)
        i_step += num_steps
        if STRIPES:
            listed = stripe_places + gl.load(index.stripe_offsets + i_head * num_tiles + i_tile)
            o_head = i_kv.to(gl.int64) * cache.stride_head
            sources = (cache.k + o_head, cache.v + o_head, cache.stride_token)
            i_step = _gather_steps(sources, listed, num_stripes, loaded, i_step, SHAPE)
        i_item += 1
        i_head, i_tile, token, length, first, num_blocks, num_stripes = _item(
            index, order, rank, num_tiles, NUM_HEADS, FIELDS
        )
    slot = i_item % 2
    mbarrier.wait(q_empty.index(slot), (i_item // 2 & 1) ^ 1)
    none = gl.to_tensor(0)
    _publish(items, slot, none - 1, none, none, none, none, none)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def _publish(items, slot, i_head, token, length, first, num_blocks, num_stripes):
    """Tell the consumers what an item is; what signals it comes after."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = (i_head, token, length, first, num_blocks, num_stripes)
    for i in gl.static_range(6):
        items.index(slot * WORDS + i).store(gl.full([1], words[i], gl.int32, layout))
    barrier()


@gluon.jit
def _published(items, slot, WORD: gl.constexpr):
    return gl.max(items.index(slot * WORDS + WORD).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _load_first_step(k_desc, v_desc, loaded, i_step, where, tail, parity, SHAPE: gl.constexpr):
    """Step 0: the list's last blocks. What is past the row's end of its values is zeroed before the consumers see it.

    Where the blocks do not fill the step, the last one stands in for the missing ones; they are masked.
    """
    BLOCK_N: gl.constexpr = SHAPE[1]
    D: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    num_blocks = where[1]
    rest = _first_step(num_blocks, STEP // BLOCK_N)
    if tail >= BLOCK_N:
        _load_step(k_desc, v_desc, loaded, i_step, where, num_blocks - rest, SHAPE)
    else:
        k_pieces, v_pieces, barriers = loaded
        k_full, k_empty, v_full, v_empty = barriers[2], barriers[3], barriers[4], barriers[5]
        mended = barriers[6]
        stage, empty = i_step % STAGES, (i_step // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), empty)
        _load_blocks(k_desc, where, num_blocks - rest, k_full.index(stage), k_pieces, stage, BLOCK_N, D)
        mbarrier.wait(v_empty.index(stage), empty)
        _load_blocks(v_desc, where, num_blocks - rest, mended.index(0), v_pieces, stage, BLOCK_N, D)
        mbarrier.wait(mended.index(0), parity)
        _clear_rows(v_pieces, stage, (rest - 1) * BLOCK_N + tail, D)
        mbarrier.arrive(v_full.index(stage), count=1)


@gluon.jit
def _load_step(k_desc, v_desc, loaded, i_step, where, begin, SHAPE: gl.constexpr):
    """Keys and values of the blocks from ``begin`` of the list on."""
    BLOCK_N: gl.constexpr = SHAPE[1]
    D: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    k_pieces, v_pieces, barriers = loaded
    k_full, k_empty, v_full, v_empty = barriers[2], barriers[3], barriers[4], barriers[5]
    stage, empty = i_step % STAGES, (i_step // STAGES & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), empty)
    _load_blocks(k_desc, where, begin, k_full.index(stage), k_pieces, stage, BLOCK_N, D)
    mbarrier.wait(v_empty.index(stage), empty)
    _load_blocks(v_desc, where, begin, v_full.index(stage), v_pieces, stage, BLOCK_N, D)


@gluon.jit
def _load_blocks(desc, where, begin, full, pieces, stage, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """As 64-column parts: a part of a step is [128, 64], which its blocks fill one after the other."""
    listed, num_blocks, offset, column = where
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], pieces.dtype)
    PARTS: gl.constexpr = D // HALF
    NUM: gl.constexpr = STEP // BLOCK_N
    tiles = reinterpret(pieces, pieces.dtype, [pieces.shape[0] * SWEEP // BLOCK_N, BLOCK_N, HALF], layout)
    mbarrier.expect(full, STEP * D * 2)
    for j in gl.static_range(NUM):
        place = gl.load(listed + gl.minimum(begin + j, num_blocks - 1)) + offset
        for part in gl.static_range(PARTS):
            bulk_load(desc, [place, column + part * HALF], full, tiles.index((stage * PARTS + part) * NUM + j))


@gluon.jit
def _clear_rows(pieces, stage, valid, D: gl.constexpr):
    """Zero the rows from ``valid`` on of a step that has arrived, and hand it to the matrix units."""
    PARTS: gl.constexpr = D // HALF
    NUM: gl.constexpr = STEP // SWEEP
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_m = gl.arange(0, SWEEP, gl.SliceLayout(1, layout))
    for i in range(valid // SWEEP, NUM):
        for part in gl.static_range(PARTS):
            piece = pieces.index((stage * PARTS + part) * NUM + i)
            b_x = piece.load(layout)
            kept = (i * SWEEP + o_m < valid)[:, None]
            piece.store(gl.where(kept, b_x, gl.zeros_like(b_x)))
    fence_async_shared()
    barrier()


@gluon.jit
def _gather_steps(sources, listed, num_stripes, loaded, i_step, SHAPE: gl.constexpr):
    """All stripes of an item, 128 a step; returns the number of the step after them.

    Rows are looked up a step ahead, before there is room for them.
    """
    D: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    k_pieces, v_pieces, barriers = loaded
    k_full, k_empty, v_full, v_empty = barriers[2], barriers[3], barriers[4], barriers[5]
    k, v, stride_token = sources
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_n = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    num_steps = (num_stripes + STEP - 1) // STEP
    b_row = gl.load(listed + gl.minimum(o_n, gl.maximum(num_stripes - 1, 0)), mask=o_n < num_steps * STEP, other=0)
    for i in range(num_steps):
        stage, empty = i_step % STAGES, (i_step // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), empty)
        _gather(k, b_row, stride_token, k_pieces, stage, D)
        _arrive_gathered(k_full.index(stage))
        b_next = gl.load(listed + gl.minimum((i + 1) * STEP + o_n, num_stripes - 1))
        mbarrier.wait(v_empty.index(stage), empty)
        _gather(v, b_row, stride_token, v_pieces, stage, D)
        _arrive_gathered(v_full.index(stage))
        b_row = b_next
        i_step += 1
    return i_step


@gluon.jit
def _gather(source, b_row, stride_token, pieces, stage, D: gl.constexpr):
    """Rows of the cache, as 64-column parts of a step."""
    PARTS: gl.constexpr = D // HALF
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, HALF], pieces.dtype)
    tiles = reinterpret(pieces, pieces.dtype, [pieces.shape[0] * SWEEP // STEP, STEP, HALF], shared)
    o_d = gl.arange(0, HALF, gl.SliceLayout(0, b_row.type.layout.parent))
    o_row = (b_row.to(gl.int64) * stride_token)[:, None] + o_d[None, :]
    for part in gl.static_range(PARTS):
        gather_load(tiles.index(stage * PARTS + part), source + part * HALF + o_row)


@gluon.jit
def _arrive_gathered(full):
    """Signal a step once every thread's copies have landed: each adds itself to the count, and then one arrives."""
    async_copy.mbarrier_arrive(full, increment_count=True)
    barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _consume(
    out, scale, buffers, barriers, W: gl.constexpr, SHAPE: gl.constexpr, STRIPES: gl.constexpr
):  # fmt: skip
    """Queries [64 W, 64 W + 64) of every item's tile."""
    BLOCK_N: gl.constexpr = SHAPE[1]
    D: gl.constexpr = SHAPE[2]
    BLOCKS: gl.constexpr = STEP // BLOCK_N
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    STAGES: gl.constexpr = SHAPE[3]
    q_tiles, k_steps, v_steps, items = buffers
    q_full, q_empty = barriers[0], barriers[1]
    kv = (k_steps, v_steps, barriers[2], barriers[3], barriers[4], barriers[5])
    k_full = barriers[2]
    k_empty = barriers[3]
    i_item, i_step = gl.to_tensor(0), gl.to_tensor(0)
    mbarrier.wait(q_full.index(0), 0)
    i_head = _published(items, 0, 0)
    while i_head >= 0:
        slot = i_item % 2
        q = q_tiles.index(slot * 2 + W)
        token, length = _published(items, slot, 1), _published(items, slot, 2)
        first, num_blocks = _published(items, slot, 3), _published(items, slot, 4)
        rest = _first_step(num_blocks, BLOCKS)
        num_steps = (num_blocks - rest) // BLOCKS + 1
        last_block = (first + length - 1) // BLOCK_N
        num_diagonal = last_block - first // BLOCK_N + 1
        num_masked = 1 + (gl.maximum(num_diagonal - rest, 0) + BLOCKS - 1) // BLOCKS
        last = i_step + num_steps
        num_stripes = 0
        if STRIPES:
            num_stripes = _published(items, slot, 5)
            last += (num_stripes + STEP - 1) // STEP
        diagonal = (last_block, num_diagonal, first + W * HALF)

        stage = i_step % STAGES
        mbarrier.wait(k_full.index(stage), i_step // STAGES & 1)
        zero = gl.zeros([HALF, STEP], gl.float32, s_layout)
        b_s = warpgroup_mma(q, k_steps.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        b_s = _mask_diagonal(b_s, rest, diagonal, BLOCK_N)
        b_max = gl.max(b_s, 1) * scale
        b_p = gl.exp2(b_s * scale - _finite(b_max)[:, None])
        b_sum = gl.sum(b_p, 1)
        b_p = gl.convert_layout(b_p.to(k_steps.dtype), gl.DotOperandLayout(0, o_layout, 2))
        b_acc = gl.zeros([HALF, D], gl.float32, o_layout)
        i_step += 1
        mbarrier.wait(k_full.index(i_step % STAGES), i_step // STAGES & 1, pred=i_step < last)

        for i in range(1, num_masked):
            where = (rest + i * BLOCKS, diagonal)
            b_p, b_acc, b_max, b_sum = _step(
                q, kv, i_step, last, scale, where, b_p, b_acc, b_max, b_sum, "diagonal", False, STAGES, BLOCK_N
            )
            i_step += 1
        for _ in range(num_masked, num_steps):
            b_p, b_acc, b_max, b_sum = _step(
                q, kv, i_step, last, scale, None, b_p, b_acc, b_max, b_sum, None, False, STAGES, BLOCK_N
            )
            i_step += 1
        if STRIPES:
            for _ in range(num_stripes // STEP):
                b_p, b_acc, b_max, b_sum = _step(
                    q, kv, i_step, last, scale, None, b_p, b_acc, b_max, b_sum, None, True, STAGES, BLOCK_N
                )
                i_step += 1
            if num_stripes % STEP != 0:
                b_p, b_acc, b_max, b_sum = _step(
                    q, kv, i_step, last, scale, num_stripes % STEP, b_p, b_acc, b_max, b_sum,
                    "stripes", True, STAGES, BLOCK_N,
                )  # fmt: skip
                i_step += 1
        mbarrier.arrive(q_empty.index(slot), count=1)
        b_acc = _last_product(kv, i_step - 1, b_p, b_acc, STRIPES, STAGES)
        _write(out, i_head, token + W * HALF, length - W * HALF, b_acc, b_max, b_sum, D)
        i_item += 1
        mbarrier.wait(q_full.index(i_item % 2), i_item // 2 & 1)
        i_head = _published(items, i_item % 2, 0)


@gluon.jit
def _step(
    q, kv, i_step, last, scale, where, b_p, b_acc, b_max, b_sum, MASK: gl.constexpr, GATHERED: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Scores of this step beside the product of the step before; this step's keys have arrived."""
    k_steps, v_steps, k_full, k_empty, v_full, v_empty = kv
    stage, before = i_step % STAGES, (i_step - 1) % STAGES
    if GATHERED:
        fence_async_shared()
    zero = gl.zeros([HALF, STEP], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16]))
    s_token = warpgroup_mma(q, k_steps.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (i_step - 1) // STAGES & 1)
    if GATHERED:
        fence_async_shared()
    acc_token = warpgroup_mma(b_p, v_steps.index(before), b_acc, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(s_token,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK == "diagonal":
        b_s = _mask_diagonal(b_s, where[0], where[1], BLOCK_N)
    elif MASK == "stripes":
        o_n = gl.arange(0, STEP, gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where((o_n < where)[None, :], b_s, MINUS_INFINITY)
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale)
    shift = _finite(b_new) if MASK == "diagonal" else b_new
    b_scale = gl.exp2(b_max - shift)
    b_next = gl.exp2(b_s * scale - shift[:, None])
    b_sum = b_sum * b_scale + gl.sum(b_next, 1)
    b_next = gl.convert_layout(b_next.to(k_steps.dtype), b_p.type.layout)
    following = i_step + 1
    mbarrier.wait(k_full.index(following % STAGES), following // STAGES & 1, pred=following < last)
    b_acc = warpgroup_mma_wait(0, deps=(acc_token,))
    mbarrier.arrive(v_empty.index(before), count=1)
    b_acc = b_acc * gl.convert_layout(b_scale, gl.SliceLayout(1, b_acc.type.layout))[:, None]
    return b_next, b_acc, b_new, b_sum


@gluon.jit
def _finite(b_max):
    """A query that has seen no key yet has a maximum of −∞, and −∞ − (−∞) would be NaN."""
    return gl.where(b_max == MINUS_INFINITY, 0.0, b_max)


@gluon.jit
def _mask_diagonal(b_s, to_end, diagonal, BLOCK_N: gl.constexpr):
    """Scores of the step that begins ``to_end`` blocks before the list's end, −∞ where a key is later than the query.

    The list ends with the diagonal's blocks, one after the other; what is before them is seen whole. Columns past the
    list's end come out as keys past the last block.
    """
    last_block, num_diagonal, first = diagonal
    o_m = gl.arange(0, HALF, gl.SliceLayout(1, b_s.type.layout))
    o_n = gl.arange(0, STEP, gl.SliceLayout(0, b_s.type.layout))
    b_before_last = to_end - 1 - o_n // BLOCK_N  # [STEP] blocks from this one to the list's last
    b_key = (last_block - b_before_last) * BLOCK_N + o_n % BLOCK_N
    b_key = gl.where(b_before_last < num_diagonal, b_key, 0)
    return gl.where(b_key[None, :] <= (first + o_m)[:, None], b_s, MINUS_INFINITY)


@gluon.jit
def _last_product(kv, i_step, b_p, b_acc, STRIPES: gl.constexpr, STAGES: gl.constexpr):
    _, v_steps, _, _, v_full, v_empty = kv
    stage = i_step % STAGES
    mbarrier.wait(v_full.index(stage), i_step // STAGES & 1)
    if STRIPES:
        fence_async_shared()
    token = warpgroup_mma(b_p, v_steps.index(stage), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return b_acc


@gluon.jit
def _write(out, i_head, token, length, b_acc, b_max, b_sum, D: gl.constexpr):
    """Outputs and, where asked for, log-sum-exps of a consumer's queries, as far as the tile has any."""
    o_m = gl.arange(0, HALF, gl.SliceLayout(1, b_acc.type.layout))
    b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, b_acc.type.layout))
    b_out = (b_acc / b_total[:, None]).to(out.out.dtype.element_ty)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_out = gl.convert_layout(b_out, layout)
    o_r = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    o_out = (token + o_r).to(gl.int64) * out.stride_token + i_head * out.stride_head
    gl.store(out.out + o_out[:, None] + o_d[None, :], b_out, mask=(o_r < length)[:, None])
    if out.lse is not None:
        b_lse = (gl.convert_layout(b_max, gl.SliceLayout(1, b_acc.type.layout)) + gl.log2(b_total)) * LN_2
        target = out.lse + i_head.to(gl.int64) * out.stride_lse_head + token + o_m
        gl.store(target, b_lse, mask=o_m < length)


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_kernel(
    q_desc, k_desc, v_desc, out, cache, matrix, index, lists, counter, num_tiles, scale,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    FIELDS: gl.constexpr, STRIPES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    PARTS: gl.constexpr = D // HALF
    SHAPE: gl.constexpr = (NUM_HEADS, BLOCK_N, D, STAGES, FIELDS)
    step_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, D], dtype)
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], dtype)
    piece_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SWEEP, HALF], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    q_tiles = gl.allocate_shared_memory(dtype, [2 * 2 * PARTS, HALF, HALF], half_layout)
    k_steps = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], step_layout)
    v_steps = gl.allocate_shared_memory(dtype, [STAGES, STEP, D], step_layout)
    items = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], word)
    PIECES: gl.constexpr = STAGES * PARTS * (STEP // SWEEP)
    k_pieces = reinterpret(k_steps, dtype, [PIECES, SWEEP, HALF], piece_layout)
    v_pieces = reinterpret(v_steps, dtype, [PIECES, SWEEP, HALF], piece_layout)
    q_halves = reinterpret(q_tiles, dtype, [2 * 2, HALF, D], q_layout)

    q_full = _barriers(2, 1)
    q_empty = _barriers(2, 2)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    mended = _barriers(1, 1)
    fence_async_shared()
    barrier()
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, mended)
    consumed = (q_halves, k_steps, v_steps, items)
    produced = (q_tiles, k_pieces, v_pieces, items)
    # Gathering takes a warp group of producers; registers are handed out by groups, 512 a thread for all three.
    WARPS: gl.constexpr = 4 if STRIPES else 1
    CONSUMER_REGISTERS: gl.constexpr = 232 if STRIPES else 240
    REGISTERS: gl.constexpr = 40 if STRIPES else 24
    gl.warp_specialize(
        [
            (_consume, (out, scale, consumed, barriers, 0, SHAPE, STRIPES)),
            (_consume, (out, scale, consumed, barriers, 1, SHAPE, STRIPES)),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, cache, matrix, index, lists, counter, num_tiles, produced, barriers,
                    GROUP, SHAPE, STRIPES,
                ),
            ),
        ],
        [4, WARPS],
        [CONSUMER_REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars

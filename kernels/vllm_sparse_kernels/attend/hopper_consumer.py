# SPDX-License-Identifier: Apache-2.0
"""A consumer group of ``hopper_kernel``: the online softmax over an item's steps, for 64 of its tile's queries."""

from vllm_sparse_kernels.attend.hopper_item import HALF, first_step, published
from vllm_sparse_kernels.gluon_names import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait

MINUS_INFINITY = gl.constexpr(float("-inf"))
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def consume(
    out, scale, buffers, barriers, W: gl.constexpr, SHAPE: gl.constexpr, STRIPES: gl.constexpr
):  # fmt: skip
    """Queries [64 W, 64 W + 64) of every item's tile."""
    D: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    SLOTS: gl.constexpr = SHAPE[6]
    q_tiles, k_steps, v_steps, items = buffers
    q_full, q_empty = barriers[0], barriers[1]
    turns = (barriers[7].index(W), barriers[7].index(1 - W))
    kv = (k_steps, v_steps, barriers[2], barriers[3], barriers[4], barriers[5], turns)
    i_item, i_step = gl.to_tensor(0), gl.to_tensor(0)
    mbarrier.wait(q_full.index(0), 0)
    i_head = published(items, 0, 0)
    while i_head >= 0:
        slot = i_item % SLOTS
        q = q_tiles.index(slot * 2 + W)
        token, length = published(items, slot, 1), published(items, slot, 2)
        walk = _walk_of(items, slot, length, i_step, W, SHAPE, STRIPES)
        b_p, b_acc, b_max, b_sum, i_step = _first_scores(q, kv, i_step, scale, walk, SHAPE, STRIPES)
        b_p, b_acc, b_max, b_sum, i_step = _block_steps(
            q, kv, i_step, scale, walk, b_p, b_acc, b_max, b_sum, SHAPE, STRIPES
        )
        if STRIPES:
            b_p, b_acc, b_max, b_sum, i_step = _stripe_steps(
                q, kv, i_step, scale, walk, b_p, b_acc, b_max, b_sum, SHAPE
            )
        mbarrier.arrive(q_empty.index(slot), count=1)
        b_acc = _last_product(kv, i_step - 1, b_p, b_acc, STRIPES, STAGES)
        _write(out, i_head, token + W * HALF, length - W * HALF, b_acc, b_max, b_sum, D)
        i_item += 1
        mbarrier.wait(q_full.index(i_item % SLOTS), i_item // SLOTS & 1)
        i_head = published(items, i_item % SLOTS, 0)


@gluon.jit
def _walk_of(
    items, slot, length, i_step, W: gl.constexpr, SHAPE: gl.constexpr, STRIPES: gl.constexpr
):  # fmt: skip
    """Of an item's steps: blocks of step 0, steps over blocks, those of them that are masked, stripes, the number of
    the step after all of them, and what ``_mask_diagonal`` asks for."""
    BLOCK_N: gl.constexpr = SHAPE[1]
    STEP: gl.constexpr = SHAPE[5]
    BLOCKS: gl.constexpr = STEP // BLOCK_N
    first, num_blocks = published(items, slot, 3), published(items, slot, 4)
    rest = first_step(num_blocks, BLOCKS)
    num_steps = (num_blocks - rest) // BLOCKS + 1
    last_block = (first + length - 1) // BLOCK_N
    num_diagonal = last_block - first // BLOCK_N + 1
    num_masked = 1 + (gl.maximum(num_diagonal - rest, 0) + BLOCKS - 1) // BLOCKS
    last = i_step + num_steps
    num_stripes = 0
    if STRIPES:
        num_stripes = published(items, slot, 5)
        last += (num_stripes + STEP - 1) // STEP
    return rest, num_steps, num_masked, num_stripes, last, (last_block, num_diagonal, first + W * HALF)


@gluon.jit
def _first_scores(q, kv, i_step, scale, walk, SHAPE: gl.constexpr, STRIPES: gl.constexpr):
    """Exponents, an empty sum of products, maxima and sums after step 0, whose product with values is still to come."""
    k_steps, v_steps, k_full, k_empty, _, _, turns = kv
    D: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    STEP: gl.constexpr = SHAPE[5]
    stage = i_step % STAGES
    mbarrier.wait(k_full.index(stage), i_step // STAGES & 1)
    zero = gl.zeros([HALF, STEP], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16]))
    _take_turn(turns, i_step, SHAPE)
    b_s = warpgroup_mma(q, k_steps.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    _pass_turn(turns, SHAPE)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    b_s = _mask_diagonal(b_s, walk[0], walk[5], SHAPE[1])
    b_max = gl.max(b_s, 1) * scale
    b_p = gl.exp2(b_s * scale - _finite(b_max)[:, None])
    b_sum = _sums(b_p, STRIPES)
    b_acc = gl.zeros([HALF, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    if STRIPES:
        b_p = _operand(b_p, b_acc, v_steps)
    i_step += 1
    mbarrier.wait(k_full.index(i_step % STAGES), i_step // STAGES & 1, pred=i_step < walk[4])
    return b_p, b_acc, b_max, b_sum, i_step


@gluon.jit
def _block_steps(
    q, kv, i_step, scale, walk, b_p, b_acc, b_max, b_sum, SHAPE: gl.constexpr, STRIPES: gl.constexpr
):  # fmt: skip
    """The other steps over blocks, masked ones first."""
    rest, num_steps, num_masked, _, last, diagonal = walk
    BLOCKS: gl.constexpr = SHAPE[5] // SHAPE[1]
    for i in range(1, num_masked):
        where = (rest + i * BLOCKS, diagonal)
        b_p, b_acc, b_max, b_sum = _step(
            q, kv, i_step, last, scale, where, b_p, b_acc, b_max, b_sum, "diagonal", False, STRIPES, SHAPE
        )
        i_step += 1
    for _ in range(num_masked, num_steps):
        b_p, b_acc, b_max, b_sum = _step(
            q, kv, i_step, last, scale, None, b_p, b_acc, b_max, b_sum, None, False, STRIPES, SHAPE
        )
        i_step += 1
    return b_p, b_acc, b_max, b_sum, i_step


@gluon.jit
def _stripe_steps(q, kv, i_step, scale, walk, b_p, b_acc, b_max, b_sum, SHAPE: gl.constexpr):
    """Steps over stripes; the last one, where it is not full, is masked."""
    num_stripes, last = walk[3], walk[4]
    STEP: gl.constexpr = SHAPE[5]
    for _ in range(num_stripes // STEP):
        b_p, b_acc, b_max, b_sum = _step(
            q, kv, i_step, last, scale, None, b_p, b_acc, b_max, b_sum, None, True, True, SHAPE
        )
        i_step += 1
    if num_stripes % STEP != 0:
        b_p, b_acc, b_max, b_sum = _step(
            q, kv, i_step, last, scale, num_stripes % STEP, b_p, b_acc, b_max, b_sum, "stripes", True, True, SHAPE
        )
        i_step += 1
    return b_p, b_acc, b_max, b_sum, i_step


@gluon.jit
def _step(
    q, kv, i_step, last, scale, where, b_p, b_acc, b_max, b_sum, MASK: gl.constexpr, GATHERED: gl.constexpr,
    STRIPES: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Scores of this step beside the product of the step before; this step's keys have arrived.

    Exponents go from step to step in float32, in the registers that their scores had, and become an operand only here:
    rounded at once, they would take 32 registers beside those that the product before still reads, and 32 moves a step.
    (That made 3 % of the time.) The variant for stripes has too few registers for it, and rounds at once.
    """
    k_steps, v_steps, k_full, k_empty, v_full, v_empty, turns = kv
    STAGES: gl.constexpr = SHAPE[3]
    STEP: gl.constexpr = SHAPE[5]
    stage, before = i_step % STAGES, (i_step - 1) % STAGES
    if GATHERED:
        fence_async_shared()
    zero = gl.zeros([HALF, STEP], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16]))
    b_p = _operand(b_p, b_acc, v_steps)
    _take_turn(turns, i_step, SHAPE)
    s_token = warpgroup_mma(q, k_steps.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (i_step - 1) // STAGES & 1)
    if GATHERED:
        fence_async_shared()
    acc_token = warpgroup_mma(b_p, v_steps.index(before), b_acc, is_async=True)
    _pass_turn(turns, SHAPE)
    b_s = warpgroup_mma_wait(1, deps=(s_token,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK == "diagonal":
        b_s = _mask_diagonal(b_s, where[0], where[1], SHAPE[1])
    elif MASK == "stripes":
        o_n = gl.arange(0, STEP, gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where((o_n < where)[None, :], b_s, MINUS_INFINITY)
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale)
    shift = _finite(b_new) if MASK == "diagonal" else b_new
    b_scale = gl.exp2(b_max - shift)
    b_next = gl.exp2(b_s * scale - shift[:, None])
    b_sum = b_sum * gl.convert_layout(b_scale, gl.SliceLayout(1, b_sum.type.layout))[:, None] + _sums(b_next, STRIPES)
    if STRIPES:
        b_next = _operand(b_next, b_acc, v_steps)
    following = i_step + 1
    mbarrier.wait(k_full.index(following % STAGES), following // STAGES & 1, pred=following < last)
    b_acc = warpgroup_mma_wait(0, deps=(acc_token,))
    mbarrier.arrive(v_empty.index(before), count=1)
    b_acc = b_acc * gl.convert_layout(b_scale, gl.SliceLayout(1, b_acc.type.layout))[:, None]
    return b_next, b_acc, b_new, b_sum


@gluon.jit
def _take_turn(turns, i_step, SHAPE: gl.constexpr):
    """At head_dim 128 the groups ask for a step's products in turn, so that one's softmax runs beside the other's
    products: 2 % less time for long lists, 1 % more for short ones. At 64 and 256 it takes longer either way."""
    if SHAPE[7]:
        mbarrier.wait(turns[0], i_step & 1)


@gluon.jit
def _pass_turn(turns, SHAPE: gl.constexpr):
    if SHAPE[7]:
        mbarrier.arrive(turns[1], count=1)


@gluon.jit
def _sums(b_p, STRIPES: gl.constexpr):
    """Sums of exponents [HALF, 8] over what one thread holds, which are added up once an item: a query's own would take
    four shuffles a step, 2 to 6 % of the time at head_dim 64. The variant for stripes lacks registers: [HALF, 1]."""
    return gl.sum(b_p, 1)[:, None] if STRIPES else gl.sum(b_p.reshape([HALF, b_p.shape[1] // 8, 8]), 1)


@gluon.jit
def _operand(b_p, b_acc, v_steps):
    """Exponents as the product with values reads them; as they are where they are so already."""
    return gl.convert_layout(b_p.to(v_steps.dtype), gl.DotOperandLayout(0, b_acc.type.layout, 2))


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
    o_n = gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout))
    begin = (last_block - to_end + 1) * BLOCK_N  # key of the first column, were all of the step's blocks the diagonal's
    b_last = gl.maximum(first + o_m - begin, (to_end - num_diagonal) * BLOCK_N - 1)  # [HALF] last column that is seen
    return gl.where(o_n[None, :] <= b_last[:, None], b_s, MINUS_INFINITY)


@gluon.jit
def _last_product(kv, i_step, b_p, b_acc, STRIPES: gl.constexpr, STAGES: gl.constexpr):
    """The product of an item's last step with its values, added to b_acc [HALF, D] float32."""
    _, v_steps, _, _, v_full, v_empty, _ = kv
    stage = i_step % STAGES
    mbarrier.wait(v_full.index(stage), i_step // STAGES & 1)
    if STRIPES:
        fence_async_shared()
    b_p = _operand(b_p, b_acc, v_steps)
    token = warpgroup_mma(b_p, v_steps.index(stage), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return b_acc


@gluon.jit
def _write(out, i_head, token, length, b_acc, b_max, b_sum, D: gl.constexpr):
    """Outputs and, where asked for, log-sum-exps of a consumer's queries, as far as the tile has any."""
    o_m = gl.arange(0, HALF, gl.SliceLayout(1, b_acc.type.layout))
    b_max = gl.convert_layout(b_max, gl.SliceLayout(1, b_acc.type.layout))
    b_sum = gl.convert_layout(gl.sum(b_sum, 1), gl.SliceLayout(1, b_acc.type.layout))
    b_total = b_sum
    if out.sinks is not None:
        b_total += gl.exp2(gl.load(out.sinks + i_head).to(gl.float32) * LOG2_E - b_max)
    b_out = (b_acc * (1.0 / b_total)[:, None]).to(out.out.dtype.element_ty)  # divides once a query, not once an output
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_out = gl.convert_layout(b_out, layout)
    o_r = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    o_out = (token + o_r).to(gl.int64) * out.stride_out_token + i_head * out.stride_out_head
    gl.store(out.out + o_out[:, None] + o_d[None, :], b_out, mask=(o_r < length)[:, None])
    if out.lse is not None:
        b_lse = (b_max + gl.log2(b_sum)) * LN_2
        target = out.lse + i_head.to(gl.int64) * out.stride_lse_head + token + o_m
        gl.store(target, b_lse, mask=o_m < length)

# SPDX-License-Identifier: Apache-2.0
"""A consumer group of ``hopper_kernel``: the online softmax over an item's steps, for 64 queries of its tile."""

from vllm_sparse_kernels.attention.hopper.item import HALF, Channels, Config, Turns, load_item
from vllm_sparse_kernels.compile_time import LOG2_E, Constant
from vllm_sparse_kernels.gluon_compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    new_counter,
    warpgroup_mma,
    warpgroup_mma_wait,
)

MINUS_INFINITY = Constant(float("-inf"))


@aggregate
class NoMask:
    """The mask of a step in which all queries attend to all keys."""

    @gluon.jit
    def apply(self, b_s):
        """Return the scores unchanged."""
        return b_s

    @gluon.jit
    def shift(self, b_max):
        """Return the maxima, which are finite."""
        return b_max


@aggregate
class CausalMask:
    """The causal mask of a step that begins ``blocks_to_end`` blocks before the list's end.

    The list ends with consecutive diagonal blocks; all queries attend to all keys before these. Columns past the list's
    end count as keys after the last block.
    """

    blocks_to_end: gl.tensor
    last_block: gl.tensor  # last block of the sequence in the tile's causal reach
    num_diagonal: gl.tensor  # blocks with a key after some query
    position: gl.tensor  # of the group's first query
    BLOCK_N: gl.constexpr

    @gluon.jit
    def apply(self, b_s):
        """Replace scores of keys after the query by −∞."""
        o_m = gl.arange(0, HALF, gl.SliceLayout(1, b_s.type.layout))
        o_n = gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout))
        # Key of the first column, if all of the step's blocks were diagonal blocks.
        begin = (self.last_block - self.blocks_to_end + 1) * self.BLOCK_N
        b_last = self.position + o_m - begin
        # [64] last column that each query sees, which includes all columns before the diagonal blocks.
        b_last = gl.maximum(b_last, (self.blocks_to_end - self.num_diagonal) * self.BLOCK_N - 1)
        return gl.where(o_n[None, :] <= b_last[:, None], b_s, MINUS_INFINITY)

    @gluon.jit
    def shift(self, b_max):
        """Return the maxima, or 0 for a query that has no key yet, because −∞ − (−∞) would be NaN."""
        return gl.where(b_max == MINUS_INFINITY, 0.0, b_max)


@aggregate
class ColumnLimit:
    """The mask of a step with only ``num_keys`` keys."""

    num_keys: gl.tensor

    @gluon.jit
    def apply(self, b_s):
        """Replace scores from column ``num_keys`` on by −∞."""
        o_n = gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout))
        return gl.where((o_n < self.num_keys)[None, :], b_s, MINUS_INFINITY)

    @gluon.jit
    def shift(self, b_max):
        """Return the maxima, which are finite."""
        return b_max


@aggregate
class StepPlan:
    """The steps of a consumer group over an item's keys."""

    first_blocks: gl.tensor  # blocks of step 0
    num_steps: gl.tensor  # over blocks
    num_masked: gl.tensor  # steps over blocks that need a mask: step 0, and those that touch the diagonal
    num_stripes: gl.tensor
    end: gl.tensor  # count of steps after the item's last one
    last_block: gl.tensor
    num_diagonal: gl.tensor
    position: gl.tensor

    @gluon.jit
    def causal_mask(self, blocks_to_end, config):
        """Return the mask of the step that begins ``blocks_to_end`` blocks before the list's end."""
        return CausalMask(blocks_to_end, self.last_block, self.num_diagonal, self.position, config.BLOCK_N)


@aggregate
class Softmax:
    """The online softmax of 64 queries after a step. The step's product with values has not been added yet.

    All fields are float32, except exponentials in the variant with stripes, which are 16-bit operands (see
    ``Consumer.process_step``).
    """

    b_p: gl.tensor  # [64, STEP] exponentials of the step's scores
    b_acc: gl.tensor  # [64, D] sums of products of the steps before
    b_max: gl.tensor  # [64] largest score, an exponent of two
    b_sum: gl.tensor  # [64, 8] or [64, 1] sums of exponentials, see ``_thread_sums``


@aggregate
class Consumer:
    """A consumer group, which computes half of the queries of every tile."""

    config: Config
    channels: Channels
    turns: Turns
    scale: gl.tensor | gl.constexpr  # from products to scores, which are exponents of two
    CONSUMER: gl.constexpr  # number of the group, 0 or 1, and of its half of the tile's queries

    @gluon.jit
    def plan_steps(self, item, step):
        """Count the steps over an item."""
        config, position, num_blocks = self.config, item.position, item.num_blocks
        first_blocks, num_steps = config.first_blocks(num_blocks), config.block_steps(num_blocks)
        last_block = (position + item.length - 1) // config.BLOCK_N
        num_diagonal = last_block - position // config.BLOCK_N + 1
        num_masked = 1 + gl.cdiv(gl.maximum(num_diagonal - first_blocks, 0), config.BLOCKS)
        end = step.count + num_steps
        num_stripes = gl.to_tensor(0)
        if config.STRIPES:
            num_stripes = item.num_stripes
            end += config.stripe_steps(num_stripes)
        position += self.CONSUMER * HALF
        return StepPlan(first_blocks, num_steps, num_masked, num_stripes, end, last_block, num_diagonal, position)

    @gluon.jit
    def first_step(self, b_q, step, plan):
        """Compute the scores of step 0."""
        config = self.config
        keys = self.channels.keys()
        keys.acquire_full(step)
        zero = gl.zeros([HALF, config.STEP], gl.float32, config.scores_layout)
        self.turns.acquire(step)
        b_s = warpgroup_mma(b_q, keys.buffer(step).permute((1, 0)), zero, use_acc=False, is_async=True)
        self.turns.release()
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        keys.release(step)
        mask = plan.causal_mask(plan.first_blocks, config)
        b_s = mask.apply(b_s)
        b_max = gl.max(b_s, 1) * self.scale
        b_p = gl.exp2(b_s * self.scale - mask.shift(b_max)[:, None])
        b_sum = self._thread_sums(b_p)
        b_acc = gl.zeros([HALF, config.D], gl.float32, config.outputs_layout)
        if config.STRIPES:
            b_p = self._as_operand(b_p)
        next_step = step.plus(1)
        keys.acquire_full(next_step, pred=next_step.count < plan.end)
        return next_step, Softmax(b_p, b_acc, b_max, b_sum)

    @gluon.jit
    def block_steps(self, b_q, plan, step, state):
        """Process the other steps over blocks, masked steps first."""
        for i in range(1, plan.num_masked):
            mask = plan.causal_mask(plan.first_blocks + i * self.config.BLOCKS, self.config)
            state = self.process_step(b_q, step, plan.end, mask, state, False)
            step = step.plus(1)
        for _ in range(plan.num_masked, plan.num_steps):
            state = self.process_step(b_q, step, plan.end, NoMask(), state, False)
            step = step.plus(1)
        return step, state

    @gluon.jit
    def stripe_steps(self, b_q, plan, step, state):
        """Process the steps over stripes; the last one is masked if it is not full."""
        STEP: gl.constexpr = self.config.STEP
        for _ in range(plan.num_stripes // STEP):
            state = self.process_step(b_q, step, plan.end, NoMask(), state, True)
            step = step.plus(1)
        if plan.num_stripes % STEP != 0:
            state = self.process_step(b_q, step, plan.end, ColumnLimit(plan.num_stripes % STEP), state, True)
            step = step.plus(1)
        return step, state

    @gluon.jit
    def process_step(self, b_q, step, end, mask, state, GATHERED: gl.constexpr):
        """Compute the scores of this step while the product of the previous step runs. This step's keys have arrived.

        Exponentials stay in float32 until the next step, in the registers of their scores, and are converted to an
        operand here. Converting them immediately would need 32 more registers and 32 moves per step, 3 % of the time.
        The variant for stripes has too few registers for this and converts them immediately.

        The wait for the next step's keys comes between the exponentials and the wait for the product. This keeps ptxas
        from hoisting the wait for the product above the exponentials; see ``hopper_kernel``.
        """
        config = self.config
        keys, values = self.channels.keys(), self.channels.values()
        stage = step.slot()
        previous_step = step.plus(-1)
        previous_stage = previous_step.slot()
        if GATHERED:
            fence_async_shared()
        zero = gl.zeros([HALF, config.STEP], gl.float32, config.scores_layout)
        b_p = self._as_operand(state.b_p)
        self.turns.acquire(step)
        s_token = warpgroup_mma(b_q, keys.buffers.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        values.acquire_full(previous_step)
        if GATHERED:
            fence_async_shared()
        acc_token = warpgroup_mma(b_p, values.buffers.index(previous_stage), state.b_acc, is_async=True)
        self.turns.release()
        b_s = warpgroup_mma_wait(1, deps=(s_token,))
        keys.release(step)
        b_s = mask.apply(b_s)
        b_max = gl.maximum(state.b_max, gl.max(b_s, 1) * self.scale)
        shift = mask.shift(b_max)
        b_decay = gl.exp2(state.b_max - shift)
        b_p = gl.exp2(b_s * self.scale - shift[:, None])
        b_decay_sum = gl.convert_layout(b_decay, gl.SliceLayout(1, state.b_sum.type.layout))
        b_sum = state.b_sum * b_decay_sum[:, None] + self._thread_sums(b_p)
        if config.STRIPES:
            b_p = self._as_operand(b_p)
        next_step = step.plus(1)
        keys.acquire_full(next_step, pred=next_step.count < end)
        b_acc = warpgroup_mma_wait(0, deps=(acc_token,))
        values.release(previous_step)
        b_acc = b_acc * gl.convert_layout(b_decay, gl.SliceLayout(1, b_acc.type.layout))[:, None]
        return Softmax(b_p, b_acc, b_max, b_sum)

    @gluon.jit
    def last_product(self, step, state):
        """Add the product of an item's last step."""
        values = self.channels.values()
        values.acquire_full(step)
        if self.config.STRIPES:
            fence_async_shared()
        b_p = self._as_operand(state.b_p)
        token = warpgroup_mma(b_p, values.buffer(step), state.b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=(token,))
        values.release(step)
        return b_acc

    @gluon.jit
    def _thread_sums(self, b_p):
        """Sum exponentials within each thread, [64, 8]. The sums of threads are added once per item.

        Sums over all threads would need four shuffles per step, 2 to 6 % of the time at head_dim 64. The variant for
        stripes has too few registers and sums over threads in each step, [64, 1].
        """
        return gl.sum(b_p, 1)[:, None] if self.config.STRIPES else gl.sum(b_p.reshape([HALF, b_p.shape[1] // 8, 8]), 1)

    @gluon.jit
    def _as_operand(self, b_p):
        """Convert exponentials to the operand of the product with values; leave an operand unchanged."""
        dtype: gl.constexpr = self.channels.v_buffers.dtype
        return gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, self.config.outputs_layout, 2))


@gluon.jit
def consume(out, scale, channels, config, CONSUMER: gl.constexpr):
    """Compute one half of the queries of every item's tile."""
    turns = channels.barriers.turns
    turns = Turns(turns.index(CONSUMER), turns.index(1 - CONSUMER), config.TURNS)
    consumer = Consumer(config, channels, turns, scale, CONSUMER)
    queries = channels.queries()
    item_counter, step = new_counter(config.SLOTS), new_counter(config.STAGES)
    queries.acquire_full(item_counter)
    item = load_item(channels.item_words, item_counter.slot())
    while item.i_head >= 0:
        b_q = queries.buffers.index(item_counter.slot() * 2 + CONSUMER)
        plan = consumer.plan_steps(item, step)
        step, state = consumer.first_step(b_q, step, plan)
        step, state = consumer.block_steps(b_q, plan, step, state)
        if config.STRIPES:
            step, state = consumer.stripe_steps(b_q, plan, step, state)
        queries.release(item_counter)
        b_acc = consumer.last_product(step.plus(-1), state)
        skipped = CONSUMER * HALF  # queries of the other group, which come first
        _store_outputs(out, item.i_head, item.token + skipped, item.length - skipped, state, b_acc, config)
        item_counter = item_counter.plus(1)
        queries.acquire_full(item_counter)
        item = load_item(channels.item_words, item_counter.slot())


@gluon.jit
def _store_outputs(out, i_head, token, length, state, b_acc, config):
    """Store the outputs of a group's queries up to the tile's length."""
    D: gl.constexpr = config.D
    b_total = gl.convert_layout(gl.sum(state.b_sum, 1), gl.SliceLayout(1, b_acc.type.layout))
    if out.sinks is not None:
        b_max = gl.convert_layout(state.b_max, gl.SliceLayout(1, b_acc.type.layout))
        b_total += gl.exp2(gl.load(out.sinks + i_head).to(gl.float32) * LOG2_E - b_max)
    b_out = (b_acc * (1.0 / b_total)[:, None]).to(out.out.dtype.element_ty)  # divides once per query, not per output
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_out = gl.convert_layout(b_out, layout)
    o_r = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    o_out = (token + o_r).to(gl.int64) * out.stride_out_token + i_head * out.stride_out_head
    gl.store(out.out + o_out[:, None] + o_d[None, :], b_out, mask=(o_r < length)[:, None])

# SPDX-License-Identifier: Apache-2.0
"""Which engine each layer's attention runs on: the fastest that can and that a trial at start-up finds right.

A trial is one call on the warm-up batch, against float64 attention over the same index. So an engine that a new
compiler or driver breaks costs speed, never a server, and never a wrong answer.
"""

import logging
from collections.abc import Mapping

import torch

from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.settings.config import AUTO
from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels import AttendOptions, SparseIndex, shared_bytes, widest_block
from vllm_sparse_kernels.attend import PORTABLE, AttendSpec, Choice, Engine, choose, engines
from vllm_sparse_kernels.trial import Batch, expected_attention, failure

logger = logging.getLogger(LOGGER)

FIELD = "--additional-config sparse_prefill.engine"


class EnginePicker:
    """Chooses an engine for each distinct attention of a server's layers. ``asked``: an engine's name, or AUTO."""

    def __init__(self, asked: str = AUTO, table: Mapping[str, Engine] | None = None) -> None:
        self.asked = asked
        self.table = engines(compat.flash_attention()) if table is None else table
        self.choices: dict[AttendSpec, Choice] = {}

    def pick(self, batch: Batch, index: SparseIndex, options: AttendOptions | None) -> Engine:
        """The engine for layers like this one, whose selection on the warm-up batch is ``index``.

        Raises ConfigurationError with each engine's reason where none is left.
        """
        spec = AttendSpec.of(batch.cache, index, options, batch.sinks)
        if spec not in self.choices:
            # Skips and 8 bits are approximations: that there is no NaN is all that can be asked there.
            exact = expected_attention(batch, index, options) if options is None else None
            forced = None if self.asked == AUTO else self.asked
            try:
                self.choices[spec] = choose(
                    self.table, spec, forced, lambda engine: failure(engine, batch, index, options, exact)
                )
            except ValueError as error:
                raise ConfigurationError(f"{FIELD}: given {self.asked!r}, but {error}") from None
        return self.choices[spec].engine

    def report(self, layers: Mapping[int, Engine]) -> None:
        """Log which layers run on which engine, and why the engines before it were not taken."""
        for name, why in dict.fromkeys(item for c in self.choices.values() for item in c.passed_over.items()):
            logger.info("sparse-prefill: engine %s not taken: %s", name, why)
        parts = []
        for name in self.table:
            numbers = sorted(number for number, engine in layers.items() if engine.name == name)
            if numbers:
                parts.append(f"layers {format_ranges(numbers)} on {name}")
        logger.info("sparse-prefill: attention: %s", "; ".join(parts))
        narrow = [s.block_tokens for s, c in self.choices.items() if c.engine.name == PORTABLE.name]
        if self.asked == AUTO and min(narrow, default=64) < 64:
            logger.warning(
                "sparse-prefill: engine portable takes longer for blocks of %d keys, made for engines that were not "
                "taken, than for the fewer ones of 64 that %s 'portable' gives it", min(narrow), FIELD,
            )  # fmt: skip


def refuse_on_cpu(asked: str) -> None:
    """Raise ConfigurationError where an engine is asked for on a CPU, on which attention runs in torch."""
    if compat.IS_CPU and asked != AUTO:
        raise ConfigurationError(
            f"{FIELD}: {unexpected(asked, f'{AUTO!r}: vLLM runs on a CPU here, and attention in torch, on no engine')}"
        )


def forecast(spec: AttendSpec) -> tuple[str | None, dict[str, str]]:
    """The engine that would serve such a layer, as far as can be told without a trial, and why others would not."""
    refusals = {name: engine.refusal(spec) for name, engine in engines(compat.flash_attention()).items()}
    taken = next((name for name, why in refusals.items() if why is None), None)
    return taken, {name: why for name, why in refusals.items() if why is not None}


def usual_attention(shape: ModelShape | None = None) -> AttendSpec | None:
    """What layers of such a model (of Llama-3.1-8B's heads unless told) mostly ask for; None where no block fits."""
    shape = shape or ModelShape("LlamaForCausalLM", num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    device = torch.device(compat.DEVICE_TYPE)
    block_tokens = widest_block(head_dim, shared_bytes(device))
    page_size = 128 if compat.prefers_bulk_pages() else 16
    stride_token = 2 * head_dim * num_kv_heads
    if block_tokens is None:
        return None
    return AttendSpec(
        device, torch.bfloat16, num_heads, num_kv_heads, head_dim, page_size,
        (page_size * stride_token, stride_token, 2 * head_dim), block_tokens, has_stripes=True,
    )  # fmt: skip

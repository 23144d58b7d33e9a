# SPDX-License-Identifier: Apache-2.0
"""Checks before a model with multi-head latent attention (MLA) loads, for ``MLA_FLAG`` (docs/research/mla.md)."""

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import CPU_DTYPES, DTYPES
from vllm_sparse_backend.config.mla import setting_problems
from vllm_sparse_backend.config.model_check import mla_problems
from vllm_sparse_backend.identity import FLAG, MLA_FLAG
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.level_policy import level_policy, warn_of_stores
from vllm_sparse_backend.serving.registration import is_ours
from vllm_sparse_backend.serving.resolution import carry_settings, settings_of
from vllm_sparse_backend.serving.startup import refuse, shared_refusals

STOCK_PREFILL = ("FLASH_ATTN", "CPU_SDPA_MLA")
"""vLLM's prefill backends that run rows dense here: their metadata can be divided among rows."""


def check(vllm_config: VllmConfig) -> None:
    """Validate vLLM's configuration before the model loads, and carry the settings as ``startup.check`` does."""
    refuse(MLA_FLAG, _problems(vllm_config))
    carry_settings(vllm_config)
    level_policy(vllm_config)
    warn_of_stores(vllm_config)


def _problems(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield why MLA cannot prefill sparsely with this model, these settings and these options of vLLM."""
    if not vllm_config.model_config.use_mla:
        yield (
            "the model does not use multi-head latent attention, so vLLM would ignore the flag; serve it with "
            f"{FLAG} instead"
        )
    if is_ours(vllm_config.attention_config.backend):
        yield (
            f"given together with {FLAG}, which is for models with plain keys and values; leave --attention-backend "
            "out, so that decode runs on vLLM's own backend"
        )
    yield from mla_problems(compat.hf_config(vllm_config))
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    dtypes = CPU_DTYPES if compat.IS_CPU else DTYPES
    if dtype not in dtypes:
        yield f"given --dtype {dtype}, expected {' or '.join(dtypes)}; use one of these"
    yield from setting_problems(settings_of(vllm_config))
    parallel = vllm_config.parallel_config
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, option)
        if size > 1:
            yield (
                f"given --{option.replace('_', '-')} {size}, expected 1: context parallelism distributes a row's keys "
                "over devices; leave it out"
            )
    if parallel.use_ubatching:
        yield (
            "vLLM splits steps into microbatches (--enable-dbo or --ubatch-size), expected whole steps: microbatches "
            "would share the sums of top_p; leave these options out"
        )
    if vllm_config.attention_config.use_prefill_query_quantization:
        yield (
            "given use_prefill_query_quantization in --attention-config, expected false: sparse prefill computes in "
            "the model's dtype; leave it out"
        )
    yield from shared_refusals(vllm_config)


def refuse_stock_prefill(backend: Any) -> None:
    """Refuse a prefill backend that cannot run some of a step's rows."""
    name = backend.get_name()
    if name not in STOCK_PREFILL:
        raise ConfigurationError(
            f"{MLA_FLAG}: vLLM would run dense rows on {name} here, expected {' or '.join(STOCK_PREFILL)}, whose "
            "metadata can be divided among rows; serve without this flag"
        )

# SPDX-License-Identifier: Apache-2.0
"""Differences between vLLM's releases and platforms, in one place; tested with 0.32 (CPU build) and 0.33.

Decode rows and dense rows run on ``DenseBackend``: vLLM's FlashAttention, or its CPU attention on a CPU. Our classes
derive from it and its parts, so keywords that later versions add pass through by inheritance.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.identity import RELEASES
from vllm_sparse_kernels import PagedCache
from vllm_sparse_kernels.attention import FlashAttention
from vllm_sparse_kernels.paged import FP8

IS_CPU = current_platform.is_cpu()
DEVICE_TYPE = "cpu" if IS_CPU else "cuda"

if IS_CPU:
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackend as DenseBackend,
        CPUAttentionBackendImpl as DenseImpl,
        CPUAttentionMetadata as DenseMetadata,
        CPUAttentionMetadataBuilder as DenseBuilder,
    )
else:
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionBackend as DenseBackend,
        FlashAttentionImpl as DenseImpl,
        FlashAttentionMetadata as DenseMetadata,
        FlashAttentionMetadataBuilder as DenseBuilder,
    )

LARGEST_USUAL_GRAPH = 512
"""Most tokens of a step that vLLM runs as a CUDA graph by default."""

LARGEST_PREFILL_GRAPH = 8192
"""vLLM's default limit of a step on Hopper. Larger steps keep a GPU busy longer than the host needs to launch them."""

FP8_STORAGE = torch.uint8
"""dtype of vLLM's tensor for an fp8 cache."""

__all__ = ["DenseBackend", "DenseBuilder", "DenseImpl", "DenseMetadata"]

T = TypeVar("T")


def hf_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the config.json of the served model."""
    model = vllm_config.model_config
    text = model.hf_text_config.to_dict()
    return {**text, "architectures": model.hf_config.architectures or text.get("architectures")}


def tensor_parallel_rank() -> int:
    """Return this worker's tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def is_first_rank(vllm_config: VllmConfig) -> bool:
    """Return whether this worker is the first of its engine. An external launcher numbers ranks across engines."""
    parallel = vllm_config.parallel_config
    return parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size) == 0


def gather_over_stages(value: T) -> list[T]:
    """Gather a value from all tensor-parallel ranks of all pipeline stages.

    Every rank must call this, and waits for the others.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return list(chain.from_iterable(_gather(get_pp_group(), _gather(get_tp_group(), value))))


def gather_over_world(value: T, timeout_s: float) -> list[T]:
    """Gather a value from all workers, or raise ConfigurationError if one does not enter the exchange in time."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size > 1:
        try:
            torch.distributed.monitored_barrier(group.cpu_group, timedelta(seconds=timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"sparse-prefill: not all workers compared their settings within {timeout_s:.0f} s ({first_line}); "
                "start all nodes with the same backend and the same version of this package"
            ) from error
    return _gather(group, value)


def _gather(group: Any, value: T) -> list[T]:
    """Gather a value from all ranks of one of vLLM's groups."""
    if group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def layer_limits(vllm_config: VllmConfig, kv_cache_dtype: str, quantised_queries: bool = True) -> dict[str, Any]:
    """Return the fields of ``LayerTraits`` that are the same for all layers of a cache dtype."""
    parallel = vllm_config.parallel_config
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return {
        "dtype": str(vllm_config.model_config.dtype),
        "kv_cache_dtype": str(kv_cache_dtype),
        "reads_fp8": quantised_queries and reads_fp8(),
        "head_scales": isinstance(scheme, dict) and scheme.get("strategy") == "attn_head",
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "device_type": DEVICE_TYPE,
    }


def uniform_decode_graphs(support: AttentionCGSupport) -> AttentionCGSupport:
    """Limit whole-step CUDA graphs to uniform decode, because steps with prefills differ from request to request."""
    return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value)


def is_hopper() -> bool:
    """Return whether this device is a Hopper GPU."""
    return current_platform.is_device_capability_family(90)


def capture_prefills(vllm_config: VllmConfig) -> None:
    """Add CUDA graphs for steps of more than 512 tokens, whose layers vLLM otherwise launches kernel by kernel.

    In a model of experts with sparse attention, a GPU is done with a layer before the host has launched the next.
    Multiples of 128 tokens pad no tile of a matrix product.
    """
    if not (is_hopper() and _gains_by_graphs(vllm_config)):
        return
    graphs, most = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_batched_tokens
    if graphs.max_cudagraph_capture_size != LARGEST_USUAL_GRAPH:
        return  # the operator's
    sizes = {*range(640, 2048, 128), *range(2048, LARGEST_PREFILL_GRAPH + 1, 256), most}
    sizes = {size for size in sizes if LARGEST_USUAL_GRAPH < size <= min(most, LARGEST_PREFILL_GRAPH)}
    if sizes:
        graphs.cudagraph_capture_sizes += sorted(sizes)
        graphs.max_cudagraph_capture_size = max(sizes)


def _gains_by_graphs(vllm_config: VllmConfig) -> bool:
    """Return whether prefills of this model should run in graphs."""
    return (
        vllm_config.model_config.get_num_experts() > 0
        and vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs()
        # One rank's prefill would pad the decodes of all others to its size.
        and vllm_config.parallel_config.data_parallel_size == 1
        # Adapters multiply the number of graphs. So do speculators, which also verify tokens in them.
        and vllm_config.speculative_config is None
        and vllm_config.lora_config is None
    )


def limit_split_keys(builder: Any, vllm_config: VllmConfig) -> None:
    """Keep FlashAttention from splitting the keys of steps that are larger than any graph of a whole step.

    A split step needs room for up to 32 partial outputs, which ``capture_prefills`` must not enlarge.
    """
    # Elsewhere all graphs may be of whole steps, such as a speculator's, which need the room.
    if getattr(builder, "max_cudagraph_size", None) is not None and _gains_by_graphs(vllm_config):
        most = max(LARGEST_USUAL_GRAPH, vllm_config.scheduler_config.max_num_seqs)
        builder.max_cudagraph_size = min(builder.max_cudagraph_size, most)


def reads_fp8() -> bool:
    """Return whether this device's kernels read fp8 caches."""
    # FlashAttention reads them on Hopper, with queries rounded to fp8. FlashAttention 4 reads them on Blackwell, but
    # does not accept the block tables that our engine builds.
    return is_hopper()


def current_device() -> torch.device:
    """Return the device of this worker."""
    return torch.device("cpu") if IS_CPU else torch.device("cuda", torch.cuda.current_device())


def device_name() -> str:
    """Return the name of the device. The driver answers, so no CUDA context is created."""
    return current_platform.get_device_name()


def device_memory_bytes() -> int:
    """Return the size of the device's memory."""
    return current_platform.get_device_total_memory()


def flash_attention() -> FlashAttention | None:
    """Return vLLM's FlashAttention for paged caches, in the newest version that accepts any block table."""
    if IS_CPU:
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError:  # devices of other vendors
        return None
    # Version 4 requires pages of its tile size.
    version = next((version for version in (3, 2) if is_fa_version_supported(version)), None)
    return None if version is None else FlashAttention.of_version(version, flash_attn_varlen_func)


def flash_attn_varlen_func() -> Callable[..., Any]:
    """Return vLLM's FlashAttention function for paged caches."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def flash_attention_version() -> int | None:
    """Return the version of FlashAttention that vLLM chooses."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version()


def stock_backend(
    vllm_config: VllmConfig | None,
    head_dim: int,
    dtype: torch.dtype,
    kv_cache_dtype: Any,
    has_sink: bool,
) -> str:
    """Return the attention backend that vLLM itself would choose for a decoder's layers on this device."""
    capability = current_platform.get_device_capability()  # None on a CPU
    if capability is None or capability.major < 10:
        return DenseBackend.get_name()
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=head_dim, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=None, has_sink=has_sink
    )
    with nullcontext() if vllm_config is None else set_current_vllm_config(vllm_config, check_compile=False):
        candidates, _ = current_platform.get_valid_backends(capability, config)
    first = min(candidates, key=lambda candidate: candidate.priority, default=None)
    return DenseBackend.get_name() if first is None else first.backend.name


def tokenizer(vllm_config: VllmConfig) -> Any:
    """Return the served model's tokenizer."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def embeds_tokens(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM embeds the tokens of every step, also those of text, before it calls the model."""
    model = vllm_config.model_config
    if hasattr(model, "supports_multimodal_inputs"):
        supports_multimodal = model.supports_multimodal_inputs
    else:  # 0.30
        from vllm.multimodal import MULTIMODAL_REGISTRY

        supports_multimodal = MULTIMODAL_REGISTRY.supports_multimodal_inputs(model)
    return supports_multimodal or model.enable_prompt_embeds


def calculates_scales(vllm_config: VllmConfig) -> bool:
    """Return whether the first forward pass sets the scales of a quantized cache (0.30 and 0.31)."""
    return getattr(vllm_config.cache_config, "calculate_kv_scales", False)


def splits_tokens(vllm_config: VllmConfig) -> bool:
    """Return whether the ranks of a tensor-parallel group share a step's tokens between layers (0.30 and 0.31)."""
    passes = vllm_config.compilation_config.pass_config
    return getattr(passes, "enable_sp", False) or getattr(passes, "fuse_gemm_comms", False)


def query_scale(query: torch.Tensor, layer: Any) -> float:
    """Return the factor from elements of a layer's queries to their values."""
    return float(layer._q_scale_float) if query.dtype == FP8 else 1.0


def page_order(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the order of the dimensions of a layer's cache in memory."""
    return tuple(vllm_config.cache_config.get_resolved_kv_cache_layout().layer_view_order)


def random_cache(spec: AttentionSpec, num_pages: int, device: torch.device, order: Sequence[int]) -> PagedCache:
    """Allocate normally distributed keys and values in vLLM's layout of a layer's cache."""
    shape = (num_pages, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    dtype = FP8 if spec.dtype == FP8_STORAGE else spec.dtype
    sizes = [shape[i] for i in order]
    # vLLM may pad pages that are contiguous in memory to the size of other layers' pages.
    elements = spec.page_size_bytes // dtype.itemsize if order[0] == 0 else math.prod(sizes[1:])
    numbers = torch.randn(sizes[0], elements, device=device).to(dtype)
    physical = numbers[:, : math.prod(sizes[1:])].unflatten(1, sizes[1:])
    keys, values = physical.permute([order.index(i) for i in range(4)]).transpose(1, 2).split(spec.head_size, dim=-1)
    return PagedCache(keys, values)


def host_seq_lens(common: CommonAttentionMetadata) -> list[int]:
    """Return the sequence lengths that the host knows."""
    if common.seq_lens_cpu_upper_bound is not None:
        return common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
    raise RuntimeError(
        "sparse-prefill: vLLM gave no sequence lengths on the host (seq_lens_cpu_upper_bound is None); expected "
        f"vLLM {RELEASES}"
    )


def keep_schedule(metadata: DenseMetadata) -> None:
    """Copy the schedule of the metadata, because FlashAttention's builder may keep it in a persistent buffer.

    The CPU build makes a new schedule each time, which must not be copied because it contains pointers into itself.
    """
    if not IS_CPU and metadata.scheduler_metadata is not None:
        metadata.scheduler_metadata = metadata.scheduler_metadata.clone()


def layer_number(name: str) -> int | None:
    from vllm.model_executor.models.utils import extract_layer_index

    try:
        return extract_layer_index(name)
    except AssertionError:
        return None


def stock_mla_prefill(vllm_config: VllmConfig) -> type:
    """Return the prefill backend for MLA that vLLM would choose without ``mla_prefill_backend``."""
    from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

    # The selector reads only these two parts of the configuration.
    stock_config = copy.copy(vllm_config)
    stock_config.attention_config = copy.copy(vllm_config.attention_config)
    stock_config.attention_config.mla_prefill_backend = None
    return get_mla_prefill_backend(stock_config)


def is_stock_mla_layer(layer: Any) -> bool:
    """Return whether a layer prefills through the functions of vLLM that our hooks wrap."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonBaseImpl

    return (
        isinstance(layer, MLAAttention)
        and type(layer).forward_impl is MLAAttention.forward_impl
        and isinstance(layer.impl, MLACommonBaseImpl)
        and type(layer.impl).forward_mha is MLACommonBaseImpl.forward_mha
        and not layer.impl.is_sparse
    )


def mla_chunk_tokens(vllm_config: VllmConfig) -> int:
    """Return the largest number of context tokens that vLLM projects up at once."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    return MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)


def paged_cache(kv_cache: torch.Tensor, head_dim: int) -> PagedCache:
    """Return vLLM's cache of a layer as keys and values."""
    if kv_cache.dtype == FP8_STORAGE:
        kv_cache = kv_cache.view(FP8)
    if not IS_CPU:
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)  # half the host time of a split
        return PagedCache(keys, values)
    # CPU build: each (page, head) holds its transposed keys, [head_dim, page_size], then values [page_size, head_dim].
    num_pages, num_kv_heads, page_size, _ = kv_cache.shape
    halves = kv_cache.view(num_pages, num_kv_heads, 2, page_size * head_dim)
    keys = halves[:, :, 0].view(num_pages, num_kv_heads, head_dim, page_size).permute(0, 3, 1, 2)
    values = halves[:, :, 1].view(num_pages, num_kv_heads, page_size, head_dim).transpose(1, 2)
    return PagedCache(keys, values)


def with_scales(cache: PagedCache, layer: Any) -> PagedCache:
    """Add the scales of a layer's queries, keys and values to an fp8 cache.

    Each step calls this, because scales may be loaded again. vLLM keeps a copy on the host.
    """
    if cache.keys.dtype != FP8:
        return cache
    scores = float(layer._q_scale_float) * float(layer._k_scale_float)
    return replace(cache, score_scale=scores, value_scale=float(layer._v_scale_float))


def check_cpu_layout(isa: str, spec: AttentionSpec) -> None:
    """Write random keys and values with vLLM's own operation, and read them back through ``paged_cache``."""
    from vllm import _custom_ops as ops

    num_kv_heads, page_size, head_dim, dtype = spec.num_kv_heads, spec.block_size, spec.head_size, spec.dtype
    kv_cache = torch.zeros(2, num_kv_heads, page_size, 2 * head_dim, dtype=dtype)
    flat = kv_cache.view(2, num_kv_heads, 2 * page_size, head_dim)
    generator = torch.Generator().manual_seed(0)  # the worker's own generator draws its samples
    key, value = torch.randn(2, page_size, num_kv_heads, head_dim, generator=generator).to(dtype)
    slots = torch.arange(page_size, 2 * page_size)
    arguments: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(key, value, *flat.chunk(2, dim=2), slots, isa, **arguments)
    cache = paged_cache(kv_cache, head_dim)
    if not (torch.equal(cache.keys[1], key) and torch.equal(cache.values[1], value)):
        raise RuntimeError(
            f"sparse-prefill: the CPU build's cache layout for instruction set {isa!r} and dtype {dtype} is not the "
            "one this version reads (keys transposed within a page); use --dtype float32, or a GPU"
        )

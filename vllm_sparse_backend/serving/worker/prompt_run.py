# SPDX-License-Identifier: Apache-2.0
"""Runs the served model on one prompt before its KV cache exists.

The caller replaces the ``forward`` of the attention layers, which need the cache. Recurrent layers (Mamba, linear
attention) run as they prefill a request, on a state of this run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_backend.serving import compat
from vllm_sparse_kernels.rows import ceil_div


def run_model(vllm_config: VllmConfig, model: torch.nn.Module, token_ids: Sequence[int]) -> None:
    """Run the model on a prompt without a KV cache or attention metadata. All pipeline stages must call this."""
    group = get_pp_group()
    received: dict[str, Any] = {}
    passed_on: dict[str, Any] = {}
    try:
        if not group.is_first_rank:
            received = group.recv_tensor_dict() or {}
            if not received:
                raise RuntimeError("an earlier pipeline stage failed")
        out = _forward(vllm_config, model, token_ids, IntermediateTensors(received) if received else None)
        if not group.is_last_rank:
            # Later stages may need what earlier stages sent; vLLM's runners pass it on too. NCCL ignores strides.
            passed_on = {name: tensor.contiguous() for name, tensor in {**received, **out.tensors}.items()}
    finally:
        if not group.is_last_rank:
            # Empty after an error, so that later stages raise an error instead of waiting.
            group.send_tensor_dict(passed_on)


def _forward(vllm_config: VllmConfig, model: Any, token_ids: Sequence[int], before: Any) -> Any:
    """Run this worker's stage of the model. ``before`` is the output of the stage before it, or None."""
    num_tokens, device = len(token_ids), compat.current_device()
    ids: torch.Tensor | None = torch.tensor(token_ids, dtype=torch.int32, device=device)
    embeddings = None
    with (
        torch.inference_mode(),
        set_current_vllm_config(vllm_config),
        _recurrent_states(vllm_config, num_tokens, device) as metadata,
        set_forward_context(metadata, vllm_config, num_tokens=num_tokens),
    ):
        if before is None and compat.embeds_tokens(vllm_config):
            embeddings = model.embed_input_ids(ids)
            ids = ids if getattr(model, "requires_raw_input_tokens", False) else None
        positions = _positions(vllm_config, num_tokens, device)
        return model(input_ids=ids, positions=positions, intermediate_tensors=before, inputs_embeds=embeddings)


def _positions(vllm_config: VllmConfig, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the positions of a text: [tokens], or [dimensions, tokens] with M-RoPE."""
    config = vllm_config.model_config
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device)
    if not config.uses_mrope:
        return positions
    # A compiled model expects the strides of the runner's buffer, which has one token more than any step.
    size = config.mrope_num_dims, vllm_config.scheduler_config.max_num_batched_tokens + 1
    buffer = torch.zeros(size, dtype=torch.int64, device=device)
    buffer[:, :num_tokens] = positions  # all dimensions of a text's positions are equal
    return buffer[:, :num_tokens]


@contextmanager
def _recurrent_states(
    vllm_config: VllmConfig, num_tokens: int, device: torch.device
) -> Iterator[dict[str, Any] | None]:
    """Give recurrent layers states for one request, and yield the metadata of all layers; None if none is recurrent."""
    layers = vllm_config.compilation_config.static_forward_context
    recurrent = {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}
    if not recurrent:
        yield None
        return
    metadata: dict[str, Any] = dict.fromkeys(layers)
    # Some kinds of layers have none before vLLM allocates it.
    before = {name: getattr(layer, "kv_cache", ()) for name, layer in recurrent.items()}
    by_spec: dict[Any, tuple[torch.Tensor, Any]] = {}
    try:
        for name, layer in recurrent.items():
            spec: Any = layer.get_kv_cache_spec(vllm_config)
            if spec not in by_spec:
                # Layers run one after the other, and none reads an earlier state: they can share the memory.
                num_blocks = ceil_div(num_tokens, spec.block_size) + spec.num_speculative_blocks
                pages = torch.zeros(num_blocks + 1, 1, 1, spec.page_size_bytes, dtype=torch.int8, device=device)
                builder = layer.get_attn_backend().get_builder_cls()(spec, [name], vllm_config, device)
                by_spec[spec] = pages, builder.build(0, _one_request(num_tokens, num_blocks, device))
            pages, metadata[name] = by_spec[spec]
            layer.bind_kv_cache(pages)
        yield metadata
    finally:
        for name, layer in recurrent.items():
            layer.kv_cache = before[name]


def _one_request(num_tokens: int, num_blocks: int, device: torch.device) -> CommonAttentionMetadata:
    """Return the metadata of a step in which one request prefills into the blocks from 1 on; vLLM reserves block 0."""
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=starts[1:].to(device),
        num_reqs=1,
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        block_table_tensor=blocks[None],
        slot_mapping=torch.arange(num_tokens, dtype=torch.int64, device=device),
        is_prefilling=torch.tensor([True]),
        seq_lens_cpu_upper_bound=starts[1:],
    )

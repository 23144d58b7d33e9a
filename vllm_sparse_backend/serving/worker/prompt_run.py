# SPDX-License-Identifier: Apache-2.0
"""Runs the served model on one prompt before its KV cache exists.

The caller replaces the ``forward`` of the attention layers, which need the cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors

from vllm_sparse_backend.serving import compat


def run_model(vllm_config: VllmConfig, model: torch.nn.Module, token_ids: Sequence[int]) -> None:
    """Run the model on a prompt without a KV cache or attention metadata. All pipeline stages must call this."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        _forward(vllm_config, model, token_ids, None)
        return
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
            passed_on = {
                name: value.contiguous() if isinstance(value, torch.Tensor) else value
                for name, value in {**received, **out.tensors}.items()
            }
    finally:
        if not group.is_last_rank:
            # Empty after an error, so that later stages raise an error instead of waiting.
            group.send_tensor_dict(passed_on)


def _forward(vllm_config: VllmConfig, model: Any, token_ids: Sequence[int], before: Any) -> Any:
    """Run this worker's stage of the model. ``before`` is the output of the stage before it, or None."""
    num_tokens, device = len(token_ids), compat.current_device()
    ids = torch.tensor(token_ids, dtype=torch.int32, device=device)
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device)
    with (
        torch.inference_mode(),
        set_current_vllm_config(vllm_config),
        set_forward_context(None, vllm_config, num_tokens=num_tokens),
    ):
        return model(input_ids=ids, positions=positions, intermediate_tensors=before, inputs_embeds=None)

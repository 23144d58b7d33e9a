# SPDX-License-Identifier: Apache-2.0
"""A model with known streaming heads, of vLLM's attention layers, and the settings of a server that finds them."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.sequence import IntermediateTensors

from vllm_sparse_backend.streaming_heads import SINK_TOKENS, WINDOWS_TOKENS

PROMPT = list(range(SINK_TOKENS + WINDOWS_TOKENS[-1] + 1500))
SETTINGS = {
    "method": "top_p",
    "params": {"kept_mass": 0.5, "ramp_tokens": 1, "most_tokens": None},
    "streaming_heads": True,
    "min_tokens": 100,
    "min_query_tokens": 1,
}


class Model(torch.nn.Module):
    """A model whose hidden states are random: its layers get queries and keys that do not depend on each other.

    A pipeline stage gets its angles from the stage before it. Queries and keys of heads listed in ``near`` grow along
    the sequence in such a way that only the nearest keys count.
    """

    def __init__(self, layers: list[Any], near: Mapping[int, set[int]]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0))
        self.layers, self.near = dict(enumerate(layers)), near
        self.outputs: list[torch.Tensor] = []
        self.runs = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: None,
    ) -> IntermediateTensors:
        assert input_ids.dtype == torch.int32
        assert torch.equal(positions, torch.arange(len(PROMPT)))
        self.runs += 1
        generator = torch.Generator().manual_seed(0)
        if intermediate_tensors is None:
            angles = positions * (torch.pi / len(positions))
        else:
            angles = intermediate_tensors["angles"]
        for i, layer in self.layers.items():
            impl = layer.impl
            shapes = [(len(positions), n, impl.head_size) for n in (impl.num_heads, impl.num_kv_heads)]
            query, key = (torch.randn(shape, generator=generator) for shape in shapes)
            value = torch.randn(shapes[1], generator=generator)
            key[..., :2] = torch.stack([angles.cos(), angles.sin()], -1)[:, None]
            query[..., :2] = 0
            for head in self.near.get(i, ()):
                query[:, head] = 0
                query[:, head, :2] = torch.stack([angles.cos(), angles.sin()], -1) * 1e6
            out = torch.full_like(query, float("nan"))
            impl.forward(layer, query, key, value, torch.empty(0), None, out)
            self.outputs.append(out)
        return IntermediateTensors({"angles": torch.stack([angles, -angles], -1)[:, 0]})  # a strided view

# SPDX-License-Identifier: Apache-2.0
"""Captures through vLLM itself: any model that it serves, quantised ones and those that take several GPUs too.

vLLM lets a class of ours into its workers (``worker_extension_cls``). There, on every rank, what the layers of this
backend are given in each step is written down as it comes: queries after rotary embedding, keys and values of the
step's new tokens, one file for each layer, rank and chunk. Attention itself is dense, as all rows are below
``min_tokens``. Afterwards the files of a layer become one, heads of ranks side by side.

Memory: what vLLM takes for one prompt at a time, and a layer's tensors of one chunk; when files are joined, on the
host, those of one layer of a prompt.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.profiling.capture import (
    Capture,
    LayerTensors,
    begin_capture,
    finish_capture,
    held_capture,
)
from vllm_sparse_backend.profiling.outside import needed, safetensors
from vllm_sparse_backend.settings.errors import ConfigurationError

DENSE_TOKENS = 1 << 30
"""As ``min_tokens``: no row is that long."""


class CaptureWorker:
    """What is added to vLLM's worker class; ``vllm_config`` is the worker's."""

    vllm_config: Any

    def sparse_prefill_capture(self, folder: str) -> dict[int, tuple[float | None, str | None]]:
        """Write what layers are given into ``folder`` from now on, nowhere if it is empty.

        Returns for each layer of this rank its scale, or why it never goes sparse.
        """
        from vllm_sparse_backend.serving import compat
        from vllm_sparse_backend.serving.layers import model_layers

        rank, _ = compat.tensor_parallel(self.vllm_config)
        found: dict[int, tuple[float | None, str | None]] = {}
        for layer in model_layers(self.vllm_config).values():
            why = layer.impl.fallback
            found[layer.number] = (float(layer.impl.scale), None) if why is None else (None, why.explain)
            if why is None:
                record(layer.impl, Path(folder) if folder else None, layer.number, rank)
        return found


def record(impl: Any, folder: Path | None, layer: int, rank: int) -> None:
    """Have an attention layer's ``forward`` write the queries, keys and values of each step; None: not any more."""
    forward = getattr(impl, "recorded_forward", impl.forward)
    impl.recorded_forward = forward
    if folder is None:
        impl.forward = forward
        return
    parts = 0

    def write(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, *rest: Any, **more: Any,
    ) -> Any:  # fmt: skip
        nonlocal parts
        if attn_metadata is not None:
            num_tokens = getattr(attn_metadata, "num_actual_tokens", len(query))
            given = zip("qkv", (query, key, value), strict=True)
            tensors = {name: x[:num_tokens].reshape(num_tokens, -1, impl.head_size).contiguous() for name, x in given}
            safetensors().save_file(tensors, _part(folder, layer, rank, parts))
            parts += 1
        return forward(module, query, key, value, kv_cache, attn_metadata, *rest, **more)

    impl.forward = write


def _part(folder: Path, layer: int, rank: int, number: int) -> Path:
    return folder / f"part-{layer:03}-{rank:03}-{number:05}.safetensors"


def join(made: Capture, layers: dict[int, tuple[float | None, str | None]], ranks: int) -> None:
    """One file for each layer out of those of its chunks and ranks, which are deleted.

    Raises ConfigurationError where they do not hold the prompt, each token once.
    """
    load_file = safetensors().load_file
    for layer, (scale, why) in sorted(layers.items()):
        if scale is None:
            made.left_out[layer] = str(why)
            continue
        paths = [sorted(made.folder.glob(f"part-{layer:03}-{rank:03}-*.safetensors")) for rank in range(ranks)]
        of_ranks = [[load_file(path) for path in of] for of in paths]
        # Where there are more ranks than kv heads, neighbours have the same one.
        copies = max(1, ranks // made.shape.num_kv_heads)
        chosen = {"q": of_ranks, "k": of_ranks[::copies], "v": of_ranks[::copies]}
        tensors = LayerTensors(**{name: _side_by_side(name, of) for name, of in chosen.items()})
        heads = made.shape.num_heads, made.shape.num_kv_heads, made.shape.num_kv_heads
        wanted = [(made.num_tokens, n, made.shape.head_dim) for n in heads]
        if (given := [tuple(x.shape) for x in tensors]) != wanted:
            raise ConfigurationError(
                f"capture through vLLM: layer {layer}: given q, k, v of {given}, expected {wanted}"
            )
        made.add(layer, tensors, scale)
        for path in (path for of in paths for path in of):
            path.unlink()


def _side_by_side(name: str, of_ranks: list[list[dict[str, torch.Tensor]]]) -> torch.Tensor:
    """A tensor's chunks of each rank; empty where a rank has none."""
    if not all(of_ranks):
        return torch.empty(0, 0, 0)
    return torch.cat([torch.cat([part[name] for part in parts]) for parts in of_ranks], 1).contiguous()


class VllmCapturer:
    """A ``Capturer`` that loads a model with vLLM, once, if there is anything to capture."""

    def __init__(self, tensor_parallel_size: int = 1, **engine: Any) -> None:
        self.tensor_parallel_size, self.engine = tensor_parallel_size, engine

    def __call__(self, model: Path, prompts: Sequence[Sequence[int]], folders: Sequence[Path]) -> list[Capture]:
        held = [held_capture(model, ids, folder) for ids, folder in zip(prompts, folders, strict=True)]
        if all(one is not None for one in held):
            return [one for one in held if one is not None]
        llm = self._load(model, max(map(len, prompts)))
        try:
            return [
                one if one is not None else self._capture(llm, model, ids, folder)
                for one, ids, folder in zip(held, prompts, folders, strict=True)
            ]
        finally:
            llm.llm_engine.engine_core.shutdown()

    def _load(self, model: Path, longest: int) -> Any:
        # Workers are told a method of theirs by its name.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        return needed("vllm", "--tensor-parallel-size: needs vLLM").LLM(
            str(model),
            tensor_parallel_size=self.tensor_parallel_size,
            attention_backend="SPARSE-PREFILL",
            additional_config={"sparse_prefill": {"min_tokens": DENSE_TOKENS}},
            worker_extension_cls=f"{CaptureWorker.__module__}.{CaptureWorker.__qualname__}",
            max_model_len=longest + 1,
            max_num_seqs=1,
            enable_prefix_caching=False,
            enforce_eager=True,
            **self.engine,
        )

    def _capture(self, llm: Any, model: Path, ids: Sequence[int], folder: Path) -> Capture:
        from vllm import SamplingParams

        made = begin_capture(model, ids, folder)
        for left in folder.glob("part-*.safetensors"):
            left.unlink()
        of_ranks = llm.collective_rpc("sparse_prefill_capture", args=(str(folder.resolve()),))
        llm.generate({"prompt_token_ids": list(ids)}, SamplingParams(max_tokens=1), use_tqdm=False)
        llm.collective_rpc("sparse_prefill_capture", args=("",))
        layers = {int(layer): tuple(of) for of in of_ranks for layer, of in of.items()}
        join(made, layers, self.tensor_parallel_size)
        finish_capture(made)
        return made

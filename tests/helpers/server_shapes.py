# SPDX-License-Identifier: Apache-2.0
"""Runs small models with other shapes than Llama's, one after the other in one process, and prints their tokens.

    python -m tests.helpers.server_shapes FOLDER stock|ours NAME...

Models are made in FOLDER with random weights, in float32 on a CPU and bfloat16 on a GPU. Each shape runs on stock's
backend, or on this backend with everything kept, and writes a line of JSON:

* the tokens, and the number of times that each layer ran sparse;
* log-probabilities of the prompts' tokens in exact requests, sent together, and with stock also one by one.

If a shape fails, its line has the error instead. Do not run this in pytest: Triton interprets kernels there, including
vLLM's own.
"""

import contextlib
import gc
import json
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_sparse_backend.evaluation.vllm_server import has_cuda

VOCABULARY = 512
SETTINGS = {"method": "dense", "min_tokens": 128, "min_query_tokens": 1}
LENGTHS = (90, 701, 1000)
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64 if has_cuda() else 32,
    "max_position_embeddings": 4096, "initializer_range": 0.1, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


ON_CPU: dict[str, Any] = {"dtype": "float32", "gpu_memory_utilization": 0.3}
ON_GPU: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 29}


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**(SIZE | more))


def gemma() -> Any:
    """Return a model with windows of 256 in three of four layers."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return Gemma3TextConfig(**SIZE, layer_types=kinds, sliding_window=256, query_pre_attn_scalar=32)


def llama4() -> Any:
    """Return a model with chunks of 256 in three of four layers, without experts."""
    from transformers import Llama4TextConfig

    local = {"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 256}
    return Llama4TextConfig(**SIZE, **local, moe_layers=[], interleave_moe_layer_step=0, intermediate_size_mlp=128)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**SIZE, **experts)


def qwen3_next() -> Any:
    """Return a model with attention in every fourth layer, and a gated recurrence in the others.

    With heads of 80, bfloat16 keys have the layout that the plugin reads, even on CPUs with AMX. 32 of the channels are
    rotated, because vLLM's operation for CPUs takes multiples of 8.
    """
    from transformers import Qwen3NextConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    recurrence = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
    return Qwen3NextConfig(**(SIZE | {"head_dim": 80, "rope_parameters": rope}), **experts, **recurrence, **heads)


def nemotron_h() -> Any:
    """Return a model with attention in the third of four layers, Mamba 2 in the first and last, and neither in the
    second."""
    from transformers import NemotronHConfig

    recurrence = {"mamba_num_heads": 4, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "chunk_size": 64}
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    size = {name: value for name, value in SIZE.items() if name != "num_hidden_layers"}
    return NemotronHConfig(**(size | {"head_dim": 80}), **recurrence, layers_block_type=kinds)


def gpt_oss() -> Any:
    """Return a model with learnt sinks in every layer, and windows of 256 in every other layer."""
    from transformers import GptOssConfig

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    return GptOssConfig(**SIZE, **experts, layer_types=kinds, sliding_window=256)


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SHAPES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "windows": (gemma, {}),
    "chunks": (llama4, {}),
    "experts": (qwen3_moe, {}),
    "sinks": (gpt_oss, {}),
    # On a CPU, its recurrence supports only this dtype; on a GPU, it would use FlashInfer's kernels by default.
    "hybrid": (qwen3_next, {"dtype": "bfloat16"} | ({"gdn_prefill_backend": "triton"} if has_cuda() else {})),
    # vLLM's CPU build fails in Mamba 2 on prompts of several chunks (0.32: stock's backend too).
    **({"hybrid-mamba": (nemotron_h, {"dtype": "bfloat16"})} if has_cuda() else {}),
    "n-grams": (llama, {"speculative_config": NGRAMS}),
}
"""The model's configuration and arguments of vLLM's ``LLM``, by name.

Drafts by n-grams come last: they load numba, and vLLM's CPU build cannot start another engine in a process with it.
"""
STOCK, OURS = "stock", "ours"


def make(name: str, folder: Path) -> Path:
    """Make a model with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[name][0](), dtype=torch.float32)
    for parameter, weights in model.named_parameters():
        if parameter.endswith(".sinks"):
            weights.data += 5.0  # about the weight of all keys of a prompt together
    model.save_pretrained(folder / name)
    return folder / name


def prompts() -> list[list[int]]:
    """Return prompts of random tokens. The second half of each is a copy of the first, so n-grams occur again."""
    generator = random.Random(0)
    halves = [[generator.randrange(3, VOCABULARY) for _ in range(length // 2)] for length in LENGTHS]
    return [half + half for half in halves]


@contextlib.contextmanager
def counted() -> Iterator[Counter[int]]:
    """Count runs of sparse layers by their number."""
    from vllm_sparse_backend.serving.worker.impl import SparsePrefillImpl

    runs: Counter[int] = Counter()
    original = SparsePrefillImpl.attend_sparse

    def run(self: Any, *args: Any, **more: Any) -> Any:
        runs[self.number] += 1
        return original(self, *args, **more)

    with mock.patch.object(SparsePrefillImpl, "attend_sparse", run):
        yield runs


def logprobs(llm: Any, requests: Sequence[Any], **more: Any) -> list[list[float]]:
    """Return the log-probabilities of each prompt's tokens, all prompts sent together."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0, **more)
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [[next(iter(at.values())).logprob for at in output.prompt_logprobs[1:]] for output in outputs]


def answers(run: str, model: Path, **more: Any) -> dict[str, Any]:
    """Return tokens and log-probabilities."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {"max_model_len": 2048, "max_num_batched_tokens": 512} | (ON_GPU if has_cuda() else ON_CPU)
    llm = LLM(str(model), skip_tokenizer_init=True, enforce_eager=True, seed=0, **(options | more))
    try:
        sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
        requests = [TokensPrompt(prompt_token_ids=token_ids) for token_ids in prompts()]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        exact = {"extra_args": {"sparse_prefill": 0}} if run == OURS else {}
        together = logprobs(llm, requests, **exact)
        one_by_one = [logprobs(llm, [token_ids])[0] for token_ids in requests] if run == STOCK else []
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"tokens": tokens, "exact": together, "one by one": one_by_one}
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def line_of(run: str, name: str, folder: Path) -> dict[str, Any]:
    """Return the line of a shape."""
    model, more = make(name, folder), SHAPES[name][1]
    ours = {"attention_backend": "sparse-prefill", "additional_config": {"sparse_prefill": SETTINGS}}
    try:
        with counted() as runs:
            answered = answers(run, model, **more, **(ours if run == OURS else {}))
        return {"name": name, "sparse": dict(runs), **answered}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that runs can be counted
    for shape in sys.argv[3:]:
        print(json.dumps(line_of(sys.argv[2], shape, Path(sys.argv[1]))), flush=True)

# SPDX-License-Identifier: Apache-2.0
"""Engines of the small MLA model on a CPU, with chunked prefill and a prefix cache: prints answers as JSON.

    python -m tests.helpers.chunked_mla FOLDER RUN...

RUN: [SETTINGS or null for stock vLLM, [REQUEST, ...]] as JSON. Each run has an engine in a process of its own, forked
after the imports, which take most of the time of a start.
REQUEST: first, second, first-exact or second-exact. Both prompts begin with the same 1,200 tokens.

vLLM's CPU platform turns chunked prefill and the prefix cache off for MLA, although its parts support them (it gathers
the cached context in plain torch). These processes leave them on.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

CHUNK_TOKENS = 512
PROMPT_TOKENS, SHARED_TOKENS = 1501, 1200


def leave_chunks_on() -> None:
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    original = platform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(vllm_config)
        if vllm_config.model_config is not None:
            vllm_config.scheduler_config.enable_chunked_prefill = True
            vllm_config.scheduler_config.max_num_batched_tokens = CHUNK_TOKENS
            vllm_config.cache_config.enable_prefix_caching = True

    platform.check_and_update_config = classmethod(check_and_update_config)


def answers_of(folder: str, settings: dict[str, Any] | None, requests: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Start an engine and return its answers to requests, sent one after another."""
    from vllm import LLM, SamplingParams, TokensPrompt

    from tests.helpers.scenario import prompt

    attention = {"backend": "CPU_MLA"}  # on CPUs with AMX, vLLM would choose AMX_MLA, which does not take float32
    options: dict[str, Any] = {"attention_config": attention}
    if settings is not None:
        attention["mla_prefill_backend"] = "sparse-prefill"
        options["additional_config"] = {"sparse_prefill": settings}
    llm = LLM(folder, dtype="float32", max_model_len=4096, enforce_eager=True, max_num_seqs=4, **options)
    first = prompt(PROMPT_TOKENS, seed=1)
    second = first[:SHARED_TOKENS] + prompt(400, seed=2)[1:]
    answers = {}
    for request in requests:
        name, _, exact = request.partition("-")
        token_ids = {"first": first, "second": second}[name]
        sampling = SamplingParams(
            temperature=0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False,
            extra_args={"sparse_prefill": 0} if exact else None,
        )  # fmt: skip
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=token_ids)], sampling, use_tqdm=False)
        (choice,) = output.outputs
        answers[request] = {
            "token_ids": list(choice.token_ids),
            "logprobs": [next(iter(step.values())).logprob for step in choice.logprobs or ()],
            "cached_tokens": output.num_cached_tokens,
        }
    return answers


def main(folder: str, *runs: str) -> None:
    from vllm.plugins import load_general_plugins

    leave_chunks_on()
    load_general_plugins()
    from vllm import LLM  # noqa: F401  # imported before the fork

    with ProcessPoolExecutor(len(runs), multiprocessing.get_context("fork")) as pool:
        answers = [pool.submit(answers_of, folder, *json.loads(run)) for run in runs]
        print(json.dumps({"answers": [future.result() for future in answers]}))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main(*sys.argv[1:])

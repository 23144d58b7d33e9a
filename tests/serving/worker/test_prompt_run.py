# SPDX-License-Identifier: Apache-2.0
"""The run at start-up that measures heads."""

from collections.abc import Callable
from typing import Any

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from vllm_sparse_backend.serving.worker.prompt_run import run_model

TOKENS = list(range(3, 303))


def test_the_model_gets_the_tokens(configured: Callable[..., Any]) -> None:
    inputs: dict[str, Any] = {}
    model: Any = lambda **arguments: inputs.update(arguments)  # noqa: E731
    run_model(configured(method="top_p"), model, TOKENS)
    assert inputs["input_ids"].tolist() == TOKENS
    assert inputs["positions"].tolist() == list(range(len(TOKENS)))

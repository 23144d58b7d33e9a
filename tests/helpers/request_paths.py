# SPDX-License-Identifier: Apache-2.0
"""Requests to every path of a server, without a level and with exact, invalid and misspelt levels.

A level is honoured if its rows count as exact, refused if the answer has status 400 and names the level, and ignored if
the request is answered otherwise. A server has no paths for modalities that its model lacks, such as audio.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.helpers.scenario import counted
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.evaluation.vllm_server import Server, ServerError

WORDS = 400
HONOURED, REFUSED, IGNORED, NOT_SERVED = "honoured", "refused", "ignored", "not served"
KEPT = {HONOURED, REFUSED, NOT_SERVED}


def text(seed: int) -> str:
    """Return a text with a unique beginning, so that no cache contains it."""
    generator = random.Random(seed)
    return " ".join(generator.choice(("level", "prompt", "sparse", "exact", "tokens")) for _ in range(WORDS))


def chat(seed: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": text(seed)}]


def bodies(seed: int) -> dict[str, dict[str, Any]]:
    """Return bodies that prefill a prompt, by path and variant."""
    prompt, messages, few = {"prompt": text(seed)}, {"messages": chat(seed)}, {"max_tokens": 2}
    beams = {"use_beam_search": True, "n": 2, **few}
    score = {"text_1": text(seed), "text_2": [text(seed + 1)]}
    rank = {"query": text(seed), "documents": [text(seed + 1)]}
    return {
        "/v1/completions": prompt | few,
        "/v1/completions, a stream": prompt | few | {"stream": True},
        "/v1/completions, beams": prompt | beams,
        "/v1/completions/render": prompt | few,
        "/v1/chat/completions": messages | few,
        "/v1/chat/completions, a stream": messages | few | {"stream": True},
        "/v1/chat/completions, beams": messages | beams,
        "/v1/chat/completions/render": messages | few,
        "/v1/chat/completions/batch": {"messages": [chat(seed), chat(seed + 1)], **few},
        "/v1/responses": {"input": text(seed), "max_output_tokens": 2},
        "/v1/responses, a stream": {"input": text(seed), "max_output_tokens": 2, "stream": True},
        "/v1/messages": messages | few,
        "/v1/messages/render": messages | few,
        "/generative_scoring": {"query": text(seed), "items": ["yes", "no"], "label_token_ids": [40, 41]},
        "/inference/v1/generate": {"token_ids": [seed % 2000 + 2, *range(5, 700)], "sampling_params": few},
        "/invocations": prompt | {"input": text(seed)} | few,
        "/v1/systemone": {
            "state": text(seed), "questions": {"q": {"type": "choice", "text": "?", "options": ["a", "b"]}}
        },
        "/v1/embeddings": {"input": text(seed)},
        "/v2/embed": {"texts": [text(seed)], "embedding_types": ["float"]},
        "/pooling": {"input": text(seed), "task": "embed"},
        "/classify": {"input": text(seed)},
        "/score": score, "/v1/score": score, "/rerank": rank, "/v1/rerank": rank, "/v2/rerank": rank,
    }  # fmt: skip


VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "0": {"vllm_xargs": {"sparse_prefill": 0}},
    "bad": {"vllm_xargs": {"sparse_prefill": "zzz"}},
    "sparse-prefill": {"vllm_xargs": {"sparse-prefill": 0}},
    "sparse_prefil": {"vllm_xargs": {"sparse_prefil": 0}},
    "at the top": {"sparse_prefill": 0},
    "extra_args": {"extra_args": {"sparse_prefill": 0}},
    "extra_body": {"extra_body": {"vllm_xargs": {"sparse_prefill": 0}}},
    "vllm-xargs": {"vllm-xargs": {"sparse_prefill": 0}},
    "metadata": {"metadata": {"sparse_prefill": 0}},
}


class Asker:
    """Sends requests to one server, and reports how it treats levels."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.asked = 0
        self.counted = self.rows()

    def paths(self) -> list[str]:
        described = json.loads(self.server.get("/openapi.json"))["paths"]
        return [path for path, methods in described.items() if "post" in methods]

    def rows(self) -> tuple[int, int]:
        """Return the number of rows that ran exact on request, and of sparse rows."""
        report = counted(self.server)
        return report.rows["dense", Fallback.REQUESTED], report.rows_of("sparse")

    def is_exact(self) -> bool:
        """Return whether no layer of the server runs sparse. It then counts no rows."""
        return set(counted(self.server).attention) == {"dense"}

    def cell(self, way: str, variant: str) -> str:
        path = way.partition(",")[0]
        self.asked += 10
        body = {"model": self.server.model, **bodies(self.asked).get(way, {}), **VARIANTS[variant]}
        try:
            said = self.server.post_text(path.replace("{", "").replace("}", ""), body)
        except ServerError as error:
            said = str(error)
            if "answered 400" in said and "sparse_prefill" in said:
                return REFUSED
            return NOT_SERVED if "answered 404" in said or "answered 501" in said else f"failed: {said[:300]}"
        if "sparse_prefill: given" in said:
            return f"ended early: {said[:200]}"
        if path.endswith("/render"):  # its result is a body for another path
            return "passed on" if variant == "none" else HONOURED if '"sparse_prefill":0' in said else IGNORED
        before, self.counted = self.counted, self.rows()
        exact, sparse = (now - then for now, then in zip(self.counted, before))
        if variant == "none":
            return "sparse" if sparse else "exact" if exact or self.is_exact() else "nothing prefilled"
        return HONOURED if variant == "0" and not sparse and (exact or self.is_exact()) else IGNORED

    def table(self) -> Iterator[dict[str, str]]:
        known = list(bodies(0))
        for path in self.paths():
            ways = [way for way in known if way.partition(",")[0] == path] or [path]
            for way in ways:
                # Paths without prompts may stop the server: sleep, pause.
                variants = [variant for variant in VARIANTS if variant != "none" or way in known]
                yield {"way": way, **{variant: self.cell(way, variant) for variant in variants}}

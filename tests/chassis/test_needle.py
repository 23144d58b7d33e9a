# SPDX-License-Identifier: Apache-2.0
"""The needle model: its recipe's texts and lessons, and the model that is brought along."""

import json
import re
from typing import Any

import pytest

from benchmarks.needle.data import ANSWER, ANSWER_OF_TWO, UNKNOWABLE, Batch, Composer
from benchmarks.needle.net import CONFIG, Needle
from benchmarks.needle.tokens import DIGITS, make_tokenizer
from vllm_sparse_backend.demo.model import BUNDLED

TINY = CONFIG | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def composer(tokenizer: Any) -> Composer:
    return Composer(tokenizer, "cpu", seed=3)


def marked(tokenizer: Any, batch: Batch, i: int, kind: int) -> str:
    return tokenizer.decode(batch.ids[i][batch.kinds[i] == kind].tolist())


@pytest.mark.parametrize("tokens", [128, 2048])
def test_composed_answers_are_the_facts(tokenizer: Any, composer: Composer, tokens: int) -> None:
    """Read from the decoded text alone: every question's answer was stated before it, itself or by an alias."""
    batch = composer.compose(6, tokens, aliases=True)
    assert batch.ids.shape == (6, tokens)
    for i in range(6):
        text = tokenizer.decode(batch.ids[i].tolist(), skip_special_tokens=False)
        known: dict[str, str] = {}
        aliases: dict[str, str] = {}
        answered = ["", ""]
        for line in text.splitlines():
            if found := re.search(r"numbers? (?:of|for) (\S+ \S+ \S+) equals that (?:of|for) (\S+ \S+ \S+)\.", line):
                aliases[found[1]] = found[2]
            elif found := re.search(r"(?:of|for) (\S+ \S+ \S+?)(?: is:? |\? (?:Answer:|It is) )(\d{7})\.", line):
                name, value = found.groups()
                if "?" in line or name in known:
                    assert known[aliases.get(name, name)] == value
                    answered[name in aliases] += value
                known[name] = value
        assert answered == [marked(tokenizer, batch, i, kind) for kind in (ANSWER, ANSWER_OF_TWO)]
        assert len(marked(tokenizer, batch, i, UNKNOWABLE)) % DIGITS == 0
        assert answered[0]


def test_the_bundled_model_is_small_and_able() -> None:
    from safetensors import safe_open

    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 8_000_000
    facts = json.loads((BUNDLED / "training.json").read_text())
    assert all(one["share"] >= 0.98 for asked in ("inside", "at_end") for one in facts["measured"][asked])
    with safe_open(BUNDLED / "model.safetensors", "pt") as weights:
        shapes = {name: tuple(weights.get_tensor(name).shape) for name in weights.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(tensor.shape) for name, tensor in Needle(CONFIG).state_dict().items()}

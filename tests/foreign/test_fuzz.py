# SPDX-License-Identifier: Apache-2.0
"""Damaged files: each loads or is refused naming the file, and none crashes or hangs."""

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign.files import clusters, patterns, sale_thresholds, sparge_state
from vllm_sparse_backend.profiling.importers.detect import import_profile
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.profile import Profile, bundled_profiles, parse_profile

PROFILES = 500
FOREIGN = 200

EVERYTHING = """\
format: 1
model: {architecture: M, num_layers: 6, num_heads: 8, num_kv_heads: 2, head_dim: 64, rope_theta: 1.0e+4, names: [o/m]}
min_tokens: 8192
min_query_tokens: auto
dense_layers: 0-1
level: high
default: {method: sale, tau: 0.01, sink_tokens: 32, local_tokens: 128, int8_scores: false, channels: all}
layers:
  2-3: {default: {method: a_shape, sink_tokens: 64, local_tokens: 256}, heads: {0-3: {method: dense}}}
  4: {heads: {'1,5': {method: vertical_slash, vertical_tokens: 30, slash_tokens: 800, block_means: true}}}
levels:
  fast:
    dense_layers: [5]
    default: {method: flex_vertical_slash, gamma: 0.9}
    layers: {1: {heads: {7: {method: sparge_attn, kept_mass: 0.9, skip_margin: -3.0}}}}
    provenance: {bounds: {error: 0.1}}
provenance:
  tool_version: "0.1.0"
  prompts_sha256: "1111111111111111111111111111111111111111111111111111111111111111"
  bounds: {error: 0.02}
  recall: 0.98
  density: 0.12
  figures: {density: {2: 0.5, 3-4: [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1]}, error: {2-4: 0.01}}
"""

NUMBERS = [-1, 0, 1, 7, 1 << 40, 0.5, -0.5, 1e300, float("nan"), float("inf")]
TEXTS = ["", "any", "0-3", "9-1", "dense", "\x00", "é" * 300]
VALUES = [None, True, *NUMBERS, *TEXTS, [], [1, 1], [[]], {}, {"method": "dense"}, {"a": {"b": []}}]
LETTERS = " \n:{}[],-&*!|>'\"#%@`0123456789abcdefgh\t\x00\x85\u2028é"


def test_mutated_profiles() -> None:
    """Characters that change, lines that move, values that become others."""
    source = random.Random(0)
    texts = [
        EVERYTHING,
        *(bundled_profiles()[name].read_text() for name in ("minference", "minference-qwen2.5-72b-instruct")),
    ]
    assert all(loads(lambda text=text: parse_profile(text, "mine.yaml"), "mine.yaml") for text in texts)
    counts = {True: 0, False: 0}
    for i in range(PROFILES):
        text = source.choice(texts[:1] * 3 + texts)
        text = mutated_text(text, source) if i % 2 else mutated_values(text, source)
        counts[loads(lambda text=text: parse_profile(text, "mine.yaml"), "mine.yaml")] += 1
    assert min(counts.values()) > PROFILES / 20  # neither is all that happens


def loads(load: Callable[[], Profile], source: str) -> bool:
    """Whether it does; then the profile can be written and read again. If not, the error is a line that says where."""
    try:
        profile = load()
    except ConfigurationError as error:
        message = str(error)
        assert message.startswith(f"{source}: ")
        assert len(message.splitlines()) == 1
        return False
    again = profile.to_yaml()
    assert parse_profile(again, "").to_yaml() == again
    return True


def mutated_text(text: str, source: random.Random) -> str:
    for _ in range(source.choice((1, 1, 2, 5))):
        at, width = source.randrange(len(text)), source.choice((1, 1, 3, 20, 200))
        kind = source.randrange(4)
        if kind == 0:
            text = text[:at] + "".join(source.choices(LETTERS, k=source.choice((1, 4)))) + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at + width :]
        elif kind == 2:
            text = text[:at] + text[at : at + width] * 2 + text[at + width :]
        else:
            lines = text.splitlines(keepends=True)
            source.shuffle(lines)
            text = "".join(lines)
        text = text or "x"
    return text


def mutated_values(text: str, source: random.Random) -> str:
    import yaml

    data = yaml.safe_load(text)
    for _ in range(source.choice((1, 1, 2))):
        holder, key = source.choice(list(places(data)))
        change(holder, key, source)
    return str(yaml.safe_dump(data, allow_unicode=True, sort_keys=False))


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    for key in keys:
        yield data, key
        yield from places(data[key])


def change(holder: Any, key: Any, source: random.Random) -> None:
    kind = source.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        holder[source.choice(["x", "method", "0-9", "heads", "1e3", 3, "12"])] = holder.pop(key)
    elif kind == 1:
        del holder[key]
    elif kind == 2 and type(holder[key]) in (int, float):
        holder[key] = holder[key] * source.choice((-1, 2, 1000, 0.37))
    else:
        holder[key] = source.choice(VALUES)


def saved(content: Any) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


def mutated_bytes(content: bytes, source: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(source.choice((1, 1, 3, 30))):
        at = source.randrange(len(data))
        if source.random() < 0.7:
            data[at] = source.randrange(256)
        else:
            del data[at : at + source.choice((1, 8, 500))]
        data = data or bytearray(b"x")
    return bytes(data)


def mutated_content(make: Callable[[], Any], source: random.Random) -> Any:
    content = make()
    if isinstance(content, torch.Tensor):
        return source.choice(
            [content.int(), content.T, content[:2], content * 1000, -content, [content], content.half()]
        )
    holder, key = source.choice(list(places(content)))
    change(holder, key, source)
    return content


@pytest.mark.parametrize("make", [patterns, clusters, sparge_state, sale_thresholds])
def test_mutated_foreign_files(make: Callable[[], Any], model: Path) -> None:
    source, path = random.Random(1), model.parent / "given"
    is_torch = make in (sparge_state, sale_thresholds)
    whole = saved(make()) if is_torch else json.dumps(make()).encode()
    refused = 0
    for i in range(FOREIGN // 4):
        if i % 2:
            path.write_bytes(mutated_bytes(whole, source))
        else:
            content = mutated_content(make, source)
            path.write_bytes(saved(content) if is_torch else json.dumps(content).encode())
        refused += not loads(lambda: import_profile(path, model), str(path))
    assert refused > FOREIGN / 40

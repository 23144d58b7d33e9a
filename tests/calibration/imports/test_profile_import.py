# SPDX-License-Identifier: Apache-2.0
"""Foreign files become profiles, or are refused with the place of the fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.foreign_files import clusters, patterns, save
from vllm_sparse_backend.calibration.imports import import_profile
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.profile import parse_profile
from vllm_sparse_kernels.methods.base import Method

DENSE = make_method("dense", {})
Change = Callable[[Any], object]


def refused(path: Path, model: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        import_profile(path, model)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def method(name: str, **params: Any) -> Method:
    return make_method(name, params)


USUAL = method("vertical_slash", vertical_tokens=1000, slash_tokens=6096)
STREAM = method("a_shape", sink_tokens=100, local_tokens=800)
FEW, BLOCKS = method("vertical_slash", vertical_tokens=30, slash_tokens=800), method("block_sparse", top_blocks=100)
NOISE, SHARED = method("share_prefill"), method("share_prefill", cluster=9)
SECOND = (NOISE, SHARED, NOISE, NOISE)


@pytest.mark.parametrize(
    ("make", "expected", "source"),
    [
        (patterns, [(USUAL,) * 4, (USUAL, USUAL, STREAM, STREAM), (BLOCKS, USUAL, USUAL, FEW)], "MInference's"),
        (clusters, [SECOND, SECOND, (NOISE, NOISE, NOISE, SHARED)], "SharePrefill's"),
    ],
)
def test_files_of_other_tools(make: Callable[[], Any], expected: list[Any], source: str, model: Path) -> None:
    """A profile that is written and read again is unchanged."""
    profile = import_profile(save(make(), model.parent / "given"), model)
    assert str(profile.model) == "M with 3 layers, 4 heads, 4 kv heads, head_dim 16"
    assert [(DENSE,) * 4 if i in profile.dense_layers else profile.methods_of(i, 4) for i in range(3)] == expected
    assert source in str(profile.provenance["source"])
    assert parse_profile(text := profile.to_yaml(), "") == profile
    assert parse_profile(text, "").to_yaml() == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "its JSON of MInference or SharePrefill cannot be read: Expecting property"),
        ("[" * 100_000, "its JSON of MInference or SharePrefill cannot be read: "),
        ("{}", "given {}, expected MInference's patterns, a list of one object for each layer; or"),
        ("3", "given 3, expected MInference's patterns"),
    ],
)
def test_files_of_no_known_form(text: str, expected: str, model: Path) -> None:
    path = model.parent / "given"
    assert "No such file" in refused(path, model)
    path.write_text(text)
    assert expected in refused(path, model)


# The fault and its place

PATH = "model.layers.1.self_attn.inner_attention"


def put(layer: int, head: str, entry: object) -> Change:
    return lambda layers: layers[layer].update({head: entry})


def joined(name: str, place: object) -> Change:
    return lambda content: content["clusters"][name].append(place)


def states(name: str, value: object) -> Change:
    return lambda state: state.update({name: value})


WRONG = {
    patterns: [
        (put(1, "2", ["flex_vertical_and_slash", 1, 2, 0.0]), "layer 1: head 2: given ['flex_v"),
        (put(0, "0", ["stream_llm", 100, 800]), "layer 0: head 0: given ['stream_llm', 100, 800], expected [vert"),
        (put(0, "0", ["stream_llm", True, 800, 1]), "layer 0: head 0: sink_tokens: given true"),
        (put(2, "x", ["vertical_and_slash", 1, 800, 1]), "layer 2: given '0, 1, 2, 3, x', expected an object with"),
        (lambda layers: layers.pop(), "given 2 layers, expected 3, as in M with 3 layers"),
        (lambda layers: layers.__setitem__(0, 1), "layer 0: given 1, expected an object with a key for each head"),
    ],
    clusters: [
        (lambda c: c.pop("shared_clusters"), "shared_clusters: missing"),
        (lambda c: c["clusters"].update({"09": []}), "clusters.09: given '09', expected"),
        (
            joined("7", [3, 0]),
            "clusters: given layer 3, head 0 in 1 places, expected heads of M with 3 layers",
        ),
        (joined("7", [2, 3]), "clusters: given layer 2, head 3 in 2 places"),
        (states("shared_clusters", ["9", "8"]), "shared_clusters: given '8', expected one of 42, 7, 9"),
    ],
}


@pytest.mark.parametrize(
    ("make", "change", "expected"), [(make, *case) for make, cases in WRONG.items() for case in cases]
)
def test_wrong_files(make: Callable[[], Any], change: Change, expected: str, model: Path) -> None:
    change(content := make())
    assert expected in refused(save(content, model.parent / "given"), model)

# SPDX-License-Identifier: Apache-2.0
"""Foreign files become profiles, or are refused naming the place."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign.files import clusters, patterns, sale_thresholds, save, sparge_state
from vllm_sparse_backend.profiling.importers.detect import import_profile
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.methods import make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import parse_profile
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


def sparge(tau: float, theta: float, pv: float) -> Method:
    margin = float(f"{-pv * math.log(2):.7g}")
    return method("sparge_attn", kept_mass=tau, min_similarity=theta, skip_margin=margin, skip_whole_steps=True)


USUAL = method("vertical_slash", vertical_tokens=1000, slash_tokens=6096)
STREAM = method("a_shape", sink_tokens=100, local_tokens=800)
FEW, BLOCKS = method("vertical_slash", vertical_tokens=30, slash_tokens=800), method("block_sparse", top_blocks=100)
NOISE, SHARED = method("share_prefill"), method("share_prefill", cluster=9)
FIRST, SECOND, THIRD = sparge(0.9375, 0.3125, 20), sparge(0.9688, -0.5, 4.4141), sparge(0.9, 0.0, 1)
HIGH, MIDDLE, LOW = (method("sale", tau=tau) for tau in (0.008, 0.004, 0.002))


@pytest.mark.parametrize(
    ("make", "expected", "source"),
    [
        (patterns, [(USUAL,) * 4, (USUAL, USUAL, STREAM, STREAM), (BLOCKS, USUAL, USUAL, FEW)], "MInference's"),
        (
            clusters,
            [(NOISE, SHARED, NOISE, NOISE), (NOISE, SHARED, NOISE, NOISE), (NOISE, NOISE, NOISE, SHARED)],
            "1 of its 3 clusters share",
        ),
        (
            sparge_state,
            [(FIRST, SECOND, DENSE, DENSE), *[(FIRST, SECOND, THIRD, THIRD)] * 2],
            "from base 2 to natural units",
        ),
        (sale_thresholds, [(HIGH, MIDDLE, LOW, DENSE), (HIGH,) * 4, (DENSE,) * 4], "SALE's"),
    ],
)
def test_files_of_other_tools(make: Callable[[], Any], expected: list[Any], source: str, model: Path) -> None:
    """Written and read again, the profile is the same."""
    profile = import_profile(save(make(), model.parent / "given"), model)
    assert profile.model == ModelShape("M", 3, 4, 4, 16)
    assert [(DENSE,) * 4 if i in profile.dense_layers else profile.methods_of(i, 4) for i in range(3)] == expected
    assert source in str(profile.provenance.source)
    assert parse_profile(text := profile.to_yaml(), "") == profile
    assert parse_profile(text, "").to_yaml() == text


def test_sparge_attn_without_what_their_kernels_do_not_use(model: Path) -> None:
    state = {name: one for name, one in sparge_state().items() if not name.endswith(("is_sparse", "simthreshd2"))}
    assert DENSE not in import_profile(save(state, model.parent / "given"), model).methods_of(0, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "its content cannot be read: Expecting property"),
        ("[" * 100_000, "its content cannot be read: "),
        ('[{"0": 1, "0": 2}]', "its content cannot be read: an object has a key twice"),
        ("{}", "given 0 entries of type dict, expected MInference's patterns, a list of one object for each layer; or"),
        ("3", "given one value of type int, expected MInference's patterns"),
    ],
)
def test_files_of_no_known_form(text: str, expected: str, model: Path) -> None:
    path = model.parent / "given"
    assert "No such file" in refused(path, model)
    path.write_text(text)
    assert expected in refused(path, model)


# What is wrong, and where

PATH = "model.layers.1.self_attn.inner_attention"


def put(layer: int, head: str, entry: object) -> Change:
    return lambda layers: layers[layer].update({head: entry})


def joined(name: str, place: object) -> Change:
    return lambda given: given["clusters"][name].append(place)


def states(name: str, value: object) -> Change:
    return lambda state: state.update({name: value})


WRONG = {
    patterns: [
        (put(1, "2", ["flex_vertical_and_slash", 1, 2, 0.0]), "layer 1: head 2: given ['flex_v"),
        (put(0, "0", ["stream_llm", 100, 800]), "layer 0: head 0: given ['stream_llm', 100, 800], expected [vert"),
        (put(0, "0", ["stream_llm", True, 800, 1]), "layer 0: head 0: sink_tokens: given True"),
        (put(2, "x", ["vertical_and_slash", 1, 800, 1]), "layer 2: given heads 0, 1, 2, 3, x, expected an object with"),
        (lambda layers: layers.pop(), "given 2 layers, expected a list of 3 for M with 3 layers"),
        (lambda layers: layers.__setitem__(0, 1), "layer 0: given 1, expected an object with the heads 0 to 3"),
    ],
    clusters: [
        (lambda c: c.pop("shared_clusters"), "shared_clusters: missing"),
        (lambda c: c["clusters"].update({"09": []}), "clusters.09: given '09', expected"),
        (joined("7", [3, 0]), "clusters: given layer 3, head 0, 1 times, expected those of M with 3 layers"),
        (joined("7", [2, 3]), "clusters: given layer 2, head 3, 2 times"),
        (states("shared_clusters", ["9", "8"]), "shared_clusters: given '8', expected one of 42, 7, 9"),
    ],
    sparge_state: [
        (lambda s: s.pop(f"{PATH}.pvthreshd"), "layer 1: pvthreshd: missing"),
        (states(f"{PATH}.cdf", torch.zeros(4)), "cdf': given 'cdf', expected one of cdf"),
        (states("layers.3.pvthreshd", torch.ones(4)), "'layers.3.pvthreshd': expected a layer's number below 3 in it"),
        (states("x.1.pvthreshd", torch.ones(4)), "x.1.pvthreshd: given, but layer 1 has pvt"),
        (lambda s: s[f"{PATH}.cdfthreshd"].mul_(2), "layer 1: head 0: given {'cdfthreshd': 1.875, 'simthreshd1': 0.31"),
        (lambda s: s[f"{PATH}.pvthreshd"].zero_(), "'pvthreshd': 0.0}: skip_margin: given -0.0, expected a finite n"),
        (lambda s: s[f"{PATH}.cdfthreshd"].fill_(math.nan), f"{PATH}.cdfthreshd: given a number that is not finite"),
        (states(f"{PATH}.cdfthreshd", [1.0]), f"{PATH}.cdfthreshd: given list, expected a tensor [4]"),
        (states(f"{PATH}.cdfthreshd", torch.ones(1, dtype=torch.complex64)), "a tensor that is not plain"),
    ],
    sale_thresholds: [
        (lambda t: t.resize_(2, 4), "thresholds [layers, heads]: given a tensor [2, 4], expected [3, 4]"),
        (lambda t: t[1].fill_(1.5), "layer 1: head 0: tau: given 1.5, expected a number in [0, 1)"),
    ],
}


@pytest.mark.parametrize(("make", "change", "expected"), [(make, *one) for make, of in WRONG.items() for one in of])
def test_wrong_files(make: Callable[[], Any], change: Change, expected: str, model: Path) -> None:
    change(content := make())
    assert expected in refused(save(content, model.parent / "given"), model)


# Files of torch.save


class Runs:
    """What would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_executed(model: Path, tmp_path: Path) -> None:
    trace, path = tmp_path / "executed", tmp_path / "given"
    torch.save({"model.layers.0.cdfthreshd": Runs(trace)}, path)
    assert "holds more than tensors, numbers and texts, which is not loaded" in refused(path, model)
    with path.open("wb") as file:
        pickle.dump(Runs(trace), file)
    assert "expected JSON, or what torch.save writes since torch 1.6" in refused(path, model)
    assert not trace.exists()


def test_tensors_that_claim_to_be_huge_are_not_unpacked(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "given"
    torch.save(torch.zeros(1).expand(1 << 50), path)
    assert "given a tensor [1125899906842624], expected [3, 4]" in refused(path, model)
    torch.save(torch.zeros(5_000_000), path)
    assert "expected at most 16777216" in refused(path, model)


def test_a_file_of_an_old_torch_or_a_part_of_one(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "given"
    torch.save(sale_thresholds(), path, _use_new_zipfile_serialization=False)
    assert "expected JSON, or what torch.save writes since torch 1.6" in refused(path, model)
    save(sparge_state(), path).write_bytes(path.read_bytes()[:-500])
    assert "expected JSON, or what torch.save writes since torch 1.6" in refused(path, model)

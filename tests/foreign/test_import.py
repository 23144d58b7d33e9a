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
from vllm_sparse_backend.settings.profile import Profile, parse_profile
from vllm_sparse_kernels.methods.base import Method

DENSE = make_method("dense", {})
Change = Callable[[Any], object]


def methods(profile: Profile) -> list[tuple[Method, ...]]:
    return [(DENSE,) * 4 if i in profile.dense_layers else profile.methods_of(i, 4) for i in range(3)]


def imported(content: Any, model: Path) -> Profile:
    """Of a file with that content, whose profile is the same once it is written and read again."""
    profile = import_profile(save(content, model.parent / "given"), model)
    assert profile.model == ModelShape("M", 3, 4, 4, 16)
    for compact in (False, True):
        assert parse_profile(text := profile.to_yaml(compact), "") == profile
        assert parse_profile(text, "").to_yaml(compact) == text
    return profile


def refused(path: Path, model: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        import_profile(path, model)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# MInference


def test_minference(model: Path) -> None:
    profile = imported(patterns(), model)
    usual = make_method("vertical_slash", {"vertical_tokens": 1000, "slash_tokens": 6096})
    stream = make_method("a_shape", {"sink_tokens": 100, "local_tokens": 800})
    few = make_method("vertical_slash", {"vertical_tokens": 30, "slash_tokens": 800})
    blocks = make_method("block_sparse", {"top_blocks": 100})
    assert methods(profile) == [(usual,) * 4, (usual, usual, stream, stream), (blocks, usual, usual, few)]
    assert profile.default == usual


def put(layer: int, head: str, entry: object) -> Change:
    return lambda layers: layers[layer].update({head: entry})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "its content cannot be read: Expecting property"),
        ("[" * 100_000, "its content cannot be read: "),
        ('[{"0": 1, "0": 2}]', "its content cannot be read: an object has a key twice"),
        ("{}", "given 0 entries of type dict, expected MInference's patterns, a list of one object for each layer; or"),
        ("3", "given one value of type int, expected MInference's patterns"),
        ("", "its content cannot be read: "),
    ],
)
def test_files_of_no_known_form(text: str, expected: str, model: Path) -> None:
    path = model.parent / "given"
    assert "No such file" in refused(path, model)
    path.write_text(text)
    assert expected in refused(path, model)


# SharePrefill


def test_share_prefill(model: Path) -> None:
    profile = imported(clusters(), model)
    noise, shared = (make_method("share_prefill", {"cluster": n}) for n in (-1, 9))
    assert methods(profile) == [
        (noise, shared, noise, noise), (noise, shared, noise, noise), (noise, noise, noise, shared),
    ]  # fmt: skip
    assert profile.default == noise
    assert "1 of its 3 clusters share" in str(profile.provenance.source)


# SpargeAttn


def test_sparge_attn(model: Path) -> None:
    profile = imported(sparge_state(), model)

    def head(tau: float, theta: float, pv: float) -> Method:
        skipping = {"skip_margin": float(f"{-pv * math.log(2):.7g}"), "skip_whole_steps": True}
        return make_method("sparge_attn", {"kept_mass": tau, "min_similarity": theta, **skipping})

    first, second, third = head(0.9375, 0.3125, 20), head(0.9688, -0.5, 4.4141), head(0.9, 0.0, 1)
    assert methods(profile) == [(first, second, DENSE, DENSE), *[(first, second, third, third)] * 2]
    assert "from base 2 to natural units" in str(profile.provenance.source)


def test_sparge_attn_without_what_their_kernels_do_not_use(model: Path) -> None:
    state = {name: one for name, one in sparge_state().items() if not name.endswith(("is_sparse", "simthreshd2"))}
    assert DENSE not in methods(imported(state, model))[0]


PATH = "model.layers.1.self_attn.inner_attention"


# SALE


def test_sale(model: Path) -> None:
    profile = imported(sale_thresholds(), model)
    taus = [make_method("sale", {"tau": tau}) for tau in (0.008, 0.004, 0.002)]
    assert methods(profile) == [(*taus, DENSE), (taus[0],) * 4, (DENSE,) * 4]
    assert profile.dense_layers == (2,)


# What is wrong, and where

WRONG = {
    patterns: [
        (put(1, "2", ["flex_vertical_and_slash", 1, 2, 0.0]), "layer 1, head 2: pattern: given 'flex_v"),
        (put(1, "2", ["flex_vertical_and_slash", [0.9, 4096], [0.9, 4096], 0.0]), "layer 1, head 2: given"),
        (put(0, "0", ["stream_llm", 100, 800]), "layer 0, head 0: given ['stream_llm', 100, 800], expected [pattern"),
        (put(0, "0", ["stream_llm", "100", 800, 1]), "layer 0, head 0: given"),
        (put(0, "0", ["stream_llm", True, 800, 1]), "layer 0, head 0: sink_tokens: given True"),
        (put(0, "0", None), "layer 0, head 0: given None"),
        (put(2, "1", ["vertical_and_slash", -1, 800, 1]), "layer 2, head 1: vertical_tokens: given -1"),
        (put(2, "4", ["vertical_and_slash", 1, 800, 1]), "layer 2: given heads 0, 1, 2, 3, 4, expected an object with"),
        (put(2, "x", ["vertical_and_slash", 1, 800, 1]), "layer 2: given heads 0, 1, 2, 3, x"),
        (lambda layers: layers.pop(), "given 2 layers, expected a list of 3 for M with 3 layers"),
        (lambda layers: layers.__setitem__(0, 1), "layer 0: given 1, expected an object with the heads 0 to 3"),
        (lambda layers: layers[0].clear(), "layer 0: given heads none, expected an object with the heads 0 to 3"),
    ],
    clusters: [
        (lambda c: c.pop("shared_clusters"), "shared_clusters: missing"),
        (lambda c: c.update(more=1), "more: unknown field: given 'more', expected one of clusters"),
        (lambda c: c.update(clusters=[]), "clusters: given [], expected a mapping of fields"),
        (lambda c: c["clusters"].update({"x": []}), "clusters.x: given 'x', expected String should match"),
        (lambda c: c["clusters"].update({"09": []}), "clusters.09: given '09', expected"),
        (lambda c: c["clusters"].update({"5": 3}), "clusters.5: given 3, expected a list"),
        (
            lambda c: c["clusters"]["7"].append([3, 0]),
            "clusters: given layer 3, head 0, 1 times, expected those",
        ),
        (lambda c: c["clusters"]["7"].append([0, 4]), "clusters: given layer 0, head 4, 1 times"),
        (lambda c: c["clusters"]["7"].append([-1, 0]), "clusters.7.1.0: given -1, expected at least 0"),
        (lambda c: c["clusters"]["7"].append("00"), "clusters.7.1: given '00', expected a list"),
        (lambda c: c["clusters"]["7"].append([2, 3]), "clusters: given layer 2, head 3, 2 times"),
        (lambda c: c.update(shared_clusters="9"), "shared_clusters: given '9', expected a list"),
        (lambda c: c.update(shared_clusters=["9", "8"]), "shared_clusters: given '8', expected one of 42, 7, 9"),
        (lambda c: c.update(shared_clusters=[[]]), "shared_clusters.0: given []"),
    ],
    sparge_state: [
        (lambda s: s.pop(f"{PATH}.pvthreshd"), "layer 1: pvthreshd: missing"),
        (lambda s: s.update({f"{PATH}.cdf": torch.zeros(4)}), "cdf': given 'cdf', expected one of cdf"),
        (lambda s: s.update({3: torch.zeros(4)}), "3: given '', expected one of"),
        (lambda s: s.update({"layers.3.pvthreshd": torch.ones(4)}), "'layers.3.pvthreshd': expected a layer's nu"),
        (lambda s: s.update({"pvthreshd": torch.ones(4)}), "'pvthreshd': expected a layer's number below 3 in it"),
        (lambda s: s.update({"x.1.pvthreshd": torch.ones(4)}), "x.1.pvthreshd: given, but layer 1 has pvt"),
        (
            lambda s: s[f"{PATH}.cdfthreshd"].mul_(2),
            "layer 1, head 0: given cdfthreshd 1.875, simthreshd1 0.31",
        ),
        (lambda s: s[f"{PATH}.pvthreshd"].zero_(), "pvthreshd 0: skip_margin: given -0.0, expected a finite n"),
        (lambda s: s[f"{PATH}.simthreshd1"].fill_(-2), "min_similarity: given -2.0, expected a n"),
        (lambda s: s[f"{PATH}.cdfthreshd"].fill_(math.nan), f"{PATH}.cdfthreshd: given a number that is not finite"),
        (lambda s: s.update({f"{PATH}.cdfthreshd": torch.ones(5)}), "cdfthreshd: given a tensor [5], expected [4]"),
        (lambda s: s.update({f"{PATH}.cdfthreshd": [1.0]}), f"{PATH}.cdfthreshd: given list, expected a tensor [4]"),
        (
            lambda s: s.update({f"{PATH}.cdfthreshd": torch.ones(1, dtype=torch.complex64)}),
            "a tensor that is not plain",
        ),
    ],
    sale_thresholds: [
        (lambda t: t.resize_(2, 4), "thresholds [layers, heads]: given a tensor [2, 4], expected [3, 4]"),
        (lambda t: t[1].fill_(1.5), "layer 1, head 0: tau: given 1.5, expected a number from 0 to 1"),
        (lambda t: t[2].fill_(-0.1), "layer 2, head 0: tau: given -0.1"),
        (lambda t: t[0].fill_(math.inf), "thresholds [layers, heads]: given a number that is not finite"),
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

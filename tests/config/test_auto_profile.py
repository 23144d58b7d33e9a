# SPDX-License-Identifier: Apache-2.0
"""``profile: auto``: the bundled profile for a model, the reason, and the fallback if there is none."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_sparse_backend.config import auto_profile
from vllm_sparse_backend.config.auto_profile import choose_profile
from vllm_sparse_backend.config.crossover_table import Lengths
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import Profile, Provenance, bundled_profiles, load_profile
from vllm_sparse_backend.config.settings import SparsePrefillConfig

LLAMA = ModelShape("LlamaForCausalLM", 32, 32, 8, 128, 5e5)
LONGER = "gradientai/Llama-3-8B-Instruct-Gradient-1048k"
READ = cache(load_profile)
QWEN = ModelShape("Qwen2ForCausalLM", 28, 28, 4, 128, 1e6)


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_profile, "load_profile", READ)


@pytest.mark.parametrize(
    ("shape", "name", "taken", "why"),
    [
        (LLAMA, "meta-llama/Llama-3.1-8B-Instruct", "minference-llama-3.1-8b-instruct", "made for meta-llama/Llama"),
        (LLAMA, "llama-3.1-8b-instruct", "minference-llama-3.1-8b-instruct", "for llama-3.1-8b-instruct; others"),
        (LLAMA, "my-tune", "minference-llama-3.1-8b-instruct", "and my-tune has its shape: check its answers"),
        (replace(LLAMA, rope_theta=2.8e9), LONGER, "minference-llama-3-8b-instruct-262k", f"it was made for {LONGER}"),
        (QWEN, "Qwen2-7B-Instruct", "minference-qwen2-7b-instruct", "it was made for Qwen2-7B-Instruct"),
        (QWEN, "Qwen2.5-7B-Instruct", "minference-qwen2.5-7b-instruct", "it was made for Qwen2.5-7B-Instruct"),
        (QWEN, "my-tune", None, "of Qwen/Qwen2-7B-Instruct and of Qwen/Qwen2.5-7B-Instruct: set profile"),
        (replace(QWEN, rope_theta=1e7), "x", "minference-qwen2.5-7b-instruct-1m", "and x has its shape"),
        (replace(QWEN, num_layers=27), "Qwen2-7B-Instruct", None, "no bundled profile is for Qwen2ForCausalLM with 27"),
    ],
)  # fmt: skip
def test_taken_by_shape_and_name(shape: ModelShape, name: str, taken: str | None, why: str) -> None:
    bundled = {name: path for name, path in bundled_profiles().items() if name.startswith("minference-")}
    choice = choose_profile(replace(shape, names=(name,)), bundled)
    assert choice.name == taken
    assert why in choice.why


def test_what_was_calibrated_goes_first(tmp_path: Path) -> None:
    shape = replace(LLAMA, names=("o/M",))
    profiles = {name: tmp_path / f"{name}.yaml" for name in ("a", "b")}
    for name, path in profiles.items():
        provenance = Provenance(tool_version="0.1.0" if name == "b" else None)
        profile = Profile(format=1, model=shape, default=make_method("a_shape", {}), provenance=provenance)
        path.write_text(profile.to_yaml())
    assert choose_profile(replace(LLAMA, names=("/models/M",)), profiles).name == "b"
    assert choose_profile(replace(LLAMA, names=("other",)), profiles).name == "b"


def test_the_log_says_what_was_taken_and_the_default_runs_where_nothing_was() -> None:
    config = SparsePrefillConfig(profile="auto")
    plan = Plan.build(config, replace(QWEN, names=("Qwen2-7B-Instruct",)))
    taken = "profile minference-qwen2-7b-instruct (auto: it was made for Qwen2-7B-Instruct; others that"
    assert plan.describe(Lengths(0, 0))[0].startswith(f"sparse prefill with {taken}")
    assert plan.methods >= {make_method("vertical_slash", {"vertical_tokens": 3500, "slash_tokens": 100})}
    plan = Plan.build(config, replace(QWEN, names=("tune",)))  # not the plan with the same shape and another name
    assert plan.methods == {make_method("default", {})}
    assert plan.source.startswith("method default (profile auto: tune has the shape of Qwen/Qwen2-7B-Instruct and of")


CONFIG = {"architectures": ["M"], "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("Qwen/Qwen2-7B-Instruct", ("Qwen/Qwen2-7B-Instruct",)),
        ("/models/Qwen2-7B-Instruct/", ("Qwen2-7B-Instruct",)),
        ("./models/mine", ("mine",)),
        ("/c/hub/models--Qwen--Qwen2-7B-Instruct/snapshots/0123abc", ("Qwen/Qwen2-7B-Instruct",)),
        *((nameless, ()) for nameless in ("", "/", None, 3)),
    ],
)
def test_name_of_a_path(path: Any, names: tuple[str, ...]) -> None:
    assert ModelShape.from_config(CONFIG | {"_name_or_path": path}).names == names


def test_a_folder_names_its_model_as_it_does_on_a_server(tmp_path: Path) -> None:
    (folder := tmp_path / "Mine").mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "o/Base"}))
    assert ModelShape.from_folder(folder).names == ("Mine",)
    assert ModelShape.from_folder(folder / "config.json").names == ("o/Base",)

# SPDX-License-Identifier: Apache-2.0
"""Settings that an operator may write, and the errors for wrong settings."""

from typing import Any

import pytest

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import make_method, parameters_of
from vllm_sparse_backend.config.ranges import MOST_COUNT
from vllm_sparse_backend.config.settings import SparsePrefillConfig, load_config
from vllm_sparse_kernels.methods import METHODS


def refused(settings: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config({"sparse_prefill": settings})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("--additional-config sparse_prefill")
    return message


@pytest.mark.parametrize("additional_config", [None, {}, {"gdn_prefill_backend": "triton"}, {"sparse_prefill": {}}])
def test_without_settings_the_defaults_hold(additional_config: dict[str, Any] | None) -> None:
    config = load_config(additional_config)
    assert config == SparsePrefillConfig()
    assert (config.method, config.profile, config.min_tokens) == ("default", None, "auto")


def test_fields_are_taken() -> None:
    params = {"kept_mass": 1, "local_tokens": 256}
    settings = {"params": params, "min_tokens": 0, "dense_layers": "3,0-1"}
    config = load_config({"sparse_prefill": settings})
    assert config.uniform_method() == make_method("top_p", {"kept_mass": 1.0, "local_tokens": 256})
    assert make_method("default", {}) == make_method("top_p", {})
    assert (config.min_tokens, config.dense_layers) == (0, (0, 1, 3))


def test_all_wrong_fields_are_named_at_once() -> None:
    message = refused({"method": "nothing", "min_tokens": "8k", "dense_layers": [1, -2], "min_tokns": 1})
    assert "sparse_prefill.method: given 'nothing'" in message
    assert "sparse_prefill.min_tokens: given '8k', expected an integer" in message
    assert "sparse_prefill.dense_layers: given [1, -2], expected numbers and ranges such as '0-3,7'" in message
    assert "sparse_prefill.min_tokns: unknown field" in message
    assert "did you mean 'min_tokens'?" in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_tokens": 10**20}, f"sparse_prefill.min_tokens: given {10**20}, expected at least 0, and at most"),
        ({"check_index": "yes"}, "sparse_prefill.check_index: given 'yes', expected a valid boolean"),
        ({"engine": "flsh"}, "sparse_prefill.engine: given 'flsh', expected 'auto', 'hopper', 'flash' or 'portable'"),
        ({"requests": True}, "sparse_prefill.requests: given true, expected a mapping of fields to values"),
        ({"requests": {"allowed": []}}, "requests.allowed: unknown field: given 'allowed', expected one of"),
        ({"profile": 3}, "sparse_prefill.profile: given 3, expected a valid string"),
        ("", "sparse_prefill.profile: given '', expected at least 1 character"),
        ({"requests": {"allow": "on"}}, "sparse_prefill.requests.allow: given 'on', expected a valid list"),
        ({"streaming_heads": "off"}, "streaming_heads: given 'off', expected 'auto', true or false"),
        ({"streaming_heads": {"min_context_tokens": 0}}, "expected 'auto', true or false"),
        ({"streaming_heads": None}, "streaming_heads: given null, expected 'auto', true or false"),
        ({"requests": [None, True]}, "requests: given [null, true], expected a mapping"),
        ({"streaming_heads": True, "profile": "streaming"}, "given both profile 'streaming' and streaming_heads"),
        (
            {"streaming_heads": True, "method": "a_shape"},
            "streaming_heads: given with method 'a_shape', expected top_p",
        ),
        ({"streaming_heads": True, "params": {"kept_mass": 1}}, "streaming_heads: given with kept_mass 1"),
        (
            {"profile": "x", "params": {}},
            "sparse_prefill: given both profile 'x' and params, expected only one of them",
        ),
        (7, "sparse_prefill: given 7, expected a mapping, or the name or path of a profile"),
        ({"method": "dense", "params": {"top": 1}}, "sparse_prefill.params: top: unknown parameter of dense"),
        ({"method": "den\nse"}, "sparse_prefill.method: given 'den\\nse'"),
        ({"params": {"kept_mass": True, "tau": 1}}, "kept_mass: given true, expected a valid number; tau: unknown"),
        ({"params": {"local_tokens": MOST_COUNT + 128}}, f"local_tokens: given {MOST_COUNT + 128}, expected at most"),
        ({"params": {"kept_mass": -5.0}}, "sparse_prefill.params: kept_mass: given -5.0, expected"),
    ],
)
def test_wrong_value(settings: object, expected: str) -> None:
    assert expected in refused(settings)


@pytest.mark.parametrize("key", ["sparse-prefill", "sparseprefill", "Sparse_Prefill", "sparse_prefil"])
def test_misspelt_key_is_no_silent_default(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"given key '{key}', expected 'sparse_prefill'"):
        load_config({key: {"min_tokens": 1}})
    with pytest.raises(ConfigurationError, match="--additional-config: given "):
        load_config([key])  # type: ignore[arg-type]


@pytest.mark.parametrize("beside", [{}, {"sparse_prefill": {"min_tokens": 1}}])
def test_settings_one_level_too_high_are_no_silent_default(beside: dict[str, Any]) -> None:
    for key, value in (("method", "a_shape"), ("profile", "mine.yaml"), ("min_tokens", 1)):
        with pytest.raises(ConfigurationError, match=f"given key '{key}' at the top level, expected it under"):
            load_config({**beside, key: value})
    assert load_config({**beside, "of_another_plugin": 1}) == load_config(beside)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_registered_method_can_be_named_and_written_down(name: str) -> None:
    method = make_method(name, {})
    assert type(method) is METHODS[name].parameters
    written = parameters_of(method)
    assert written.pop("method") == name
    assert make_method(name, written) == method
    assert SparsePrefillConfig(method=name).uniform_method() == method

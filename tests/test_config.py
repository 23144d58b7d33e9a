# SPDX-License-Identifier: Apache-2.0
"""What an operator may write, and what they are told when it is wrong."""

from dataclasses import dataclass
from typing import Any

import pytest

from vllm_sparse_backend.settings.config import SparsePrefillConfig, load_config
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_backend.settings.methods import PRESETS, make_method, method_names, parameters_of
from vllm_sparse_backend.settings.ranges import MOST_COUNT
from vllm_sparse_kernels.methods import METHODS, name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.spec import MethodSpec
from vllm_sparse_kernels.select.parameters import require


@dataclass(frozen=True)
class StandIn(Method):
    """A method with a parameter of each kind, so that these tests hang on no particular one."""

    window_tokens: int = 64
    share: float = 0.5
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.window_tokens >= 1, "window_tokens", self.window_tokens, "at least 1")

    def select(self, *_: object) -> None:
        raise AssertionError("a configuration selects nothing")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(METHODS.specs, "stand_in", MethodSpec("stand_in", StandIn, StandIn.select, full=StandIn()))
    return "stand_in"


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
    settings = {"method": "dense", "min_tokens": 0, "dense_layers": [3, 1, 3], "metrics_interval_s": 2}
    config = load_config({"sparse_prefill": settings})
    assert name_of(config.uniform_method()) == "dense"
    assert (config.min_tokens, config.dense_layers, config.metrics_interval_s) == (0, (1, 3), 2.0)


def test_all_wrong_fields_are_named_at_once() -> None:
    message = refused({"method": "nothing", "min_tokens": "8k", "dense_layers": [1, -2], "min_tokns": 1})
    assert "sparse_prefill.method: given 'nothing'" in message
    assert "sparse_prefill.min_tokens: given '8k', expected an integer" in message
    assert "sparse_prefill.dense_layers.1: given -2, expected at least 0" in message
    assert "sparse_prefill.min_tokns: unknown field" in message
    assert "did you mean 'min_tokens'?" in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"min_tokens": -1}, "sparse_prefill.min_tokens: given -1, expected at least 0"),
        ({"min_tokens": True}, "sparse_prefill.min_tokens: given True, expected an integer"),
        ({"min_tokens": "8192"}, "sparse_prefill.min_tokens: given '8192', expected an integer"),
        ({"check_index": "yes"}, "sparse_prefill.check_index: given 'yes', expected true or false"),
        ({"engine": "flsh"}, "sparse_prefill.engine: given 'flsh', expected 'auto', 'hopper', 'flash' or 'portable'"),
        ({"metrics_interval_s": 0}, "sparse_prefill.metrics_interval_s: given 0, expected more than 0"),
        ({"metrics_interval_s": 6}, "sparse_prefill.metrics_interval_s: given 6, expected at most 5"),
        (
            {"metrics_interval_s": float("inf")},
            "sparse_prefill.metrics_interval_s: given inf, expected a finite number",
        ),
        ({"guard": True}, "sparse_prefill.guard: given True, expected a mapping of fields to values"),
        ({"min_tokens": 10**20}, f"sparse_prefill.min_tokens: given {10**20}, expected at least 0, and at most"),
        ({"min_query_tokens": 1 << 31}, "sparse_prefill.min_query_tokens: given 2147483648, expected at least 0, and"),
        ({"guard": {"rate": 0}}, "sparse_prefill.guard.rate: given 0, expected at least 1e-06"),
        ({"guard": {"rate": 1e-320}}, "sparse_prefill.guard.rate: given 1e-320, expected at least 1e-06"),
        ({"guard": {"patience": 10**20}}, f"sparse_prefill.guard.patience: given {10**20}, expected at most"),
        ({"guard": {"recover": 10**20}}, f"sparse_prefill.guard.recover: given {10**20}, expected at most"),
        ({"guard": {"rate": 1.5}}, "sparse_prefill.guard.rate: given 1.5, expected at most 1"),
        ({"guard": {"bound": "low"}}, "sparse_prefill.guard.bound: given 'low', expected a number"),
        (
            {"guard": {"patience": 0, "recovery": 4}},
            "sparse_prefill.guard.recovery: unknown field: given 'recovery', expected one of bound, patience, rate, "
            "recover (did you mean 'recover'?)",
        ),
        ({"profile": 3}, "sparse_prefill.profile: given 3, expected a text"),
        ({"params": 3}, "sparse_prefill.params: given 3, expected a mapping"),
        ({"profile": "x", "method": "dense"}, "sparse_prefill: given profile 'x' and method, expected one of them"),
        ({"profile": "x", "params": {}}, "sparse_prefill: given profile 'x' and params, expected one of them"),
        (7, "sparse_prefill: given 7, expected a mapping, or the name or path of a profile"),
        (None, "sparse_prefill: given None, expected a mapping, or the name or path of a profile"),
        ({"method": "dense", "params": {"top": 1}}, "sparse_prefill.params: top: unknown parameter of dense"),
        ({"method": "den\nse"}, "sparse_prefill.method: given 'den\\nse'"),
    ],
)
def test_wrong_value(settings: object, expected: str) -> None:
    assert expected in refused(settings)


@pytest.mark.parametrize("key", ["sparse-prefill", "sparseprefill", "Sparse_Prefill", "sparse_prefil"])
def test_misspelt_key_is_no_silent_default(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"given key '{key}', expected 'sparse_prefill'"):
        load_config({key: {"min_tokens": 1}})


def test_additional_config_that_is_no_mapping() -> None:
    with pytest.raises(ConfigurationError, match="--additional-config: given "):
        load_config(["sparse_prefill"])  # type: ignore[arg-type]


def test_error_is_no_value_error() -> None:
    # Pydantic wraps ValueErrors that are raised while vLLM's own configuration is made.
    assert not issubclass(ConfigurationError, ValueError)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_registered_method_can_be_named_and_written_down(name: str) -> None:
    method = make_method(name, {})
    assert type(method) is METHODS[name].parameters
    written = parameters_of(method)
    assert written.pop("method") == name
    assert make_method(name, written) == method
    assert SparsePrefillConfig(method=name).uniform_method() == method


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_parameter_refuses_a_value_of_another_kind(name: str) -> None:
    for field in parameters_of(make_method(name, {})).keys() - {"method"}:
        for wrong in ({"a": 1}, {1, 2}):
            with pytest.raises(ValueError, match=f"^{field}: given "):
                make_method(name, {field: wrong})


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_parameter_is_more_than_kernels_count(name: str) -> None:
    for field, default in parameters_of(make_method(name, {})).items():
        if type(default) is int:
            for wrong in (MOST_COUNT + 128, 10**20):
                with pytest.raises(ValueError, match=f"^{field}: given {wrong}, expected at most {MOST_COUNT}"):
                    make_method(name, {field: wrong})


def test_presets_stand_for_methods() -> None:
    for preset, (method, params) in PRESETS.items():
        assert (preset in method_names()) == (method in METHODS)
        if method in METHODS:
            assert make_method(preset, {}) == make_method(method, params)


def test_parameters_go_before_those_of_a_preset() -> None:
    assert make_method("default", {}) == make_method("sale", {"tau": 0.03})
    assert make_method("default", {"tau": 0.1, "local_tokens": 256}) == make_method(
        "sale", {"tau": 0.1, "local_tokens": 256}
    )


def test_wrong_parameters_are_named_all_at_once(stand_in: str) -> None:
    message = refused({"method": stand_in, "params": {"window_tokens": "many", "share": True, "sinks": 1}})
    assert "window_tokens: given 'many', expected an integer" in message
    assert "share: given True, expected a number" in message
    assert f"sinks: unknown parameter of {stand_in}" in message


def test_value_that_the_method_itself_refuses(stand_in: str) -> None:
    message = refused({"method": stand_in, "params": {"window_tokens": -5}})
    assert "sparse_prefill.params: window_tokens: given -5, expected at least 1" in message


def test_parameters_are_taken(stand_in: str) -> None:
    config = load_config({"sparse_prefill": {"method": stand_in, "params": {"share": 1, "levels": [1, 2]}}})
    assert parameters_of(config.uniform_method()) == {
        "method": stand_in,
        "window_tokens": 64,
        "share": 1.0,
        "levels": (1, 2),
    }

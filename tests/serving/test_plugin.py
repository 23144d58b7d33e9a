# SPDX-License-Identifier: Apache-2.0
"""The plugin in vLLM's registry and platform: registered once, and used only by servers that choose it.

Tests of real servers (tests/server) cover processes that vLLM spawns, and processes that VLLM_PLUGINS excludes.
"""

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")


import torch
import vllm.plugins
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends import registry
from vllm.v1.attention.selector import AttentionSelectorConfig

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.folders import profile_file
from tests.helpers.vllm_objects import make_config, make_model
from vllm_sparse_backend import plugin
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.identity import BACKEND, NAMES
from vllm_sparse_backend.serving import hooks

CUSTOM = registry.AttentionBackendEnum.CUSTOM
WRAPPED = ("check_and_update_config", "get_attn_backend_cls")
SELECTION = AttentionSelectorConfig(head_size=32, dtype=torch.float32, kv_cache_dtype="auto", block_size=32)
UNAVAILABLE = [
    (lambda patch: patch.setattr("vllm.__version__", "0.29.1"), "vLLM 0.29.1 is installed, expected 0.30 to 0.33"),
    (lambda patch: patch.delattr(registry, "register_backend"), "(ImportError: cannot import name 'register_backend'"),
    (
        lambda patch: registry.register_backend(CUSTOM, "other.plugin.Backend"),
        "(other.plugin.Backend). Choose plugins with VLLM_PLUGINS, for example VLLM_PLUGINS=sparse_prefill",
    ),
]


def is_wrapped() -> bool:
    """Return whether one of the platform's methods is ours."""
    return any((type(current_platform), name) in hooks._wrapped for name in WRAPPED)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Restore vLLM's state before any plugin, and the current state afterwards."""
    members = registry.AttentionBackendEnum._member_map_
    for name in NAMES:
        monkeypatch.delitem(members, name, raising=False)
    monkeypatch.delitem(registry._ATTN_OVERRIDES, CUSTOM, raising=False)
    platform = type(current_platform)
    kept = {name: vars(platform)[name] for name in WRAPPED}
    for name in WRAPPED:
        setattr(platform, name, classmethod(inspect.unwrap(kept[name].__func__)))
    monkeypatch.setattr(hooks, "_wrapped", hooks._wrapped - {(platform, name) for name in WRAPPED})
    yield platform
    for name in WRAPPED:
        setattr(platform, name, kept[name])


def path_of(backend: Any) -> str:
    return current_platform.get_attn_backend_cls(backend, SELECTION, num_heads=4)


class TestRegistration:
    @pytest.mark.parametrize("flag", ["sparse-prefill", "SPARSE-PREFILL", "sparse_prefill", "Sparse_Prefill"])
    def test_the_flag_means_the_backend(self, untouched: type, flag: str) -> None:
        plugin.register()
        backend = AttentionConfig(backend=flag).backend
        assert backend is CUSTOM
        assert backend.get_class().__name__ == "SparsePrefillBackend"
        assert registry.AttentionBackendEnum[backend.get_class().get_name()] is backend

    def test_without_a_place_for_levels_a_server_of_ours_does_not_start(
        self, untouched: type, default_model: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its requests' levels would not be read. A server of another backend starts as usual."""
        monkeypatch.setattr(hooks, "_wrapped", hooks._wrapped - {(vllm.plugins, "load_endpoint_plugins")})
        monkeypatch.delattr("vllm.plugins.load_endpoint_plugins")
        plugin.register()
        assert lines == []
        make_config(default_model, backend=None)
        with pytest.raises(AttributeError, match="load_endpoint_plugins"):
            make_config(default_model, {"method": "dense"})

    def test_again_changes_nothing(self, untouched: type) -> None:
        plugin.register()
        names = dict(registry.AttentionBackendEnum._member_map_)
        methods = {name: vars(untouched)[name].__func__ for name in WRAPPED}
        for _ in range(3):
            plugin.register()
        assert dict(registry.AttentionBackendEnum._member_map_) == names
        assert {name: vars(untouched)[name].__func__ for name in WRAPPED} == methods
        assert CUSTOM.get_path() == BACKEND
        assert list(registry.AttentionBackendEnum).count(CUSTOM) == 1  # aliases are not separate members

    def test_a_hook_that_another_plugin_wraps_is_not_installed_twice(self) -> None:
        """Its wrapper may have no attribute of ours (no functools.wraps). /metrics would then have lines twice."""

        class Owner:
            def call(self) -> list[str]:
                return []

        def with_our_line(original: Any, self: Owner) -> list[str]:
            return [*original(self), "ours"]

        hooks.put_around(Owner, "call", with_our_line)
        ours = Owner.call
        Owner.call = lambda self: [*ours(self), "theirs"]  # type: ignore[method-assign]
        hooks.put_around(Owner, "call", with_our_line)
        assert Owner().call() == ["ours", "theirs"]

    def test_the_flag_is_refused_where_another_plugin_takes_its_place_later(
        self, untouched: type, default_model: Any, lines: list[str]
    ) -> None:
        """The other plugin may load in all processes, or only in workers, which get an accepted configuration."""
        config = make_config(default_model, {"method": "dense"})
        assert hooks.serves(config)
        registry.register_backend(CUSTOM, "other.plugin.Backend")
        said = r"^--attention-backend sparse-prefill is not available: .*\(other\.plugin\.Backend\)\. Choose plugins"
        with pytest.raises(ConfigurationError, match=said):
            hooks.serves(config)
        with pytest.raises(ConfigurationError, match=said):
            make_config(default_model, {"method": "dense"})
        assert not hooks.serves(make_config(default_model, {"method": "dense"}, "CPU_ATTN"))
        assert not hooks.serves(make_config(default_model))
        assert lines[-1].startswith("--attention-backend sparse-prefill is not available: another plugin has taken")

    @pytest.mark.parametrize(("change", "why"), UNAVAILABLE)
    def test_where_it_cannot_be_a_line_says_why(
        self, untouched: type, lines: list[str], monkeypatch: pytest.MonkeyPatch, change: Any, why: str
    ) -> None:
        """The plugin must not end servers of other backends, which also load it: only its flag stays unknown."""
        change(monkeypatch)
        plugin.register()
        (line,) = lines
        assert line.startswith("sparse-prefill is not available: ")
        assert why in line
        assert not {*NAMES} & {*registry.AttentionBackendEnum._member_map_}
        assert not is_wrapped()
        with pytest.raises(ValueError, match="Unknown attention backend: 'SPARSE-PREFILL'"):
            AttentionConfig(backend="sparse-prefill")

    @pytest.mark.parametrize(
        ("versions", "are_known"),
        [
            (("0.30.0", "0.33.1", "0.32.0+cpu", "0.1.dev1+g1234567", "dev"), True),
            (("0.29.1", "0.34.0", "0.34.0rc1", "1.0.0"), False),
        ],
    )
    def test_releases_that_it_is_made_for(self, versions: tuple[str, ...], are_known: bool) -> None:
        """Development builds without a release number count as supported."""
        assert [plugin.unsupported(version) is None for version in versions] == [are_known] * len(versions)


@pytest.mark.full
def test_a_process_of_another_backend_is_left_alone(tmp_path: Path) -> None:
    """Registration changes only the functions that it names, and a configuration of another backend changes nothing."""
    command = [sys.executable, "-m", "tests.helpers.registered", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    stages = [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
    registered, with_another = stages
    named = {hook.function for hook in hooks.HOOKS if hook.where in (hooks.EVERY, hooks.ON_CPU)}
    assert {name.rpartition(".")[2] for name in registered} == named
    assert with_another == registered


class TestUnreadSettings:
    """A line states that settings of this backend are not read, and which backend runs attention."""

    @pytest.fixture(autouse=True)
    def said_anew(self) -> None:
        from vllm import logger

        for cached in ("_print_info_once", "_print_debug_once", "_print_warning_once"):
            if hasattr(function := getattr(logger, cached, None), "cache_clear"):
                function.cache_clear()

    @pytest.mark.parametrize("backend", [None, "CPU_ATTN"])
    def test_with_another_backend(self, default_model: Any, lines: list[str], backend: Any) -> None:
        for _ in range(3):
            make_config(default_model, {"min_tokens": 4096}, backend)
        (line,) = [line for line in lines if "is ignored" in line]
        assert line.startswith("sparse-prefill: sparse_prefill in --additional-config is ignored: ")
        assert "add --attention-backend sparse-prefill" in line

    def test_nothing_is_said_without_such_settings(self, default_model: Any, lines: list[str]) -> None:
        make_config(default_model, None, None)
        make_config(default_model, {"method": "dense"})
        assert not [line for line in lines if "is ignored" in line]


class TestPlatform:
    @pytest.mark.parametrize("backend", [None, registry.AttentionBackendEnum.CPU_ATTN])
    def test_other_backends_are_chosen_as_before(self, untouched: type, backend: Any) -> None:
        before = path_of(backend)
        plugin.register()
        assert path_of(backend) == before != BACKEND

    def test_ours_is_chosen_if_asked_for_but_never_for_mla(self, untouched: type) -> None:
        plugin.register()
        assert path_of(CUSTOM) == BACKEND
        mla = SELECTION._replace(use_mla=True)
        assert current_platform.get_attn_backend_cls(CUSTOM, mla, num_heads=4) != BACKEND

    def test_a_configuration_is_checked_if_ours_is_asked_for(self, default_model: Any) -> None:
        wrong = {"method": "dense", "min_token": 5}
        with pytest.raises(ConfigurationError, match=r"sparse_prefill\.min_token: unknown field"):
            make_config(default_model, wrong)
        for backend in (None, "CPU_ATTN"):
            assert make_config(default_model, wrong, backend).additional_config == {"sparse_prefill": wrong}

    def test_parts_of_a_model_that_is_loading_are_not_checked(self, default_model: Any, tmp_path: Path) -> None:
        """Text stacks and draft models get configurations derived from the served model's, with other shapes."""
        shape = {"architecture": "LlamaForCausalLM", "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        settings = {"profile": profile_file(tmp_path, model=shape, default={"method": "dense"})}
        config = make_config(default_model, settings)
        other = make_model(tmp_path / "draft", num_hidden_layers=1, num_attention_heads=2)
        with pytest.raises(ConfigurationError):
            make_config(other, settings)
        with set_current_vllm_config(config):
            part = make_config(other, settings)
        assert isinstance(part, VllmConfig)
        assert part.attention_config.backend is CUSTOM

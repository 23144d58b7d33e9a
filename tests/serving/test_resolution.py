# SPDX-License-Identifier: Apache-2.0
"""Settings are parsed once per process, and resolved equally in all processes of a server, on any devices."""

import json
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tests.helpers.cpu_build  # noqa: F401 — skips where there is none
from tests.helpers.vllm_objects import make_config
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.serving import compat
from vllm_sparse_backend.serving.level_policy import level_policy
from vllm_sparse_backend.serving.resolution import resolve
from vllm_sparse_backend.serving.worker.owner import Worker

FRONT, WORKER = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture
def table(tmp_path: Any) -> str:
    """A table in which ``auto`` gives different numbers on the two devices."""
    entry = {
        "engine": "hopper", "method": "a_shape", "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
        "layer_weights": 10_000, "min_pairs": 0, "pairs_per_token": 0, "vllm": "0.32", "triton": "3.9",
        "date": "2026-11-25",
    }  # fmt: skip
    numbers = {FRONT: (20480, 2048), WORKER: (4096, 512)}
    entries = [
        {**entry, "device": device, "min_tokens": tokens, "min_query_tokens": queries}
        for device, (tokens, queries) in numbers.items()
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"format": 1, "entries": entries}))
    return str(path)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets this process's device."""
    return lambda device: monkeypatch.setattr(compat, "device_name", lambda: device)


@pytest.fixture
def sent(default_model: Any, table: str, on: Callable[[str], None]) -> Any:
    """Return a configuration that was checked on one device, as a process with another device receives it."""
    on(FRONT)
    config = make_config(default_model, {"method": "a_shape", "crossover": table})
    on(WORKER)
    return pickle.loads(pickle.dumps(config))


def test_auto_is_what_it_was_where_the_server_started(sent: Any, table: str, on: Callable[[str], None]) -> None:
    """Otherwise its rows would run sparse from other lengths than those of the other workers."""
    on_worker = Resolved.from_additional_config(
        {"sparse_prefill": {"method": "a_shape", "crossover": table}}, resolve(sent).plan.shape, None, WORKER
    )
    assert on_worker.lengths("on", ["hopper"]).min_tokens == 4096
    resolved = resolve(sent)
    assert resolved.carried.device == FRONT
    assert resolved.lengths("on", ["hopper"]).min_tokens == 20480
    assert resolved.earliest_lengths().min_tokens == 16384
    on(FRONT)
    assert resolve(sent).lengths_by_engine("on") == resolved.lengths_by_engine("on")


def test_a_worker_says_that_its_device_is_another(
    sent: Any, default_model: Any, lines: list[str], on: Callable[[str], None]
) -> None:
    Worker(sent)
    (line,) = [line for line in lines if "auto uses the measurements of" in line]
    assert f"rank 0 runs on {WORKER}, but auto uses the measurements of {FRONT}, " in line
    lines.clear()
    on(FRONT)
    Worker(sent)
    numbers = make_config(default_model, {"method": "a_shape", "min_tokens": 64, "min_query_tokens": 1})
    on(WORKER)
    Worker(numbers)  # no number is looked up
    assert not any("auto uses the measurements of" in line for line in lines)


def test_a_process_resolves_its_settings_once(sent: Any) -> None:
    assert resolve(sent) is resolve(pickle.loads(pickle.dumps(sent)))
    changed = pickle.loads(pickle.dumps(sent))
    changed.additional_config["sparse_prefill"]["min_tokens"] = 96
    assert resolve(changed).earliest_lengths().min_tokens == 96


def test_settings_that_others_share_a_store_by_differ_with_what_auto_stands_for(
    default_model: Any, table: str, on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    salts = []
    for device in (FRONT, WORKER):
        on(device)
        config = make_config(default_model, {"method": "a_shape", "crossover": table})
        store = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config={})
        monkeypatch.setattr(config, "kv_transfer_config", store)
        salts.append(level_policy(config).fingerprints["on"])
    assert salts[0] != salts[1]

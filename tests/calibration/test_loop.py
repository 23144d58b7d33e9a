# SPDX-License-Identifier: Apache-2.0
"""Whole runs on captures of heads with columns and diagonals end in a valid profile."""

from functools import partial

import pytest

from tests.helpers.calibration_cases import COSTS, HEADS, LAYERS, LinedCapturer, make_job
from vllm_sparse_backend.calibration.judge import Bound
from vllm_sparse_backend.calibration.loop import calibrate
from vllm_sparse_backend.calibration.prompts import sha256_of
from vllm_sparse_backend.calibration.search import choose_cheapest
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import parse_profile
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

AMONG = [AShape(64, 128), SpargeAttn(kept_mass=0.5), SpargeAttn(kept_mass=0.9)]
BOUNDS = {"high": Bound(0.1, 0.29), "fast": Bound(0.4, 3.0)}


CHEAPEST = partial(choose_cheapest, settings=AMONG, costs=COSTS)


def test_a_profile_says_what_was_found_and_on_what(tmp_path):
    job = make_job(tmp_path / "work", seed=7)
    profile = calibrate(job, CHEAPEST, BOUNDS, "a test")
    assert parse_profile(profile.to_yaml(), "made") == profile
    assert profile.level_names == ("exact", "high", "fast")
    assert profile.min_tokens is None
    for name, bound in BOUNDS.items():
        level = profile.at_level(name)
        provenance = level.provenance
        assert (provenance["seed"], provenance["device"], provenance["source"]) == (7, "CPU", "a test")
        assert provenance["prompts_sha256"] == sha256_of(job.prompts)
        assert provenance["bounds"] == {"error": bound.error, "p99": bound.p99}
        assert {"torch", "triton", "vllm-sparse-backend"} <= set(provenance["versions"])
        assert set(provenance["held_out"]) >= {"heads_within_bound", "most_of_bound", "error", "p99_error"}
        density, error, p99 = (provenance["figures"][x] for x in ("density", "error", "p99_error"))
        kept = 0.0
        for layer in range(LAYERS):
            if layer in level.dense_layers:
                kept += HEADS
                continue
            kept += sum(density[layer])
            assert set(level.methods_of(layer, HEADS)) <= {*AMONG, Dense()}
            assert max(error[layer]) <= bound.error
            assert max(p99[layer]) <= bound.p99
        assert provenance["density"] == pytest.approx(kept / (LAYERS * HEADS), rel=1e-3)
    assert profile.at_level("fast").provenance["density"] < profile.provenance["density"] < 1


def test_prompts_without_a_sparse_position_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="given '100 tokens', expected prompts of more than 100 tokens"):
        make_job(tmp_path / "other", num_tokens=100)


def test_layers_that_never_go_sparse_are_dense_and_have_no_figures(tmp_path):
    job = make_job(tmp_path / "work", capturer=LinedCapturer(left_out=(1,)), min_tokens=100)
    profile = calibrate(job, CHEAPEST, {"fast": BOUNDS["fast"]}, "a test")
    assert 1 in profile.dense_layers
    assert set(profile.provenance["figures"]["error"]) == {0}
    assert (profile.level, profile.levels, profile.min_tokens) == ("fast", {}, 100)


def test_a_first_level_that_nothing_holds_is_an_error(tmp_path):
    """No other level takes its place, because requests without a level would get it."""
    bounds = {"high": Bound(1e-9), "fast": BOUNDS["fast"]}
    with pytest.raises(ConfigurationError, match="no head meets the bound 1e-09 of level high and saves time"):
        calibrate(make_job(tmp_path / "work"), CHEAPEST, bounds, "a test")
    other_way = calibrate(make_job(tmp_path / "again"), CHEAPEST, dict(reversed(bounds.items())), "a test")
    assert (other_way.level, other_way.levels) == ("fast", {})

# SPDX-License-Identifier: Apache-2.0
"""Whole runs on captures of structured heads: their profiles, and that an interrupted run loses nothing."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.calibration_cases import HEADS, LAYERS, StructuredCapturer, make_job, random_prompts
from vllm_sparse_backend.calibration.calibration_job import Job, JobProgress
from vllm_sparse_backend.calibration.calibration_loop import calibrate
from vllm_sparse_backend.calibration.cheapest_method import CheapestSearch
from vllm_sparse_backend.calibration.head_errors import Bound
from vllm_sparse_backend.calibration.layer_judge import Served
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import parse_profile
from vllm_sparse_kernels.attention import PORTABLE, AttendEngine
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.sparge_attn.method import SpargeAttn

AMONG = [AShape(64, 128), SpargeAttn(kept_mass=0.5), SpargeAttn(kept_mass=0.9)]
BOUNDS = {"high": Bound(0.1, 0.29), "fast": Bound(0.4, 3.0)}


def cheapest(job: Job, bound: Bound) -> CheapestSearch:
    return CheapestSearch(job, bound, AMONG, job.costs)


def profile_of(job: Job) -> str:
    return calibrate(job, cheapest, BOUNDS, "a test").to_yaml()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    return profile_of(make_job(tmp_path_factory.mktemp("job") / "work", seed=7))


def test_a_profile_says_what_was_found_and_on_what(undisturbed, tmp_path):
    job = make_job(tmp_path / "work", seed=7)
    profile = parse_profile(undisturbed, "made")
    assert profile.to_yaml() == undisturbed
    assert profile.level_names == ("exact", "high", "fast")
    assert profile.min_tokens is None
    for name, bound in BOUNDS.items():
        level = profile.at_level(name)
        provenance = level.provenance
        assert (provenance.seed, provenance.device, provenance.source) == (7, "CPU", "a test")
        assert provenance.prompts_sha256 == job.prompts.sha256
        assert provenance.bounds == {"error": bound.error, "p99": bound.p99}
        assert {"torch", "triton", "vllm-sparse-backend"} <= set(provenance.versions)
        assert set(provenance.held_out) >= {"heads_within_bound", "most_of_bound", "error", "p99_error"}
        density, error, p99 = (provenance.figures.rows(x, profile.model) for x in ("density", "error", "p99_error"))
        kept = 0.0
        for layer in range(LAYERS):
            if layer in level.dense_layers:
                kept += HEADS
                continue
            kept += sum(density[layer])
            assert set(level.methods_of(layer, HEADS)) <= {*AMONG, Dense()}
            assert max(error[layer]) <= bound.error
            assert max(p99[layer]) <= bound.p99
        assert provenance.density == pytest.approx(kept / (LAYERS * HEADS), rel=1e-3)
    assert profile.at_level("fast").provenance.density < profile.provenance.density < 1


class StoppedError(Exception):
    pass


def test_a_run_that_was_stopped_between_layers_goes_on_to_the_same_bytes(undisturbed, tmp_path):
    capturer = StructuredCapturer()

    def stop() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        profile_of(make_job(tmp_path / "work", seed=7, capturer=capturer, progress=JobProgress(step=stop)))
    assert capturer.captured == ["prompts-0", "held-out-0"]
    again = StructuredCapturer()
    job = make_job(tmp_path / "work", seed=7, capturer=again)
    assert profile_of(job) == undisturbed
    # A finished run needs no captures to give the same result.
    job.clear()
    assert not list((tmp_path / "work").glob("*/"))
    assert profile_of(make_job(tmp_path / "work", seed=7, capturer=again)) == undisturbed
    assert again.captured == []


def test_a_folder_of_another_job_is_refused(tmp_path):
    make_job(tmp_path / "work").open_folder()
    make_job(tmp_path / "work", seed=3).open_folder()
    for name, change in (
        ("prompts", {"prompts": random_prompts(1, 300, 5)}), ("chunk_tokens", {"served": Served(256, 100)}),
        ("held_out", {"held_out": random_prompts(1, 301, 2)}),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=f"holds another job, which differs in {name}; name another"):
            make_job(tmp_path / "work", **change).open_folder()
    with pytest.raises(ConfigurationError, match="given '100 tokens', expected prompts of more than 100 tokens"):
        make_job(tmp_path / "other", num_tokens=100).open_folder()


def test_a_folder_whose_files_are_none_of_ours_is_refused(tmp_path):
    job = make_job(tmp_path / "work")
    job.open_folder()
    assert job.layers == [0, 1]
    bad = [("job.json", text) for text in ("{", "3", '["abc"]')]
    bad += [("layers.json", text) for text in ("[]", "[7]", "[-1]", '["0"]', '{"0": 1}')]
    for name, text in bad:
        (job.folder / name).write_text(text)
        again = make_job(tmp_path / "work")
        with pytest.raises(ConfigurationError, match=rf"{name}: its contents cannot be read: .*; delete"):
            again.open_folder() if name == "job.json" else again.layers


def test_layers_that_never_go_sparse_are_dense_and_have_no_figures(tmp_path):
    job = make_job(tmp_path / "work", capturer=StructuredCapturer(left_out=(1,)), says_min_tokens=True)
    profile = calibrate(job, cheapest, {"fast": BOUNDS["fast"]}, "a test")
    assert 1 in profile.dense_layers
    assert profile.provenance.figures.rows("error", profile.model)[1] is None
    assert (profile.level, profile.levels, profile.min_tokens) == ("fast", {}, 100)


def test_a_first_level_that_nothing_holds_is_an_error(tmp_path):
    """No other level takes its place, because requests without a level would get it."""
    bounds = {"high": Bound(1e-9), "fast": BOUNDS["fast"]}
    with pytest.raises(ConfigurationError, match="no head meets the bound 1e-09 of level high and saves time"):
        calibrate(make_job(tmp_path / "work"), cheapest, bounds, "a test")
    other_way = calibrate(make_job(tmp_path / "work"), cheapest, dict(reversed(bounds.items())), "a test")
    assert (other_way.level, other_way.levels) == ("fast", {})


def test_an_engine_that_is_wrong_here_is_not_used(tmp_path):
    """As at a server's start, a wrong engine is dropped. An engine that only refuses stays available for other
    layers."""

    def wrong(call, out, *args, **more):
        PORTABLE.attend(call, out, *args, **more)
        out[-1] = torch.nan

    messages: list[str] = []
    job = replace(make_job(tmp_path / "work"), progress=JobProgress(say=messages.append))
    table = {
        "hopper": AttendEngine("hopper", PORTABLE.refusal, wrong),
        "flash": AttendEngine("flash", lambda spec: "not here", wrong),
        "portable": PORTABLE,
    }
    assert job.correct_engines(table) == {"flash": table["flash"], "portable": PORTABLE}
    assert messages == ["engine hopper not used: its result in a trial holds NaN"]


@pytest.mark.parametrize(("free", "reserved", "warned"), [(60, 19, 0), (60, 5, 1), (20, 60, 0)])
def test_other_processes_on_the_card_are_reported(tmp_path, monkeypatch, free, reserved, warned):
    """The card has 80 GiB. This process's memory does not count."""
    messages: list[str] = []
    job = replace(make_job(tmp_path / "work"), progress=JobProgress(say=messages.append))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved << 30)
    job.warn_of_other_processes(torch.device("cuda"))
    assert [line.startswith("other processes hold 15 GiB of ") for line in messages] == [True] * warned

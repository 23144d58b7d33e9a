# SPDX-License-Identifier: Apache-2.0
"""One setting for all heads on a calibration's own prompts, judged as the calibration judges."""

import json

import pytest
from vllm_sparse_backend.profiling.ladders import LADDERS

from benchmarks import one_setting as module
from benchmarks.one_setting import measure
from tests.calibrate.made import HEADS, LAYERS, StructuredCapturer, make_job
from vllm_sparse_backend.measure.report import write_json
from vllm_sparse_backend.profiling import clustered
from vllm_sparse_backend.settings.errors import ConfigurationError
from vllm_sparse_kernels.methods.share_prefill.method import NOISE

NUM_TOKENS = 300


def test_every_head_of_the_model_under_each_setting(tmp_path, monkeypatch):
    """Those of a layer that never goes sparse are dense; the others are as the calibration's judge has them."""
    few = LADDERS["block_sparse"][:2]
    monkeypatch.setattr(module, "settings", lambda method: (few[:1], few))
    job = make_job(tmp_path / "work", NUM_TOKENS, capturer=StructuredCapturer(left_out=[1]))
    found = measure(job, "minference")
    assert found["own"] == found["every"][:1]
    assert [one["setting"]["top_blocks"] for one in found["every"]] == [one.top_blocks for one in few]
    for setting, one in zip(few, found["every"], strict=True):
        judged = job.judge(0).judge([setting] * HEADS)
        assert one["heads"][:HEADS] == [[of.error, of.worst, of.rare, of.density] for of in judged]
        assert one["heads"][HEADS:] == [[0.0, 0.0, 0.0, 1.0]] * HEADS


def test_one_gamma_with_all_clusters(tmp_path, monkeypatch):
    """The whole model, layers in order: a smaller γ keeps no more, and loses no less. Means keep as much."""
    monkeypatch.setattr(clustered, "PRICED_GAMMAS", (0.6, 0.98))
    job = make_job(tmp_path / "work", NUM_TOKENS)
    with pytest.raises(ConfigurationError, match="has 0 files of clusters"):
        measure(job, "share_prefill")
    write_json(tmp_path / "work" / "clusters-16-10.json", [[0, 0, 0, NOISE]] * LAYERS)
    found = measure(job, "share_prefill")
    assert found["own"] == found["every"][:2]
    assert [one["setting"]["estimating"] for one in found["every"]] == ["last"] * 4 + ["spread"] * 4
    assert [one["setting"].get("block_means", False) for one in found["every"]] == [False, False, True, True] * 2
    less, more = (one["heads"] for one in found["own"])
    of_means = found["every"][2]["heads"]
    assert [head[3] for head in of_means] == [head[3] for head in less]
    assert sum(head[0] for head in of_means) < sum(head[0] for head in less)
    assert len(less) == LAYERS * HEADS
    assert sum(head[3] for head in less) < sum(head[3] for head in more) <= len(more)
    assert sum(head[0] for head in less) > sum(head[0] for head in more)
    json.dumps(found)


def test_own_settings_are_the_papers_and_among_all():
    for method in module.METHODS[:-1]:
        own, every = module.settings(method)
        assert set(own) <= set(every)
        assert not any(one.block_means for one in own)

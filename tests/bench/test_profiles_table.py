# SPDX-License-Identifier: Apache-2.0
"""Figures of calibrated profiles, and that the document and the profiles say what they do."""

import json
from pathlib import Path

import pytest
from vllm_sparse_backend.profiling.ladders import LADDERS

from benchmarks import profiles as module
from benchmarks.performance import TRAINED, met
from benchmarks.quality import load
from vllm_sparse_backend.measure.asked import plan_of_profile
from vllm_sparse_backend.profiling.judge import Outcome
from vllm_sparse_backend.profiling.measure import Bound
from vllm_sparse_backend.profiling.measure import Figures as HeadFigures
from vllm_sparse_backend.settings.methods import parameters_of
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import bundled_profiles, load_profile
from vllm_sparse_kernels.layer import methods_by_head
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale

ROOT = Path(__file__).resolve().parents[2]
FIGURES = load(ROOT / module.RESULTS)
MADE = sorted((ROOT / "docs/results/profiles").glob("*.yaml"))


def test_one_setting_between_two_of_a_ladder():
    points = [(0.1, 0.4), (0.3, 0.1)]
    at = {0.0: 1.0, 0.05: 0.7, 0.1: 0.4, 0.2: 0.25, 0.3: 0.1, 0.5: 0.1}
    for error, density in at.items():
        assert module.single_density(points, error) == pytest.approx(density)


SPARSER, DENSER = LADDERS["sale"][:2]


def judged(*heads: tuple[float, float, float]) -> list[HeadFigures]:
    """Of each its error, its worst and its density."""
    return [Outcome(error, worst, 0, density, worst, 0, 0, 0).figures(0.0) for error, worst, density in heads]


def test_the_sparsest_setting_of_each_head():
    """Two heads, two settings: one head holds the bound with both, the other with none by its worst queries."""
    layers = [{DENSER: judged((0.01, 0.1, 0.8), (0.02, 0.6, 0.6)), SPARSER: judged((0.05, 0.3, 0.2), (0.01, 0.5, 0.3))}]
    assert module.by_head(layers, Bound(0.1, 0.4)) == (pytest.approx(0.05 / 2), pytest.approx((0.2 + 1.0) / 2))


def test_error_goes_where_it_saves_most():
    """Under a bound of the mean: one head saves four times as much by the same error as the other."""
    layers = [{DENSER: judged((0.01, 0.1, 0.5), (0.01, 0.1, 0.5)), SPARSER: judged((0.05, 0.3, 0.4), (0.05, 0.3, 0.1))}]
    assert module.by_head(layers, Bound(0.1, 0.4)) == (pytest.approx(0.05), pytest.approx(0.25))
    assert module.by_head(layers, Bound(0.1, 0.4, mean=0.031)) == (pytest.approx(0.03), pytest.approx(0.3))


def test_a_folder_of_outcomes(tmp_path):
    """Ladders that were not judged are left out; what was, all heads may choose from together."""
    sparser, denser = (json.dumps([parameters_of(method)]) for method in (SPARSER, DENSER))
    outcomes = {
        sparser: judged((0.05, 0.2, 0.1), (0.2, 0.3, 0.1)), denser: judged((0.02, 0.1, 0.5), (0.04, 0.1, 0.5)),
    }  # fmt: skip
    of = {key: [[x.error, x.worst, 0, x.density, x.rare, 0, 0, 0] for x in heads] for key, heads in outcomes.items()}
    (tmp_path / "prompts-layer-000.json").write_text(json.dumps({"judged": of}))
    (tmp_path / "job.json").write_text(json.dumps({"device": "a card"}))
    found, alone, together, _ = module.of_work(tmp_path, Bound(0.1, 0.4))
    assert alone["name"] == "sale, a setting for each head: density ÷ one setting's that holds the bound in every head"
    assert alone["value"] == pytest.approx(0.3 / 0.5)  # the sparser one does not, in one head
    assert found["name"] == "sale, a setting for each head: density ÷ one setting's at the same error"
    assert found["value"] == pytest.approx(0.3 / module.single_density([(0.125, 0.1), (0.03, 0.5)], 0.045), rel=1e-3)
    assert (found["bar"], found["better"], found["device"]) == (0.85, "lower", "a card")
    assert found["command"].endswith("--work --bound 0.1:0.4")
    assert (together["name"].split(",")[0], together["value"]) == ("all methods", found["value"])
    # A run that was broken off has not judged all settings in every layer.
    (tmp_path / "prompts-layer-001.json").write_text(json.dumps({"judged": {denser: of[denser]}}))
    found, *_ = module.of_work(tmp_path, Bound(0.1, 0.4))
    assert found["value"] == pytest.approx(0.5 / module.single_density([(0.03, 0.5)], 0.03))


def test_a_calibrated_profile_against_one_setting(tmp_path):
    """Two layers of two heads: of single settings one is undercut, and one alone holds the bounds in every head."""
    own = [[(0.09, 0.3, 0.8, 0.1)] * 4, [(0.05, 0.3, 0.6, 0.4), (0.05, 0.9, 0.6, 0.4)] * 2, [(0.06, 0.3, 0.6, 0.5)] * 4]
    every = [*own, [(0.03, 0.2, 0.5, 0.4)] * 4, [(0.06, 0.2, 0.5, 0.2)] * 4]
    found = {kind: [{"setting": {}, "heads": heads} for heads in of] for kind, of in (("own", own), ("every", every))}
    (tmp_path / "one-setting.json").write_text(json.dumps(found))
    path = tmp_path / "p.yaml"
    path.write_text(
        "format: 1\nmodel: {architecture: X, num_layers: 2, num_heads: 2, num_kv_heads: 2, head_dim: 64}\n"
        "level: high\ndefault: {method: sparge_attn}\nprovenance:\n  tool_version: '1'\n"
        "  source: sparse-prefill profile calibrate --method sparge_attn\n  density: 0.3\n"
        "  bounds: {error: 0.15, worst: 0.6, rare: 0.7, mean: 0.05}\n  figures:\n    density: {0: 0.3}\n"
        "    error: {0: [0.06, 0.14]}\n"
    )
    profile = load_profile(path)
    assert module.mean_error(profile) == pytest.approx(0.05)  # the second layer is dense
    paper, held, chosen, held_chosen, mean = module.against_one_setting("p", profile, tmp_path)
    assert paper["value"] == pytest.approx(0.3 / 0.4)
    assert chosen["value"] == pytest.approx(0.3 / (0.4 - 2 / 3 * 0.2), rel=1e-3)  # two thirds from means to the last
    assert held["value"] == pytest.approx(0.3)  # the third has a mean error of 0.06, and then there is none
    assert held_chosen["value"] == pytest.approx(0.3 / 0.4)  # with means; the last has a mean error of 0.06
    assert mean["value"] == pytest.approx(0.05)
    assert paper["name"] == "profile p: density ÷ that of one setting of its paper, same mean error"
    assert {one["bar"] for one in (paper, held, chosen, held_chosen)} == {0.85}
    assert paper["command"].endswith("--method sparge_attn --level high=0.15:0.6:0.7:0.05")
    for bounds, level in (
        ({"error": 0.1, "worst": 0.4}, "0.1:0.4"),
        ({"error": 0.1, "worst": 0.4, "rare": 0.8}, "0.1:0.4:0.8"),
        ({"error": 0.1, "worst": 0.4, "mean": 0.05}, "0.1:0.4:inf:0.05"),
    ):
        other = profile.model_copy(update={"provenance": profile.provenance.model_copy(update={"bounds": bounds})})
        assert module.command_of(other).endswith(f" --level high={level}")


def test_the_document_is_written_from_the_figures():
    text = (ROOT / "docs/profiles.md").read_text(encoding="utf-8")
    names = ["best-code-lm-29m-128k", *(f"calibrated-{name}" for name in (
        "minference", "sale", "anchor_attention", "sparge_attn", "flex_vertical_slash", "share_prefill"))]  # fmt: skip
    assert module.table(names, FIGURES) in text
    assert {path.stem for path in MADE} == set(names[1:])


def test_best_is_what_it_is_said_to_be():
    """Its bars, all of them: answers, perplexity, speed, time to make, bound on prompts it has not seen."""
    asked = [f for name, f in FIGURES.items() if "profile best" in name and f["bar"] is not None]
    assert len(asked) == 2 + 2 * 4 + 2
    assert [figure["name"] for figure in asked if not met(figure)] == []


@pytest.mark.parametrize("path", [*MADE, bundled_profiles()["best-code-lm-29m-128k"]], ids=lambda path: path.stem)
def test_profiles_that_figures_are_of_say_what_made_them(path):
    """And load, and are as the tool writes them."""
    profile = load_profile(path)
    assert profile.to_yaml(compact=True) == path.read_text(encoding="utf-8")
    density = FIGURES[f"profile {path.stem}: density on its prompts"]
    assert profile.provenance.density == pytest.approx(density["value"], abs=1e-4)
    assert profile.provenance.device == density["device"]
    assert TRAINED in (profile.model.names if profile.model else ())


def test_heads_of_a_profile_are_repeated(tmp_path):
    """Each copy has the profile's heads in their order; dense layers are there; clusters are each copy's own."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "format: 1\nmodel: any\ndense_layers: [1]\ndefault: {method: sale, tau: 0.1}\n"
        "layers:\n  0:\n    heads:\n      1: {method: dense}\n      2-3: {method: share_prefill, cluster: 5}\n"
    )
    plan = plan_of_profile(str(path), ModelShape("X", 2, 4, 2, 64), 2)
    first, second = (methods_by_head(groups or ()) for groups in plan.layers)
    assert first[0] == first[4] == Sale(tau=0.1)
    assert first[1] == first[5] == Dense()
    (sharing,) = (group for group in plan.layers[0] or () if 2 in group.heads)
    assert sharing.heads == (2, 3, 6, 7)
    own, _, other, _ = sharing.method.clusters
    assert sharing.method.clusters == (own, own, other, other)
    assert own == 5 != other
    assert second == [Dense()] * 8
    assert (plan.shape.num_heads, plan.shape.num_kv_heads) == (8, 4)
    captured = plan_of_profile(str(path), ModelShape("X", 2, 4, 2, 64), 2, [1])  # the other layer never goes sparse
    assert [methods_by_head(groups or ()) for groups in captured.layers] == [second]

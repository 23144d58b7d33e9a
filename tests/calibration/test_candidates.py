# SPDX-License-Identifier: Apache-2.0
"""The variants of ``top_p`` that ``profile best`` chooses from: chosen where they are cheaper and within the bound."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
from typer.testing import CliRunner

from tests.helpers.calibration_cases import CONFIG, HEADS, LookupCapturer, make_job
from tests.helpers.fake_judge import FakeJudge, any_method, figures, most_passes
from tests.helpers.folders import model_folder
from vllm_sparse_backend.calibration.calibration_job import Job
from vllm_sparse_backend.calibration.calibration_loop import calibrate, cheapest_strategy, independent_methods
from vllm_sparse_backend.calibration.candidates import FLOOR, candidates_of, kinds_in_order
from vllm_sparse_backend.calibration.cheapest_method import cheapest_methods, sparsest_of_kinds
from vllm_sparse_backend.calibration.head_costs import Cost, LayerCost, includes, kind_of
from vllm_sparse_backend.calibration.head_errors import Bound
from vllm_sparse_backend.calibration.layer_judge import Served
from vllm_sparse_backend.calibration.search import ladder_of
from vllm_sparse_backend.cli import app
from vllm_sparse_backend.config import strict_yaml
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import Profile, load_profile
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.layer import methods_by_head
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.sale.method import Sale
from vllm_sparse_kernels.methods.top_p.method import TopP

FULL = pytest.mark.full
BOUND = Bound(of_default=1.5)
LADDER = ladder_of("top_p")
DEFAULT = LADDER.index(TopP())
KEEPS_LOOKUPS = TopP(kept_mass=0.9, most_share=0.17)
"""Sparsest setting without a floor that keeps the lookups of ``LookupCapturer``."""


@dataclass
class TimeTable:
    """Costs: attention of a head takes 10 ms, and a selection takes ``group_ms`` and a time for each head."""

    half_ms: float = 1.0
    low_rank_ms: float = 0.5
    floor_ms: float = 0.1
    group_ms: float = 0.0
    layer: LayerCost = LayerCost(base_ms=0.0, dense_ms=40.0)  # noqa: RUF009

    def of(self, method: Method) -> Cost:
        if not isinstance(method, TopP):
            return Cost(0.0, 0.0, full_ms=10.0)
        scores_ms = self.low_rank_ms if method.channels == "low_rank" else self.half_ms
        return Cost(self.group_ms, scores_ms + self.floor_ms * (method.floor > 0), full_ms=10.0)


def lookup_job(folder, head_dim: int, costs: TimeTable) -> Job:
    """Return a job on captures in which heads 0 and 2 have lookups, with preset costs and real judgements."""
    model = model_folder(folder / f"model-{head_dim}", CONFIG | {"head_dim": head_dim})
    job = make_job(
        folder / "work", num_tokens=4096, model=model, served=Served(512, 3072), capturer=LookupCapturer(head_dim)
    )
    job.__dict__["costs"] = costs
    return job


def best_profile(job: Job) -> Profile:
    return calibrate(job, cheapest_strategy(["top_p"]), {"high": BOUND}, "a test")


@pytest.mark.parametrize(("low_rank_ms", "channels"), [(0.5, "low_rank"), pytest.param(1.5, "half", marks=FULL)])
def test_low_rank_is_chosen_where_its_selection_takes_less_time(tmp_path, low_rank_ms, channels):
    profile = best_profile(lookup_job(tmp_path, 128, TimeTable(low_rank_ms=low_rank_ms, floor_ms=100.0)))
    methods = profile.methods_of(0, HEADS)
    assert {method.channels for method in methods} == {channels}
    # Heads without lookups have the sparsest setting.
    assert [method.kept_mass for method in methods] == [KEEPS_LOOKUPS.kept_mass, 0.7] * 2
    assert [method.most_share for method in methods] == [KEEPS_LOOKUPS.most_share, 0.1] * 2
    assert profile.provenance.held_out["heads_within_bound"] == 1.0


@pytest.fixture(scope="module")
def best_of_lookups(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Profile]:
    """Return a function: head dim → the best profile with default times."""
    return cache(lambda head_dim: best_profile(lookup_job(tmp_path_factory.mktemp("lookups"), head_dim, TimeTable())))


@pytest.mark.parametrize(("head_dim", "channels"), [pytest.param(64, "half", marks=FULL), (128, "low_rank")])
def test_a_floor_is_chosen_for_heads_that_lose_lookups_without_it(tmp_path, best_of_lookups, head_dim, channels):
    profile = best_of_lookups(head_dim)
    sparse = TopP(kept_mass=0.7, most_share=0.1, channels=channels)
    floored = replace(sparse, floor=FLOOR, queries="all")
    assert profile.methods_of(0, HEADS) == (floored, sparse, floored, sparse)
    assert profile.provenance.held_out["heads_within_bound"] == 1.0
    density = profile.provenance.figures.rows("density", profile.model)[0]
    assert density[0] > density[1]

    # The sparsest setting without a floor keeps at most a tenth more of the pairs, which takes 1 ms.
    expensive = best_profile(lookup_job(tmp_path / "expensive", head_dim, TimeTable(floor_ms=1.2)))
    without_floor = replace(KEEPS_LOOKUPS, channels=channels)
    assert expensive.methods_of(0, HEADS) == (without_floor, sparse, without_floor, sparse)


def test_a_profile_with_both_is_written_read_and_served(tmp_path, best_of_lookups):
    profile = best_of_lookups(128)
    path = tmp_path / "best.yaml"
    path.write_text(profile.to_yaml())
    loaded = load_profile(str(path))
    assert loaded == profile
    assert "channels: low_rank" in path.read_text()
    assert "floor: 0.5" in path.read_text()
    plan = Plan.build(SparsePrefillConfig(profile=str(path)), profile.model)
    assert tuple(methods_by_head(plan.layers[0])) == profile.methods_of(0, HEADS)
    model = model_folder(tmp_path / "served", CONFIG | {"head_dim": 128})
    for command in (("check", path, model), ("show", path, model)):
        result = CliRunner().invoke(app, ["profile", *map(str, command)])
        assert result.exit_code == 0, result.output
        assert "low_rank" in result.output
    assert 'channels="low_rank" queries="all" floor=0.5' in result.output
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks by schemas")
    schema = json.loads(CliRunner().invoke(app, ["profile", "schema"]).output)
    jsonschema.validate(json.loads(json.dumps(strict_yaml.parse(path.read_text(), ""))), schema)


def test_low_rank_is_no_candidate_where_it_equals_half():
    names = independent_methods()
    candidates = {head_dim: candidates_of(names, head_dim) for head_dim in (64, 128)}
    of_top_p = {head_dim: [m for m in settings if isinstance(m, TopP)] for head_dim, settings in candidates.items()}
    assert {kind_of(method) for method in of_top_p[64]} == {TopP(), TopP(floor=FLOOR, queries="all")}
    low_rank = TopP(channels="low_rank")
    assert {kind_of(method) for method in of_top_p[128]} == {
        TopP(),
        low_rank,
        replace(low_rank, floor=FLOOR, queries="all"),
    }
    for settings in candidates.values():
        assert len(set(settings)) == len(settings)
        assert [m for m in settings if m not in of_top_p[64] + of_top_p[128]] == [
            setting for name in names if name != "top_p" for setting in ladder_of(name)
        ]


def curve(*, half: int, low_rank: int, floored: int):
    """Return figures by the numbers of the sparsest settings of each kind within the bound."""

    def judged(method):
        if isinstance(method, Dense):
            return figures(0.0, 1.0)
        place = LADDER.index(replace(method, channels="half", queries="half", floor=0.0))
        least = floored if method.floor else low_rank if method.channels == "low_rank" else half
        return figures(0.1 if place >= least else 1.0, 0.1 + 0.02 * place)

    return judged


@pytest.mark.parametrize(
    ("places", "judged"),
    [
        # The sparsest low-rank setting is within the bound: nothing can cost less.
        ({"half": 0, "low_rank": 0, "floored": 0}, {"low_rank": 4}),
        # Settings sparser than number 2 are left to the other kinds.
        ({"half": 2, "low_rank": 2, "floored": 1}, {"low_rank": 4, "floored": 2, "half": 2}),
        # "half" meets the bound, and "low_rank" does not.
        ({"half": 1, "low_rank": 4, "floored": 9}, {"low_rank": 4, "floored": 2, "half": 3}),
    ],
)
def test_only_settings_that_can_be_cheapest_are_judged(places, judged):
    judge = FakeJudge(curve(**places))
    held = sparsest_of_kinds(judge, BOUND, candidates_of(["top_p"], 128), any_method, TimeTable())
    passes = [method for (method,) in judge.passes]
    counts = {
        "low_rank": sum(method.channels == "low_rank" and not method.floor for method in passes),
        "floored": sum(method.floor > 0 for method in passes),
        "half": sum(method.channels == "half" for method in passes),
    }
    assert all(counts[kind] <= judged.get(kind, 0) for kind in counts), counts
    cheapest = cheapest_methods(held, TimeTable())[0]
    among = {method: judge.curves[0](method) for method in candidates_of(["top_p"], 128)}
    within = [method for method, result in among.items() if BOUND.holds(result)]
    costs = TimeTable()
    assert cheapest == min(within, key=lambda method: costs.of(method).head_ms + 10 * among[method].density)


def test_more_candidates_add_few_passes():
    """All heads are judged in a pass. All other methods of the registry need 40 passes at most."""
    num_kinds = {64: 2, 128: 3}
    for head_dim, kinds in num_kinds.items():
        last = len(LADDER) - 1
        places = (DEFAULT, DEFAULT, last), (DEFAULT - 1, DEFAULT, 1), (DEFAULT, DEFAULT + 2, 0), (0, 0, 0)
        heads = [curve(half=half, low_rank=low_rank, floored=floored) for half, low_rank, floored in places]
        judge = FakeJudge(*heads)
        candidates = candidates_of(["top_p"], head_dim)
        assert len({kind_of(method) for method in candidates}) == kinds
        sparsest_of_kinds(judge, BOUND, candidates, any_method, TimeTable())
        assert len(judge.passes) <= most_passes(len(LADDER)) + most_passes(DEFAULT) * (kinds - 1) + (kinds - 2)


@pytest.mark.parametrize("low_rank_ms", [0.5, 2.0])
def test_cheaper_kinds_of_top_p_are_judged_first(low_rank_ms):
    candidates = candidates_of(["top_p", "sale"], 128)
    kinds = kinds_in_order(candidates, TimeTable(low_rank_ms=low_rank_ms), HEADS)
    assert kinds[:2] == [kind_of(Sale()), kind_of(Sale(channels="half"))]
    plain = [TopP(channels="low_rank"), TopP()]
    assert kinds[2:] == [
        *(plain if low_rank_ms < 1 else plain[::-1]),
        TopP(channels="low_rank", queries="all", floor=FLOOR),
    ]


def test_heads_with_and_without_a_floor_share_one_selection():
    plain, floored = TopP(kept_mass=0.7, most_share=0.1), TopP(kept_mass=0.8, most_share=0.1, floor=FLOOR)
    assert includes(kind_of(floored), plain)
    assert includes(kind_of(floored), floored)
    assert not includes(kind_of(plain), floored)
    assert not includes(kind_of(floored), replace(plain, channels="low_rank"))
    assert not includes(kind_of(floored), Sale())
    # A selection takes 20 ms for any number of heads, and dense attention of the layer takes 40 ms: two would not pay.
    held = [{plain: figures(0.1, 0.1)}, {floored: figures(0.1, 0.1)}] * 2
    assert cheapest_methods(held, TimeTable(group_ms=20.0)) == [plain, floored] * 2
    assert cheapest_methods(held, TimeTable(group_ms=33.0)) == [Dense()] * 4

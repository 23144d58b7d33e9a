# SPDX-License-Identifier: Apache-2.0
"""Resolution of ``auto``: the closest measurement, the most cautious of several, and the message without any."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.crossover_cases import CARD, entry, written
from tests.helpers.folders import profile_file
from vllm_sparse_backend.config.crossover_table import (
    NEVER,
    UNMEASURED,
    CrossoverTable,
    LayerSize,
    Lengths,
    Place,
    load_crossover,
    resolve_lengths,
)
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.methods.top_p import TopP

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128)
WEIGHTS_8B = 218_103_808


def table(*entries: dict[str, Any]) -> CrossoverTable:
    return CrossoverTable.model_validate({"format": 1, "entries": entries})


def settings(measured: CrossoverTable, device: str = CARD, ranks: tuple[int, int] = (0, 1), **fields: Any) -> Resolved:
    """Return resolved settings with another table."""
    if "profile" not in fields:
        fields = {"method": "a_shape"} | fields
    resolved = Resolved.from_additional_config({"sparse_prefill": fields}, SHAPE, WEIGHTS_8B, device, *ranks)
    return replace(resolved, table=measured)


def resolved(measured: CrossoverTable, device: str = CARD, **fields: Any) -> Lengths:
    return settings(measured, device, **fields).lengths(ON, ["flash"])


def test_a_measurement_of_the_very_same() -> None:
    assert resolved(table(entry(9000, 700))) == Lengths(9000, 700)
    assert resolved(table(entry(9000, 700)), device=CARD.lower()) == Lengths(9000, 700)


@pytest.mark.parametrize("fields", [{"min_query_tokens": 64}, {"min_tokens": 3000}, {"method": "sale"}], ids=str)
def test_without_both_measurements_any_number_of_pairs_runs_sparse(fields: dict[str, Any]) -> None:
    lengths = resolved(table(entry(9000, 256, min_pairs=45_000_000)), **fields)
    assert lengths.min_pairs == 0
    assert lengths.dense_reason(2048, 20000) is None


def test_new_tokens_count_as_pairs_where_servers_were_measured() -> None:
    """Few new tokens need a longer prefix: their linear layers hide less of the time to launch selection."""
    measured = settings(table(entry(3072, 1000, min_pairs=36_000_000, pairs_per_token=4000)))
    assert "36,000,000 pairs" in str(measured.lengths_by_engine(ON)["flash"])  # which all nodes and salts compare
    lengths = measured.lengths(ON, ["flash"])
    assert lengths.dense_reason(8192, 8192) is None
    assert lengths.dense_reason(2000, 10_000) is Fallback.FEW_PAIRS
    assert lengths.dense_reason(2000, 32_000) is None


def test_reasons_of_dense_rows() -> None:
    lengths = Lengths(3000, 200, min_pairs=1_000_000)
    reasons = {
        (3000, 3000): Fallback.TOO_SHORT, (3199, 3199): Fallback.SHORT_QUERY, (199, 90000): Fallback.SHORT_QUERY,
        (3200, 3200): Fallback.FEW_PAIRS, (200, 5000): Fallback.FEW_PAIRS, (200, 5101): None, (4000, 4000): None,
    }  # fmt: skip
    assert {row: lengths.dense_reason(*row) for row in reasons} == reasons
    assert NEVER.dense_reason(9000, 9000) is Fallback.NEVER_FASTER


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(1, engine="portable"), entry(2)], 2),
        ([entry(1, device="NVIDIA H200"), entry(2)], 2),
        ([entry(1, method="dense"), entry(2)], 2),
        ([entry(1), entry(2, params={"sink_tokens": 64})], 1),
        ([entry(1, num_heads=64), entry(2)], 2),
        # Equal parameters in other layers take precedence over other parameters in equal layers.
        ([entry(1, num_heads=64), entry(2, params={"sink_tokens": 64})], 1),
        # Only other parameters: the most cautious of the closest measurements.
        ([entry(5, params={"sink_tokens": 64}), entry(2, params={"sink_tokens": 128})], 5),
        ([entry(5, num_heads=64, params={"sink_tokens": 64}), entry(2, params={"sink_tokens": 128})], 2),
        # For layers that nobody measured: the most similar; of equally similar ones, the one that starts latest.
        ([entry(1, num_heads=64), entry(2, num_heads=8)], 1),
        ([entry(1, num_heads=8), entry(2, num_heads=64, head_dim=64)], 2),
        ([entry(1, num_heads=16), entry(2, num_heads=64)], 2),
        ([entry(1, layer_weights=10**8), entry(2, layer_weights=10**7)], 1),
        ([entry(1, num_heads=16), entry(2, layer_weights=10**7)], 1),
    ],
)
def test_the_closest_measurement_counts(entries: list[dict[str, Any]], expected: int) -> None:
    assert resolved(table(*entries)).min_tokens == expected


EXPERTS = Lengths(2048, 500, 30_000_000)


@pytest.mark.parametrize("device", ["NVIDIA H200", CARD])
@pytest.mark.parametrize(
    ("size", "like"),
    [
        (LayerSize(64 * 128, 855_638_016), "8B"),  # Llama-3.1-70B: 64 heads, 8 kv heads
        (LayerSize(28 * 128, 233_046_016), "8B"),  # Qwen2.5-7B: 28 heads, 4 kv heads
        (LayerSize(32 * 128, 173_015_040), "8B"),  # Yi-6B: 32 heads, 4 kv heads, dense
        (LayerSize(64 * 64, 126_074_880), "8B"),  # gpt-oss-120b: 4 active experts
        (LayerSize(32 * 64, 60_817_408), "experts"),  # Llama-3.2-1B
        (LayerSize(32 * 128, None), "8B and experts"),  # the strictest of equally near ones
    ],
    ids=str,
)
def test_models_that_nobody_measured_take_the_lengths_of_the_nearest(size: LayerSize, like: str, device: str) -> None:
    """Heads alone do not tell a dense model from one of experts, whose layers hide less of selection's launches."""
    of_8b = bundled(device, LayerSize(32 * 128, WEIGHTS_8B))
    expected = {"8B": of_8b, "experts": EXPERTS, "8B and experts": Lengths.strictest([of_8b, EXPERTS])}
    assert bundled(device, size) == expected[like]


def bundled(device: str, size: LayerSize) -> Lengths:
    """Return the default method's lengths in the table that comes with the package."""
    return resolve_lengths("auto", "auto", [TopP()], load_crossover(), Place(device, "hopper", size))


def test_a_profile_may_take_the_lengths_of_one_of_its_methods(tmp_path: Path) -> None:
    """As profiles of ``profile best`` do: all four lengths, of this server's device and not of another one's."""
    of_top_p = {"min_pairs": 36_000_000, "pairs_per_token": 4000}
    measured = table(entry(49152, 2048, min_pairs=200_000_000), entry(3072, 1000, method="top_p", **of_top_p))
    profile = profile_file(tmp_path, default={"method": "a_shape"}, lengths_of={"method": "top_p"})
    assert resolved(measured, profile=profile) == Lengths(3072, 1000, 36_000_000, 4000)


@pytest.mark.parametrize("others", [[], [entry(1, device="other")], [entry(1, engine="portable")]])
def test_without_one_it_is_cautious_and_says_what_measures(others: list[dict[str, Any]]) -> None:
    lengths = resolved(table(*others))
    assert lengths == UNMEASURED
    (note,) = lengths.notes
    assert f"a_shape not measured on {CARD} with engine flash" in note
    assert "run `sparse-prefill bench crossover MODEL` to measure this device" in note


@pytest.mark.parametrize("numbers", [(None, 512), (9000, None), (None, None)])
def test_what_never_pays_stays_dense_until_the_operator_sets_a_number(numbers: tuple[int | None, int | None]) -> None:
    measured = table(entry(*numbers))
    lengths = resolved(measured)
    assert lengths == NEVER
    assert str(lengths) == "no rows"
    assert "a_shape never faster than dense attention" in lengths.notes[0]
    assert "set min_tokens" in lengths.notes[0]
    assert resolved(measured, min_tokens=500).min_tokens == 500


def test_numbers_that_are_set_need_no_measurement() -> None:
    assert resolved(table(), min_tokens=500, min_query_tokens=20) == Lengths(500, 20)
    assert resolved(table(entry(9000, 700)), min_tokens=500) == Lengths(500, 700)
    assert resolved(table(entry(9000, 700)), min_query_tokens=20) == Lengths(9000, 20)
    for setting, names in (
        ({"min_tokens": 500}, "auto uses the conservative defaults min_query_tokens 1024;"),
        ({"min_query_tokens": 20}, "auto uses the conservative defaults min_tokens 16384;"),
        ({}, "auto uses the conservative defaults min_tokens 16384 and min_query_tokens 1024;"),
    ):
        (note,) = resolved(table(), **setting).notes
        assert names in note


def mixed(tmp_path: Path, default: str, head: str) -> str:
    """Return a profile in which a single head of a layer has another method than all other heads."""
    layers = {(1,): {"heads": {"3": {"method": head}}}}
    return profile_file(tmp_path, default={"method": default}, layers=layers)


def test_several_methods_take_the_largest_of_theirs(tmp_path: Path) -> None:
    measured = table(entry(9000, 700), entry(4000, 900, method="top_p"), entry(None, None, method="sale"))
    assert resolved(measured, profile=mixed(tmp_path, "a_shape", "top_p")) == Lengths(9000, 900)
    assert resolved(measured, profile=mixed(tmp_path, "a_shape", "sale")).min_tokens == NEVER.min_tokens
    # A dense head next to other heads needs no measurement, but a dense method does.
    assert resolved(measured, profile=mixed(tmp_path, "a_shape", "dense")) == Lengths(9000, 700)
    alone = resolved(table(), method="dense")
    assert (alone.min_tokens, len(alone.notes)) == (UNMEASURED.min_tokens, 1)


def test_all_ranks_go_sparse_from_the_same_lengths_on(tmp_path: Path) -> None:
    """Otherwise a block that all levels share would be sparse in one rank's heads and exact in another's."""
    measured = table(entry(9000, 700), entry(4000, 900, method="sparge_attn"))
    profile = mixed(tmp_path, "sparge_attn", "a_shape")
    ranks = [settings(measured, ranks=(rank, 4), profile=profile) for rank in range(4)]
    assert {rank.lengths(ON, ["flash"]) for rank in ranks} == {Lengths(9000, 900)}
    assert {rank.earliest_lengths().min_tokens for rank in ranks} == {
        settings(measured, profile=profile).earliest_lengths().min_tokens
    }


def test_layers_with_different_engines_take_the_strictest() -> None:
    """Memory is prepared for the lowest number of each kind: on an H100, portable's fewer new tokens are more rows."""
    measured = table(entry(9000, 700), entry(20000, 100, engine="portable", min_pairs=10**7))
    assert settings(measured).lengths(ON, ("flash", "portable")) == Lengths(20000, 700, 10**7)
    assert settings(measured).earliest_lengths() == Lengths(9000, 100)
    assert settings(table()).earliest_lengths() == UNMEASURED
    never = settings(table(entry(None), entry(3000, engine="portable"), entry(4000, engine="hopper")))
    assert never.earliest_lengths().min_tokens == 3000


def test_an_engine_without_measurements_is_named(tmp_path: Path) -> None:
    """Also if the table of the setting ``crossover`` has measurements of other engines."""
    path = tmp_path / "crossover.json"
    path.write_text(written(entry(9000, 700), entry(20000, 100, engine="portable")))
    config = {"sparse_prefill": {"method": "a_shape", "crossover": str(path)}}
    measured = Resolved.from_additional_config(config, SHAPE, WEIGHTS_8B, CARD)
    assert measured.lengths(ON, ["flash", "portable"]).min_tokens == 20000
    assert "with engine hopper" in measured.lengths(ON, ["hopper"]).notes[0]
    assert measured.lengths_by_engine(ON)["any other"] == UNMEASURED


@pytest.mark.parametrize(
    ("profile", "config", "expected"),
    [
        ({"min_tokens": 4096}, {}, (4096, "auto")),
        ({"min_tokens": 4096, "min_query_tokens": 64}, {"min_tokens": "auto"}, ("auto", 64)),
        ({"min_tokens": "auto"}, {"min_tokens": 5, "min_query_tokens": 6}, (5, 6)),
    ],
)
def test_the_configuration_goes_before_the_profile(profile: Any, config: Any, expected: Any, tmp_path: Path) -> None:
    path = profile_file(tmp_path, default={"method": "dense"}, **profile)
    plan = Plan.by_level(SparsePrefillConfig(profile=path, **config), SHAPE)[ON]
    assert (plan.min_tokens, plan.min_query_tokens) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"format": 2, "entries": []}', "format: given 2, expected 1"),
        ("root:x:0:0:root", "table.json: not JSON: expected value at line 1 column 1"),  # without its content
        (written(entry(-1)), "0.min_tokens: given -1, expected greater than or equal to 0"),
        (written(entry(1, params={"sink": 3})), "sink: unknown parameter of a_shape"),
    ],
)
def test_a_table_that_is_none_is_an_error_that_names_it(content: str, expected: str, tmp_path: Path) -> None:
    (path := tmp_path / "table.json").write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        load_crossover(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)

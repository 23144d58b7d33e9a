# SPDX-License-Identifier: Apache-2.0
"""Resolution of ``auto``: the closest measurement, the most cautious of several, and the message without any."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.crossover_cases import CARD, entry, written
from tests.helpers.folders import profile_file
from vllm_sparse_backend.config import crossover_table
from vllm_sparse_backend.config.crossover_table import Crossover, Thresholds, load_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.fallback import Fallback
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.methods.top_p import TopP

SHAPE = ModelShape("LlamaForCausalLM", num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128)


def table(*entries: dict[str, Any]) -> Crossover:
    return Crossover.model_validate({"format": 1, "entries": entries})


def settings(measured: Crossover, device: str = CARD, ranks: tuple[int, int] = (0, 1), **fields: Any) -> Resolved:
    """Return resolved settings with another table."""
    if "profile" not in fields:
        fields = {"method": "a_shape"} | fields
    resolved = Resolved.from_additional_config({"sparse_prefill": fields}, SHAPE, device, *ranks)
    return replace(resolved, table=measured)


def resolved(measured: Crossover, device: str = CARD, **fields: Any) -> Thresholds:
    return settings(measured, device, **fields).thresholds(ON, ["flash"])


def test_the_table_that_ships_is_one_and_is_in_the_package() -> None:
    assert load_crossover().format == 1


def test_a_measurement_of_the_very_same() -> None:
    assert resolved(table(entry(9000, 700))) == Thresholds(9000, 700)
    assert resolved(table(entry(9000, 700)), device=CARD.lower()) == Thresholds(9000, 700)


@pytest.mark.parametrize(
    ("min_tokens", "setting", "pairs"),
    [
        (3072, "auto", 3072 * 3072 + 3072 * 3073 // 2),
        (9000, "auto", 4096 * 9000 + 4096 * 4097 // 2),
        (9000, 2000, 0),
    ],
)
def test_a_measured_length_says_how_many_pairs_pay(min_tokens: int, setting: Any, pairs: int) -> None:
    thresholds = resolved(table(entry(min_tokens, 256)), min_tokens=setting)
    assert thresholds.min_pairs == pairs
    assert (f"{pairs:,} pairs" in str(thresholds)) is (pairs > 0)


def test_pairs_are_those_of_the_measurement() -> None:
    """With chunks of 2,048, ``bench crossover`` times 1,024 tokens."""
    thresholds = resolved(table(entry(9000, 256, chunk_tokens=2048)))
    assert thresholds.min_pairs == 1024 * 9000 + 1024 * 1025 // 2


@pytest.mark.parametrize("fields", [{"min_query_tokens": 64}, {"min_tokens": 3000}, {"method": "sale"}], ids=str)
def test_without_both_measurements_any_number_of_pairs_runs_sparse(fields: dict[str, Any]) -> None:
    thresholds = resolved(table(entry(9000, 256)), **fields)
    assert thresholds.min_pairs == 0
    assert thresholds.dense_reason(2048, 20000) is None


def test_new_tokens_count_as_pairs_where_servers_were_measured() -> None:
    """Few new tokens need a longer prefix: their linear layers hide less of the time to launch selection."""
    measured = settings(table(entry(3072, 1000, min_pairs=36_000_000, pairs_per_token=4000)))
    assert measured.numbers()[ON]["flash"] == [3072, 1000, 36_000_000, 4000]  # of which all nodes and salts know
    thresholds = measured.thresholds(ON, ["flash"])
    assert thresholds.dense_reason(8192, 8192) is None
    assert thresholds.dense_reason(2000, 10_000) is Fallback.FEW_PAIRS
    assert thresholds.dense_reason(2000, 32_000) is None


def test_reasons_of_dense_rows() -> None:
    thresholds = Thresholds(3000, 200, min_pairs=1_000_000)
    reasons = {
        (3000, 3000): Fallback.TOO_SHORT, (3199, 3199): Fallback.SHORT_QUERY, (199, 90000): Fallback.SHORT_QUERY,
        (3200, 3200): Fallback.FEW_PAIRS, (200, 5000): Fallback.FEW_PAIRS, (200, 5101): None, (4000, 4000): None,
    }  # fmt: skip
    assert {lengths: thresholds.dense_reason(*lengths) for lengths in reasons} == reasons
    assert Thresholds(None, 1).dense_reason(9000, 9000) is Fallback.NEVER_FASTER


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(1, engine="portable"), entry(2)], 2),
        ([entry(1, device="NVIDIA H200"), entry(2)], 2),
        ([entry(1, method="dense"), entry(2)], 2),
        ([entry(1), entry(2, params={"sink_tokens": 64})], 1),
        ([entry(1, num_heads=64), entry(2)], 2),
        # Of other heads, those with the nearest total width; the most cautious of equally near ones.
        ([entry(1, num_heads=64), entry(2, num_heads=8)], 1),
        ([entry(1, num_heads=8), entry(2, num_heads=64, head_dim=64)], 2),
        ([entry(1, num_heads=16), entry(2, num_heads=64)], 2),
        # Equal parameters with other heads take precedence over other parameters with equal heads.
        ([entry(1, num_heads=64), entry(2, params={"sink_tokens": 64})], 1),
        # Only other parameters: the most cautious of the closest measurements.
        ([entry(5, params={"sink_tokens": 64}), entry(2, params={"sink_tokens": 128})], 5),
        ([entry(5, num_heads=64, params={"sink_tokens": 64}), entry(2, params={"sink_tokens": 128})], 2),
    ],
)
def test_the_closest_measurement_counts(entries: list[dict[str, Any]], expected: int) -> None:
    assert resolved(table(*entries)).min_tokens == expected


@pytest.mark.parametrize(
    ("shape", "min_tokens"),
    [((32, 8, 128), 3072), ((64, 8, 128), 3072), ((8, 2, 128), 32768), ((14, 2, 64), 32768), ((9, 3, 64), 65536)],
)
def test_small_models_run_sparse_later(shape: tuple[int, int, int], min_tokens: int) -> None:
    """The bundled table has an 8B model's heads, and those of two small models, for the default method on an H100."""
    (measurement,) = load_crossover().find("NVIDIA H100 80GB HBM3", "hopper", TopP(), shape)
    assert measurement.min_tokens == min_tokens


@pytest.mark.parametrize(
    ("chunk", "busy", "min_query_tokens", "expected"),
    [
        (8192, 7000, "auto", 2048),
        (2048, 2047, "auto", 2047),  # next to a single decode
        (2048, 1025, "auto", 1792),
        (1800, 1800, "auto", 1800),
        (1791, 1791, "auto", 2048),  # too small to have been measured: only reported
        (4096, 3841, 4096, 2048),  # a profile that was made for larger steps
        (2048, 1025, 4096, 1792),
        (2048, 1025, 512, 512),
    ],
)
def test_steps_too_small_for_the_number_lower_it_as_far_as_was_measured(
    chunk: int, busy: int, min_query_tokens: Any, expected: int
) -> None:
    fitted = resolved(table(entry(9000, 2048)), min_query_tokens=min_query_tokens).fitted(chunk, busy)
    assert fitted.min_query_tokens == expected
    before = 2048 if min_query_tokens == "auto" else min_query_tokens
    lines = [f"min_query_tokens is {expected} here, not {before}: a step has at most {chunk} new tokens"] * (
        expected != before
    )
    assert [note.partition(" of a")[0] for note in fitted.notes] == lines
    unmeasured = resolved(table(), min_query_tokens=min_query_tokens)
    assert unmeasured.fitted(chunk, busy) is unmeasured


@pytest.mark.parametrize("others", [[], [entry(1, device="other")], [entry(1, engine="portable")]])
def test_without_one_it_is_cautious_and_says_what_measures(others: list[dict[str, Any]]) -> None:
    thresholds = resolved(table(*others))
    assert thresholds.min_tokens == crossover_table.UNMEASURED_MIN_TOKENS
    assert thresholds.min_query_tokens == crossover_table.UNMEASURED_MIN_QUERY_TOKENS
    (note,) = thresholds.notes
    assert f"a_shape not measured on {CARD} with engine flash" in note
    assert "run `sparse-prefill bench crossover` to measure this device" in note


@pytest.mark.parametrize("numbers", [(None, 512), (9000, None), (None, None)])
def test_what_never_pays_stays_dense_until_the_operator_sets_a_number(numbers: tuple[int | None, int | None]) -> None:
    measured = table(entry(*numbers))
    thresholds = resolved(measured)
    assert thresholds.min_tokens is None
    assert str(thresholds) == "no rows"
    assert "a_shape never faster than dense attention" in thresholds.notes[0]
    assert "set min_tokens" in thresholds.notes[0]
    assert resolved(measured, min_tokens=500).min_tokens == 500


def test_numbers_that_are_set_need_no_measurement() -> None:
    assert resolved(table(), min_tokens=500, min_query_tokens=20) == Thresholds(500, 20)
    assert resolved(table(entry(9000, 700)), min_tokens=500) == Thresholds(500, 700)
    assert resolved(table(entry(9000, 700)), min_query_tokens=20) == Thresholds(9000, 20)
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
    assert resolved(measured, profile=mixed(tmp_path, "a_shape", "top_p")) == Thresholds(9000, 900)
    assert resolved(measured, profile=mixed(tmp_path, "a_shape", "sale")).min_tokens is None
    # A dense head next to other heads needs no measurement, but a dense method does.
    assert resolved(measured, profile=mixed(tmp_path, "a_shape", "dense")) == Thresholds(9000, 700)
    alone = resolved(table(), method="dense")
    assert (alone.min_tokens, len(alone.notes)) == (crossover_table.UNMEASURED_MIN_TOKENS, 1)


def test_all_ranks_go_sparse_from_the_same_lengths_on(tmp_path: Path) -> None:
    """Otherwise a block that all levels share would be sparse in one rank's heads and exact in another's."""
    measured = table(entry(9000, 700), entry(4000, 900, method="sparge_attn"))
    profile = mixed(tmp_path, "sparge_attn", "a_shape")
    ranks = [settings(measured, ranks=(rank, 4), profile=profile) for rank in range(4)]
    assert {rank.thresholds(ON, ["flash"]) for rank in ranks} == {Thresholds(9000, 900)}
    assert {rank.earliest_thresholds().min_tokens for rank in ranks} == {
        settings(measured, profile=profile).earliest_thresholds().min_tokens
    }


def test_layers_with_different_engines_take_the_strictest() -> None:
    measured = table(entry(9000, 700), entry(20000, 100, engine="portable"))
    assert settings(measured).thresholds(ON, ("flash", "portable")) == Thresholds(20000, 100)
    assert settings(measured).earliest_thresholds() == Thresholds(9000, 700)
    assert settings(table()).earliest_thresholds().min_tokens == crossover_table.UNMEASURED_MIN_TOKENS
    never = settings(table(entry(None), entry(3000, engine="portable"), entry(4000, engine="hopper")))
    assert never.earliest_thresholds().min_tokens == 3000


def test_an_engine_without_measurements_is_named(tmp_path: Path) -> None:
    """Also if the table of the setting ``crossover`` has measurements of other engines."""
    path = tmp_path / "crossover.json"
    path.write_text(written(entry(9000, 700), entry(20000, 100, engine="portable")))
    config = {"sparse_prefill": {"method": "a_shape", "crossover": str(path)}}
    measured = Resolved.from_additional_config(config, SHAPE, CARD)
    assert measured.thresholds(ON, ["flash", "portable"]).min_tokens == 20000
    assert "with engine hopper" in measured.thresholds(ON, ["hopper"]).notes[0]
    assert measured.numbers()[ON]["any other"] == [16384, 1024, 0, 0]


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
    plan = Plan.build(SparsePrefillConfig(profile=path, **config), SHAPE)
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

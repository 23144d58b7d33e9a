# SPDX-License-Identifier: Apache-2.0
"""Resolution of ``auto``: the closest measurement, the most cautious of several, and the message without any."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.crossover_cases import CARD, entry, written
from tests.helpers.folders import profile_file
from vllm_sparse_backend.config import crossover_table
from vllm_sparse_backend.config.crossover_table import Crossover, Thresholds, load_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import DEFAULT, Plan
from vllm_sparse_backend.config.resolved import Resolved
from vllm_sparse_backend.config.settings import SparsePrefillConfig

SHAPE = ModelShape("LlamaForCausalLM", num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128)


def table(*entries: dict[str, Any]) -> Crossover:
    return Crossover.model_validate({"format": 1, "entries": entries})


def resolved(
    measured: Crossover, engines: tuple[str, ...] = ("flash",), device: str = CARD, **fields: Any
) -> Thresholds:
    config = SparsePrefillConfig(**({"method": "a_shape"} | fields))
    return Plan.build(config, SHAPE).thresholds(measured, device, engines)


def test_the_table_that_ships_is_one_and_is_in_the_package() -> None:
    assert load_crossover().format == 1


def test_a_measurement_of_the_very_same() -> None:
    assert resolved(table(entry(9000, 700))) == Thresholds(9000, 700)
    assert resolved(table(entry(9000, 700)), device=CARD.lower()) == Thresholds(9000, 700)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry(1, engine="portable"), entry(2)], 2),
        ([entry(1, device="NVIDIA H200"), entry(2)], 2),
        ([entry(1, method="dense"), entry(2)], 2),
        ([entry(1), entry(2, params={"sink_tokens": 64})], 1),
        ([entry(1, num_heads=64), entry(2)], 2),
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


def in_layers(num_heads: int, num_kv_heads: int, head_dim: int, *entries: dict[str, Any], **fields: Any) -> Thresholds:
    """Return the thresholds of a model whose layers have these heads."""
    config = SparsePrefillConfig(**({"method": "a_shape"} | fields))
    shape = ModelShape("LlamaForCausalLM", 4, num_heads, num_kv_heads, head_dim)
    return Plan.build(config, shape).thresholds(table(*entries), CARD, ["flash"])


class TestSmallLayers:
    """Layers with less work for the GPU than the measured layers, 32 heads of 128."""

    @pytest.mark.parametrize("heads", [(32, 8, 128), (24, 8, 128), (28, 4, 128), (64, 8, 64), (64, 8, 128)])
    def test_layers_with_enough_work_take_the_measured_numbers(self, heads: tuple[int, int, int]) -> None:
        assert in_layers(*heads, entry(12288, 1000)) == Thresholds(12288, 1000)

    def test_the_numbers_are_those_at_which_a_small_layer_has_the_measured_work(self) -> None:
        """Its attention and linear layers together have at least as many operations as the measured attention."""

        def operations(width: int, linear_weights: int, context_len: int, query_len: int) -> int:
            return 4 * width * query_len * (context_len + query_len // 2) + 2 * linear_weights * width**2 * query_len

        measured = operations(32 * 128, 0, 12288, 4096)
        for num_heads in (1, 5, 9, 16):
            width = num_heads * 64
            least = in_layers(num_heads, 1, 64, entry(12288, 1000)).min_tokens
            assert least is not None
            assert operations(width, 8, least, 4096) >= measured > operations(width, 8, least - 300, 4096)

    def test_smaller_layers_wait_longer(self) -> None:
        """SmolLM2-135M, which lost at 32,768 tokens, runs dense there. The new tokens grow by the same factor."""
        numbers = [in_layers(num_heads, 1, 64, entry(12288, 1000)) for num_heads in (32, 15, 9)]
        assert [(n.min_tokens, n.min_query_tokens) for n in numbers] == [(18432, 1536), (55296, 4096), (97792, 7168)]
        (note,) = numbers[2].notes
        assert note.startswith("layers of 9 heads of 64 give a GPU less work than the measured layers")
        assert "auto estimates min_tokens 97792 and min_query_tokens 7168; run `sparse-prefill bench" in note
        (note,) = in_layers(9, 3, 64, entry(12288, 1000), min_query_tokens=64).notes
        assert "auto estimates min_tokens 97792; run `sparse-prefill bench crossover MODEL` to measure" in note

    def test_a_measurement_of_the_same_layers_needs_no_estimate(self) -> None:
        same_layers = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
        assert in_layers(9, 3, 64, entry(12288, 1000), entry(20480, 512, **same_layers)) == Thresholds(20480, 512)

    def test_numbers_of_the_operator_stay(self) -> None:
        """An operator who sets min_tokens runs sparse from there on, with the measured number of new tokens."""
        assert in_layers(9, 3, 64, entry(12288, 1000), min_tokens=2048, min_query_tokens=64) == Thresholds(2048, 64)
        assert in_layers(9, 3, 64, entry(12288, 1000), min_tokens=2048) == Thresholds(2048, 1000)
        assert in_layers(9, 3, 64, entry(12288, 1000), min_query_tokens=64).min_query_tokens == 64
        assert in_layers(9, 3, 64, min_tokens=2048).min_query_tokens == crossover_table.UNMEASURED_MIN_QUERY_TOKENS

    def test_the_numbers_without_a_measurement_are_for_large_layers_too(self) -> None:
        thresholds = in_layers(9, 3, 64)
        assert (thresholds.min_tokens, thresholds.min_query_tokens) == (126720, 7168)
        (note,) = thresholds.notes
        assert "auto uses the conservative defaults min_tokens 126720 and min_query_tokens 7168;" in note

    def test_a_method_that_never_pays_in_large_layers_does_not_in_small_ones(self) -> None:
        assert in_layers(9, 3, 64, entry(None)).min_tokens is None


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


def mixed(tmp_path: Path, default: str, head: str, **config: Any) -> SparsePrefillConfig:
    """A single head of a layer uses another method than all other heads."""
    layers = {(1,): {"heads": {"3": {"method": head}}}}
    path = profile_file(tmp_path, default={"method": default}, layers=layers)
    return SparsePrefillConfig(profile=path, **config)


def test_several_methods_take_the_largest_of_theirs(tmp_path: Path) -> None:
    measured = table(entry(9000, 700), entry(4000, 900, method="dense"), entry(None, None, method="sale"))
    dense, sale = (Plan.build(mixed(tmp_path, "a_shape", head), SHAPE) for head in ("dense", "sale"))
    assert dense.thresholds(measured, CARD, ["flash"]) == Thresholds(9000, 900)
    assert sale.thresholds(measured, CARD, ["flash"]).min_tokens is None
    # A dense head next to other heads needs no measurement, but a dense method does.
    assert dense.thresholds(table(entry(9000, 700)), CARD, ["flash"]) == Thresholds(9000, 700)
    alone = resolved(table(), method="dense")
    assert (alone.min_tokens, len(alone.notes)) == (crossover_table.UNMEASURED_MIN_TOKENS, 1)


def test_all_ranks_go_sparse_from_the_same_lengths_on(tmp_path: Path) -> None:
    """Otherwise a block that all levels share would be sparse in one rank's heads and exact in another's."""
    measured = table(entry(9000, 700), entry(4000, 900, method="sparge_attn"))
    config = mixed(tmp_path, "sparge_attn", "a_shape")
    ranks = [Plan.build(config, SHAPE, rank, 4) for rank in range(4)]
    assert {plan.thresholds(measured, CARD, ["flash"]) for plan in ranks} == {Thresholds(9000, 900)}
    exact = Plan.build(config, SHAPE).exact_tokens(measured, CARD)
    assert {plan.exact_tokens(measured, CARD) for plan in ranks} == {exact}


def test_layers_with_different_engines_take_the_strictest() -> None:
    measured = table(entry(9000, 700), entry(20000, 100, engine="portable"))
    assert resolved(measured, ("flash", "portable")) == Thresholds(20000, 100)
    plan = Plan.build(SparsePrefillConfig(method="a_shape"), SHAPE)
    assert plan.earliest_thresholds(measured, CARD) == Thresholds(9000, 700)
    assert plan.earliest_thresholds(table(), CARD).min_tokens == crossover_table.UNMEASURED_MIN_TOKENS
    never = table(entry(None), entry(3000, engine="portable"), entry(4000, engine="hopper"))
    assert plan.earliest_thresholds(never, CARD).min_tokens == 3000
    assert plan.exact_tokens(never, CARD) == 3000


def test_resolved_settings_have_the_thresholds_of_every_engine(tmp_path: Path) -> None:
    """Including engines without measurements, which the notes name, and unknown engines."""
    path = tmp_path / "crossover.json"
    path.write_text(written(entry(9000, 700), entry(20000, 100, engine="portable"), entry(3000, 300, engine="newer")))
    config = {"method": "a_shape", "crossover": str(path)}
    settings = Resolved.from_additional_config({"sparse_prefill": config}, SHAPE, CARD)
    plan = Plan.build(SparsePrefillConfig(**config), SHAPE)
    for engines in (["flash"], ["portable"], ["newer"], ["hopper"], ["flash", "portable", "hopper"]):
        assert settings.thresholds(DEFAULT, engines) == plan.thresholds(load_crossover(str(path)), CARD, engines)
    assert "with engine hopper" in settings.thresholds(DEFAULT, ["hopper"]).notes[0]
    assert settings.thresholds(DEFAULT, ["unknown"]).min_tokens == crossover_table.UNMEASURED_MIN_TOKENS


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


def test_what_a_profile_says_of_its_own_heads_goes_before_the_table(tmp_path: Path) -> None:
    """This applies to the device and engines of the measurement. A number set by the operator takes precedence over
    both."""
    measured = {
        "device": CARD,
        "engines": ["hopper"],
        "longest_tokens": 65536,
        "min_tokens": 4096,
        "min_query_tokens": 256,
    }
    a_shape = {"method": "a_shape"}
    fast = {"default": a_shape, "crossover": measured | {"min_tokens": None}}
    path = profile_file(tmp_path, model=SHAPE, level="high", default=a_shape, crossover=measured, levels={"fast": fast})
    crossovers = table(entry(9000, 700))

    def of(level: str, *engines: str, device: str = CARD, **fields: Any) -> Thresholds:
        plans = Plan.by_level(SparsePrefillConfig(profile=path, **fields), SHAPE)
        return plans[level].thresholds(crossovers, device, engines)

    assert of("default", "hopper", device=CARD.lower()) == Thresholds(4096, 256)
    assert of("default", "hopper", "flash") == of("default", "flash") == Thresholds(9000, 700)
    assert of("default", "hopper", device="NVIDIA H200").min_tokens == crossover_table.UNMEASURED_MIN_TOKENS
    assert of("default", "hopper", min_tokens=1) == Thresholds(1, 256)
    plan = Plan.build(SparsePrefillConfig(profile=path), SHAPE)
    assert plan.exact_tokens(crossovers, CARD) == plan.earliest_thresholds(crossovers, CARD).min_tokens == 4096
    never = of("fast", "hopper")
    assert never.min_tokens is None
    assert "the heads of this profile never faster than dense attention" in never.notes[0]

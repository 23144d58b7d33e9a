# SPDX-License-Identifier: Apache-2.0
"""Profiles: content, refusals and error messages."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import Profile, bundled_profiles, load_profile, parse_profile
from vllm_sparse_backend.config.ranges import format_ranges, parse_ranges

SHAPE = ModelShape(architecture="LlamaForCausalLM", num_layers=6, num_heads=8, num_kv_heads=2, head_dim=64)
HEADER = """\
format: 1
model: {architecture: LlamaForCausalLM, num_layers: 6, num_heads: 8, num_kv_heads: 2, head_dim: 64}
default: {method: dense}
"""


def refused(text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse_profile(text, "mine.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("mine.yaml: ")
    return message.removeprefix("mine.yaml: ")


# Ranges


@given(st.sets(st.integers(0, 300)))
def test_ranges_round_trip(numbers: set[int]) -> None:
    if numbers:
        assert parse_ranges(format_ranges(numbers)) == tuple(sorted(numbers))
    assert parse_ranges(list(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize(("text", "numbers"), [("0-3,7", (0, 1, 2, 3, 7)), (5, (5,)), (" 2 , 0 - 1 ", (0, 1, 2))])
def test_ranges_are_read(text: object, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "-1", -1, "a", "3-1", "1,,2", "1-2-3", "0-2,1", True, 1.0, None, "0-9999999", [-1]]
)
def test_ranges_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"^given .*expected"):
        parse_ranges(text)


# Content


def test_head_goes_before_layer_before_profile() -> None:
    text = """
        {format: 1, model: any, min_tokens: 1024, dense_layers: "0-1,3",
        default: {method: vertical_slash, vertical_tokens: 100, slash_tokens: 200},
        layers: {2: {default: {method: a_shape, sink_tokens: 64, local_tokens: 256},
        heads: {"0-1,5": {method: block_sparse, top_blocks: 8}}}, 4-5: {heads: {7: {method: dense}}}}}"""
    profile = parse_profile(text, "mine.yaml")
    slashes = make_method("vertical_slash", {"vertical_tokens": 100, "slash_tokens": 200})
    shape = make_method("a_shape", {"sink_tokens": 64, "local_tokens": 256})
    blocks, dense = make_method("block_sparse", {"top_blocks": 8}), make_method("dense", {})
    assert profile.methods_of(0, 8) == (slashes,) * 8
    assert profile.methods_of(2, 8) == (blocks, blocks, shape, shape, shape, blocks, shape, shape)
    assert profile.methods_of(4, 8) == profile.methods_of(5, 8) == (*(slashes,) * 7, dense)
    assert (profile.min_tokens, profile.dense_layers) == (1024, (0, 1, 3))


def test_profiles_for_any_model_load_by_name() -> None:
    assert set(bundled_profiles()) >= {"minference", "streaming"}
    for name in ("minference", "streaming"):
        load_profile(name).check_model(SHAPE)
    assert load_profile("minference").default == make_method("minference", {})
    assert load_profile("streaming").default == make_method("a_shape", {"sink_tokens": 1024, "local_tokens": 4096})


def test_unknown_profile_names_the_bundled_ones(tmp_path: Path) -> None:
    for missing in ("streeming", str(tmp_path / "none.yaml"), "~nosuchuser/x.yaml", "x" * 300, "a\0b"):
        with pytest.raises(ConfigurationError, match=r"no such file; given .* minference, .*, streaming"):
            load_profile(missing)


# Refusals


def test_all_wrong_fields_are_named_at_once() -> None:
    message = refused("""
format: 2
model: {architecture: X, num_layer: 3, num_heads: 4, num_kv_heads: 2, head_dim: true}
min_tokens: 1e3
default: {method: dense, foo: 1}
layers: {0-x: {}, 3: {heds: {}}, 4: {heads: {0-3: {method: denze}, 7: {}, 8: 3}}}
""")
    for problem in (
        "format: given 2, expected 1",
        "model.num_layers: missing",
        "model.num_layer: unknown field: given 'num_layer', expected one of",
        "(did you mean 'num_layers'?)",
        "model.head_dim: given true, expected a valid integer",
        "min_tokens: given 1000.0, expected an integer",
        "default: foo: unknown parameter of dense: given, but dense has no parameters; leave it out",
        "layers.0-x: given '0-x', expected numbers and ranges",
        "layers.3.heds: unknown field: given 'heds', expected one of default, heads",
        "layers.4.heads.0-3: method: given 'denze', expected one of",
        "layers.4.heads.7: method: missing, expected one of",
        "layers.4.heads.8: given 3, expected a mapping such as {method: NAME",
    ):
        assert problem in message


@pytest.mark.parametrize("key", ["default", "heads", "bogus"])
def test_keys_of_mappings_may_be_named_like_fields(key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"layers.{key}: given '{key}', expected numbers and ranges"):
        parse_profile(HEADER + f"layers: {{{key}: {{method: dense}}}}", "x.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root:x:0:0\nnobody", "given no mapping, expected a mapping"),
        ("{a: 1\n", "line 2, column 1: "),
        (HEADER + "layers:\n  1: {}\n  1: {}\n", "line 6, column 3: key 1 is given twice"),
        (HEADER + "? [1, 2]\n: 3", "unhashable key"),
        (HEADER + "x: &a [1]\ny: *a", "line 5, column 4: aliases"),
        (HEADER + "x: !!python/object/apply:os.getcwd []", "line 4, column 4: tags (tag:yaml.org,2002:python/object"),
        (HEADER + "x: !!bool maybe", "line 4, column 4: tags (tag:yaml.org,2002:bool) are not supported"),
        (HEADER + "x: !!int ''", "line 4, column 4: tags (tag:yaml.org,2002:int) are not supported"),
        (HEADER + f"min_tokens: {'1:' * 200}0.5", "min_tokens: given '1:1:1:"),
        (HEADER + "min_tokens: 2024-13-45", "min_tokens: given '2024-13-45', expected an integer"),
        ("[" * 50, "nested deeper than 32"),
        ("[" * 100_000, "exceeded maximum nesting depth"),
        ("a: \x00", "not YAML: "),
        (
            "format: 1\nmodel:\ndefault: {method: dense}",
            "model: given null, expected a mapping with the model's architecture",
        ),
        (HEADER.replace("num_kv_heads: 2", "num_kv_heads: 3"), "given 3, expected a divisor of num_heads 8"),
        (HEADER + "layers: {0-3: {}, 2: {}}", "layers: given 2 in both '0-3' and 2, expected it once"),
        (HEADER + "layers: {2: {heads: {0-3: {method: dense}, 3: {method: dense}}}}", "layers.2.heads: given 3 in"),
        (HEADER + "layers: {4-6: {}}", "layers.4-6: given 6, expected at most 5"),
        (HEADER + "layers: {0: {heads: {8: {method: dense}}}}", "layers.0.heads.8: given 8, expected at most 7"),
        (HEADER + "dense_layers: [1, 6]", "dense_layers: given 6, expected at most 5"),
        (HEADER + "dense_layers: [1, 1]", "dense_layers: given [1, 1], expected each number once"),
    ],
)
def test_wrong_file(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "mine.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigurationError, match=r"mine\.yaml: not UTF-8 at byte 3"):
        load_profile(path)


# Matching models


OTHER = {"rope_theta": 5e5, "architecture": "Qwen3ForCausalLM", "num_layers": 7, "num_heads": 4, "head_dim": 128}


@pytest.mark.parametrize(("field", "other"), OTHER.items())
def test_other_model_is_refused_naming_both_shapes(field: str, other: Any) -> None:
    profile = parse_profile(HEADER.replace("head_dim: 64", "head_dim: 64, rope_theta: 10000"), "mine.yaml")
    profile.check_model(SHAPE)  # its rope_theta is unknown
    shape = SHAPE.model_copy(update={field: other})
    with pytest.raises(ConfigurationError, match=r"^mine\.yaml: ") as caught:
        profile.check_model(shape, "mine.yaml")
    for part in (str(profile.model), str(shape), f"they differ in {field};"):
        assert part in str(caught.value)


def test_profile_for_any_model_must_not_reach_past_it() -> None:
    text = HEADER.replace(HEADER.splitlines()[1], "model: any") + "layers: {0: {heads: {8: {method: dense}}}, 9: {}}"
    profile = parse_profile(text, "")
    profile.check_model(SHAPE.model_copy(update={"num_layers": 10, "num_heads": 16}))
    said = r"layers\.0\.heads\.8: given 8, .*layers\.9: given 9, expected at most 5"
    with pytest.raises(ConfigurationError, match=said):
        profile.check_model(SHAPE)


CONFIG = {"architectures": ["M"], "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
M_SHAPE = ModelShape(architecture="M", num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, M_SHAPE),
        (
            {"num_key_value_heads": 2, "head_dim": 32, "rope_theta": 5e5},
            M_SHAPE.model_copy(update={"num_kv_heads": 2, "head_dim": 32, "rope_theta": 5e5}),
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, M_SHAPE.model_copy(update={"rope_theta": 1e4})),
    ],
)
def test_shape_of_a_model_config(changes: dict[str, Any], expected: ModelShape) -> None:
    config = CONFIG | changes
    assert ModelShape.from_config(config) == expected
    multimodal = {"architectures": config.pop("architectures"), "text_config": config, "num_hidden_layers": 99}
    assert ModelShape.from_config(multimodal) == expected


def test_model_config_that_says_too_little(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: num_layers: given null.*; num_heads: given null"):
        ModelShape.from_config({"architectures": ["M"]})
    with pytest.raises(ConfigurationError, match=r"config\.json: cannot be read"):
        ModelShape.from_folder(tmp_path)


# Writing and reading back


@pytest.mark.parametrize("name", [None, *bundled_profiles()])
def test_yaml_round_trip(name: str | None) -> None:
    profile = ODD if name is None else load_profile(name)
    again = parse_profile(profile.to_yaml(), "")
    assert again == profile
    assert again.to_yaml() == profile.to_yaml()


ODD = Profile.model_validate({
    "format": 1,
    "model": SHAPE.model_copy(update={"rope_theta": 1e6}),
    "min_tokens": 1 << 20,
    "dense_layers": [1, 5],
    "default": make_method("vertical_slash", {"slash_tokens": 7}),
    "layers": {(0, 2, 4): {"default": make_method("dense", {}), "heads": {(0, 7): make_method("a_shape", {})}}},
    # YAML reads such a hash as a number.
    "provenance": {"bounds": {"": -1e300, "a\nb": 1e-9}, "device": "~", "prompts_sha256": f"{'1' * 20}e{'1' * 43}"},
})  # fmt: skip
"""A profile with values that no bundled profile has."""


# Levels


LEVELS = """\
format: 1
model: {architecture: LlamaForCausalLM, num_layers: 6, num_heads: 8, num_kv_heads: 2, head_dim: 64}
level: fast
default: {method: a_shape, sink_tokens: 64, local_tokens: 256}
layers:
  2: {heads: {1: {method: dense}}}
levels:
  high:
    dense_layers: 0-1
    default: {method: vertical_slash}
    provenance: {bounds: {output_error: 0.01}}
provenance:
  figures:
    density: {1: [0.12345678, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25]}
    error: {1: [0, 0, 0, 0, 0, 0, 0, 0.000012345678]}
"""


def test_levels() -> None:
    profile = parse_profile(LEVELS, "")
    assert profile.level_names == ("exact", "high", "fast")
    assert profile.methods_of(2, 8)[1] == make_method("dense", {})
    fast, high = (profile.at_level(name) for name in ("fast", "high"))
    assert [fast.methods_of(2, 8)[1], fast.methods_of(3, 8)[0]] == [make_method("dense", {}), profile.default]
    assert (high.level, high.dense_layers, high.layers) == ("high", (0, 1), {})
    assert (high.default, high.provenance["bounds"]) == (make_method("vertical_slash", {}), {"output_error": 0.01})
    assert high.methods_of(2, 8) == (high.default,) * 8
    assert (high.model, high.level_names) == (profile.model, ("exact", "high"))
    assert parse_profile(HEADER, "").level_names == ("exact",)
    text = LEVELS.replace("level: fast", "level: a_shape")
    named = parse_profile(text.replace("  high:", "  own-2:\n    default: {method: sale}\n  high:"), "")
    assert named.level_names == ("exact", "high", "a_shape", "own-2")  # bounds first, then in the order of the profile
    assert named.at_level("own-2").default == make_method("sale", {})
    for variant in (profile, fast, high, named):
        again = parse_profile(variant.to_yaml(), "")
        assert again == variant
        assert again.to_yaml() == variant.to_yaml()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "level: fast",
            "level: Quick",
            "level: given 'Quick', expected a name of at most 40 lower-case letters, digits,",
        ),
        ("level: fast\n", "", "level: missing, expected a name for the profile's own level, such as high"),
        ("level: fast", "level: high", "levels.high: given the name of the profile's own level"),
        ("  high:", "  exact:", "such as high or fast; exact, default, on, p are reserved"),
        ("  high:", "  1:", "given 1, expected a name of at most 40 lower-case letters"),
        ("dense_layers: 0-1", "dense_layers: 0-6", "levels.high.dense_layers: given 6, expected at most 5"),
        ("dense_layers: 0-1", "min_tokens: 3", "levels.high.min_tokens: unknown field"),
    ],
)
def test_wrong_level_or_figures(old: str, new: str, expected: str) -> None:
    assert old in LEVELS
    assert expected in refused(LEVELS.replace(old, new))


def test_a_level_must_fit_the_model_that_is_served() -> None:
    text = LEVELS.replace(LEVELS.splitlines()[1], "model: any").replace("dense_layers: 0-1", "dense_layers: 9")
    with pytest.raises(ConfigurationError, match=r"levels\.high\.dense_layers: given 9, expected at most 5"):
        parse_profile(text, "").check_model(SHAPE)
    text = LEVELS.replace("{method: vertical_slash}", "{method: share_prefill}")
    with pytest.raises(ConfigurationError, match=r"levels\.high\.share_prefill: no two heads can share"):
        parse_profile(text, "").check_model(SHAPE)

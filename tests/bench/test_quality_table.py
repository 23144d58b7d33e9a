# SPDX-License-Identifier: Apache-2.0
"""The table of what settings lose beside how fast they are: from results of servers and of benchmarks."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import densities, frontier, means, quality
from vllm_sparse_backend.measure.report import BenchError
from vllm_sparse_backend.profiling.capture import Capture, LayerTensors
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.methods import PRESETS, make_method
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_backend.settings.profile import load_profile

ROOT = Path(__file__).parents[2]


def figure(name: str, value: float, device: str = "a card") -> dict[str, object]:
    about = {"unit": "share", "bar": None, "better": "higher", "device": device, "command": "x"}
    return {"name": name, "value": value, **about}


def asked(label: str, right: float, perplexity: float, tokens: str = "12,000", device: str = "a card"):
    name = f"{label}, answers inside the prompt, {tokens} tokens, code-lm-29m-128k"
    return [figure(f"{name}: right", right, device), figure(f"{name}: perplexity", perplexity, device)]


def timed(label: str, times: float, density: float, after: str = "122,880"):
    name = f"whole method, {label}, code-lm-29m-128k, after {after}"
    return [figure(f"{name}: times faster", times), figure(f"{name}: density", density)]


MARKS = "".join(
    f"<!-- figures: {mark} -->\nold\n<!-- end of figures -->\n" for mark in ("answers", "shipped", "lowest density")
)


def run(*args: object):
    app = typer.Typer()
    app.command()(quality.main)
    return CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("label", "same"),
    [
        ("sale", "sale"),
        ("no configuration", "no configuration"),
        ('flex estimating="spread" last_queries=256', "flex last_queries=256 estimating=spread"),
        ("anchor theta=3.0 whole_blocks=true", "anchor whole_blocks=true theta=3"),
    ],
)
def test_labels_that_mean_the_same_are_the_same(label, same):
    assert quality.plain(label) == quality.plain(same)


def test_the_default_is_held_to_its_bars_and_stands_out(tmp_path):
    default = quality.default_label()
    method, params = PRESETS["default"]
    assert make_method("default", {}) == make_method(method, params)
    answers = [*asked("stock", 0.8, 4.0), *asked("b c=2.0", 0.4, 5.0), *asked(default, 0.72, 4.02)]
    answers += asked("stock", 0.9, 4.0, "8,192", "another card") + asked("b", 0.9, 4.0, "8,192")
    performance = [*timed("b c=2", 9.0, 0.05), *timed(default, 3.0, 0.1)]
    paths = {name: tmp_path / f"{name}.json" for name in ("answers", "performance", "results")}
    paths["answers"].write_text(json.dumps(answers))
    paths["performance"].write_text(json.dumps(performance))
    document = tmp_path / "quality.md"
    document.write_text(MARKS)
    result = run(*(x for name, path in paths.items() for x in (f"--{name}", path)), "--markdown", document)
    assert result.exit_code == 0, result.output

    figures = {row["name"]: row for row in json.loads(paths["results"].read_text())}
    held = figures[f"{default}, 12,000 tokens, code-lm-29m-128k: right answers ÷ stock's"]
    assert (held["value"], held["bar"]) == (0.9, 0.98)
    assert figures[f"{default}, 12,000 tokens, code-lm-29m-128k: perplexity ÷ stock's"]["value"] == 1.005
    assert figures[f"whole method, {default}, code-lm-29m-128k, after 122,880: times faster"]["bar"] == 2.5
    assert "right answers" in result.output  # 0.9 is less than 0.98
    assert not any(name.startswith("b, 8,192") for name in figures)  # stock was asked on another card

    rows = document.read_text().splitlines()
    assert "|  | 8,192 tokens | 12,000 tokens | after 24,576 | after 122,880 |" in rows
    first, second = (
        f"| **{default}** |  | 0.90, 1.005 |  | 3.0× (0.10) |",
        "| b c=2 |  | 0.50, 1.250 |  | 9.0× (0.05) |",
    )
    assert rows.index(first) < rows.index(second)


def setting(label: str, right: float, perplexity: float, density: float, faster: float | None = None):
    times = {} if faster is None else {"122,880": faster, "24,576": faster / 2}
    return frontier.Setting(
        label, dict.fromkeys(frontier.LENGTHS, right), dict.fromkeys(frontier.LENGTHS, perplexity),
        dict.fromkeys(frontier.LENGTHS, density), times,
    )  # fmt: skip


def test_the_cheapest_setting_that_keeps_enough_is_shipped(tmp_path):
    faithful, cheap = (
        setting("sparge_attn kept_mass=0.998", 1.0, 1.0, 0.7, 1.5),
        setting("sparge_attn kept_mass=0.99", 0.9, 1.02, 0.5, 2.0),
    )
    others = [
        setting("sparge_attn kept_mass=0.9", 0.89, 1.0, 0.1, 9.0),
        setting("sparge_attn kept_mass=0.97", 0.95, 1.021, 0.1, 9.0),
        setting("sale tau=0.3", 0.98, 1.0, 0.02, 9.0),
        setting("vertical_slash slash_tokens=100000", 1.0, 1.0, 0.81, 9.0),
    ]
    found = frontier.shipped([faithful, cheap, *others])
    assert [paper for paper, one in found.items() if one] == ["SpargeAttn"]
    assert found["SpargeAttn"] is cheap
    assert frontier.shipped([faithful, cheap, setting("sparge_attn", 1.0, 1.0, 0.01)])["SpargeAttn"] is cheap
    table = frontier.shipped_table([faithful, cheap, *others])
    assert '`{"profile": "sparge_attn-answers"}`' in table
    assert "**SALE has none** of those tried below a density of 0.8: of 1 setting, which keep up to 0.02" in table
    (tmp_path / "sale-answers.yaml").touch()
    (tmp_path / "mine.yaml").touch()
    frontier.write_profiles([faithful, cheap, *others], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "sparge_attn-answers.yaml"]
    profile = load_profile(tmp_path / "sparge_attn-answers.yaml")
    assert profile.methods_of(0, 1) == (make_method("sparge_attn", {"kept_mass": 0.99}),)


def test_the_lowest_density_is_that_of_each_length():
    few, many = setting("sale tau=0.3", 0.94, 1.0, 0.02), setting("sale tau=0.1", 0.96, 1.0, 0.07)
    few.right["32,000"] = 0.95
    row = next(row for row in frontier.lowest_table([few, many]).splitlines() if row.startswith("| sale |"))
    assert row == "| sale | 0.070 (tau=0.1) | 0.020 (tau=0.3) | 0.070 (tau=0.1) | 0.070 (tau=0.1) |"


def test_answers_are_drawn_against_density(tmp_path):
    pytest.importorskip("matplotlib")
    frontier.draw([setting("sale", 1.0, 1.0, 0.3), setting("sparge_attn", 0.5, 1.0, 0.2)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_tasks_and_times_have_bars_where_they_tell_something(tmp_path):
    rows = [
        figure(f"{label}, {task}, 8,192 tokens, m", value)
        for task, stock, ours in (("needle", 1.0, 0.9), ("niah_multikey_1", 0.9, 0.87), ("vt", 0.1, 0.0))
        for label, value in (("stock", stock), ("no configuration", ours), ("other", 0.0))
    ]
    (tmp_path / "run.json").write_text(json.dumps(rows))
    paths = {name: tmp_path / f"{name}.json" for name in ("answers", "performance", "results")}
    paths["answers"].write_text("[]")
    files = [x for name, path in paths.items() for x in (f"--{name}", path)]
    result = run(*files, "--merge", tmp_path / "run.json", "--took", "evaluation=901.5@a card")
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(paths["results"].read_text())}
    assert found["no configuration, needle, 8,192 tokens, m"]["bar"] == 0.95
    assert found["no configuration, niah_multikey_1, 8,192 tokens, m"]["bar"] == 0.88
    assert found["no configuration, vt, 8,192 tokens, m"]["bar"] is None
    assert found["other, needle, 8,192 tokens, m"]["bar"] is None
    took = found["evaluation of all methods, 8,192 tokens, needle: took"]
    assert (took["value"], took["bar"], took["device"]) == (901.5, 900, "a card")
    assert run(*files, "--took", "evaluation").exit_code == 2


def test_density_of_a_prompts_beginning_is_that_of_the_shorter_prompt(tmp_path):
    """As a server counts it: past the first positions, over all layers, those that are dense too."""
    shape = ModelShape(architecture="LlamaForCausalLM", num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
    captures = []
    torch.manual_seed(0)
    whole = [LayerTensors(*(torch.randn(900, heads, 64) for heads in (2, 1, 1))) for _ in range(2)]
    for tokens in (900, 700):
        (folder := tmp_path / str(tokens)).mkdir()
        found = Capture(folder, "m", shape, tokens, "", {}, {})
        for layer, tensors in enumerate(whole):
            found.add(layer, LayerTensors(*(x[:tokens].contiguous() for x in tensors)), 0.125)
        captures.append(found)
    config = {"method": "a_shape", "params": {"sink_tokens": 64, "local_tokens": 64}}
    half = SparsePrefillConfig(**config, dense_layers=(1,))
    asked = [(Plan.build(one, shape), 256) for one in (SparsePrefillConfig(**config), half)]
    longer, shorter = (densities.densities(one, 700, asked, 300, "cpu") for one in captures)
    assert longer == shorter
    assert longer[1] == pytest.approx((longer[0] + 1) / 2)
    # Blocks of 64 at least, for tiles of 128 queries that begin at 256, 300, and after each 128.
    least = sum(64 + min(64, q + 1) for q in range(256, 700)) / sum(q + 1 for q in range(256, 700))
    assert least < longer[0] < 0.9


def test_means_help_where_what_was_dropped_is_alike(tmp_path):
    shape = ModelShape(architecture="LlamaForCausalLM", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)
    found = Capture(tmp_path, "m", shape, 600, "", {}, {})
    torch.manual_seed(0)
    q, k, v = torch.randn(600, 2, 64), 0.1 * torch.randn(600, 1, 64), 1 + 0.1 * torch.randn(600, 1, 64)
    v[:300] = -v[:300]  # a window alone sees nothing of these
    found.add(0, LayerTensors(q, k, v), 0.125)
    (ratio,), (density,) = means.ratios(found, "a_shape", {"sink_tokens": 64, "local_tokens": 64}, "cpu")
    assert 0 < ratio < 0.3
    assert 0 < density < 1


def test_settings_are_those_of_the_commands(tmp_path):
    rows = [figure("x", 1.0), figure("y", 1.0)]
    rows[0]["command"] = """sparse-prefill eval answers m --settings '{"method": "sale"}' --settings my.yaml"""
    rows[1]["command"] = """sparse-prefill eval answers m --settings '{"method": "sale"}'"""
    (tmp_path / "answers.json").write_text(json.dumps(rows))
    assert [str(one) for one in densities.settings_asked(tmp_path / "answers.json")] == ["sale", "profile my"]
    with pytest.raises(BenchError, match="not a results file"):
        densities.settings_asked(tmp_path / "none.json")


def test_the_document_in_the_repository_is_up_to_date():
    asked = quality.by_plain_label(quality.load(ROOT / "docs/results/answers.json"), quality.NAMED)
    timed = quality.by_plain_label(quality.load(ROOT / "docs/results/performance.json"), quality.TIMED)
    text = (ROOT / "docs/quality.md").read_text()
    assert quality.table(asked, timed) in text
    held = {row["name"]: row for row in quality.load(ROOT / "docs/results/quality.json").values()}
    for row in quality.figures_of(asked, timed):
        assert held[row["name"]]["value"] == row["value"]
    densities_asked = quality.by_plain_label(quality.load(ROOT / "docs/results/answers.json"), quality.DENSITY)
    settings = quality.frontier_of(asked, densities_asked, timed)
    assert frontier.shipped_table(settings) in text
    assert frontier.lowest_table(settings) in text
    for name, profile in frontier.profile_texts(settings).items():
        assert (ROOT / "profiles" / f"{name}.yaml").read_text() == profile

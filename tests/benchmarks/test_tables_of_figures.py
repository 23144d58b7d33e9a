# SPDX-License-Identifier: Apache-2.0
"""Tables of README.md and docs/ show the figures of docs/results, and the lengths of the bundled crossover table."""

import itertools
import re
from collections import Counter
from decimal import Decimal

import pytest

from benchmarks.figures import read_figures
from tests.helpers.external_tools import ROOT
from vllm_sparse_backend.config.crossover_table import AUTO, LayerSize, Place, load_crossover, resolve_lengths
from vllm_sparse_backend.config.method_parameters import PRESETS
from vllm_sparse_kernels.methods import METHODS

HALF_A_UNIT = Decimal("0.5")
MODELS = ("SmolLM2", "code-lm")
LENGTHS = ("16,384", "32,768", "65,536")


FIGURES = [figure for path in sorted((ROOT / "docs/results").glob("*.jsonl")) for figure in read_figures(path)]
VALUES = {figure.name: Decimal(str(figure.value)) for figure in FIGURES}
UNITS = {figure.name: figure.unit for figure in FIGURES}
QUALITY, PERFORMANCE, PAPERS = (f"docs/research/{page}.md" for page in ("quality", "performance", "papers"))


def table(page: str, *columns: str, place: int = 0) -> list[list[str]]:
    """Return the rows of a table of a page: of those whose headers begin with these columns, the one at ``place``."""
    lines = [
        [cell.strip() for cell in line.strip()[1:-1].split("|")] if line.startswith("|") else []
        for line in (ROOT / page).read_text().splitlines()
    ]
    start = [i for i, cells in enumerate(lines) if cells[: len(columns)] == list(columns)][place]
    rows = list(itertools.takewhile(bool, lines[start + 2 :]))
    assert rows, (page, columns)
    return rows


def shows(cell: str, value: Decimal) -> bool:
    """Return whether a cell is this value, rounded to the digits of the cell."""
    text = re.sub(r"[\s,%*]", "", cell).replace("−", "-")
    return abs(Decimal(text) - value) <= HALF_A_UNIT.scaleb(int(Decimal(text).as_tuple().exponent))


def percent(ratio: Decimal) -> Decimal:
    """Return the change, in percent, of a ratio to stock's."""
    return (ratio - 1) * 100


def test_each_figure_is_stored_once_and_whole() -> None:
    assert len(VALUES) == len(FIGURES)
    assert [figure.name for figure in FIGURES if not (figure.device and figure.command and figure.date)] == []


def test_the_page_counts_missed_targets() -> None:
    missed = Counter()
    for path in sorted((ROOT / "docs/results").glob("*.jsonl")):
        for figure in read_figures(path):
            if figure.bar is not None and figure.value is not None:
                is_missed = figure.value < figure.bar if figure.better == "higher" else figure.value > figure.bar
                missed[path.name] += is_missed
    counts = ", ".join(f"{count} in `{name}`" for name, count in missed.items() if count)
    text = " ".join((ROOT / "docs/results/README.md").read_text().split())
    assert f"Some figures miss their targets: {counts}." in text


EXPERTS = "16 layers of experts of Qwen3-30B-A3B's shape"


def test_the_times_of_the_readme() -> None:
    rows = table("README.md", "prompt, tokens", "stock's TTFT, s")
    assert len(rows) == 5
    for tokens, stock, ours, *speed_ups in rows:
        models = ("widened 8B", "widened 8B, fp8 weights", EXPERTS)
        ratios = [VALUES[f"{model}, {tokens} tokens: TTFT, stock's ÷ ours"] for model in models]
        time = VALUES[f"widened 8B, {tokens} tokens: stock's TTFT"]
        assert shows(stock, time), tokens
        assert shows(ours, time / ratios[0]), tokens
        assert all(map(shows, speed_ups, ratios)), tokens


def test_the_accuracy_of_the_readme() -> None:
    rows = table("README.md", "model", "prompt, tokens", "questions", "right answers ÷ stock's")
    longest = ("code-lm", "122,880")  # the accuracy next to the largest speed-up
    assert [tuple(row[:2]) for row in rows] == [*((model, n) for model in MODELS for n in LENGTHS), longest]
    for model, tokens, _, answers, perplexity, density in rows:
        name = f"{model}, the default, {tokens} tokens"
        for cell, quantity, change in ((answers, "answers", lambda x: x), (perplexity, "perplexity", percent)):
            value, error = cell.split("±")
            assert shows(value, change(VALUES[f"{name}: {quantity}"])), name
            assert shows(
                error, VALUES[f"{name}: {quantity}, standard error"] * (100 if quantity == "perplexity" else 1)
            ), name
        if density:
            assert shows(density, VALUES[f"{name}: density"]), name
        else:
            assert f"{name}: density" not in VALUES


def test_streaming_heads() -> None:
    rows = table("docs/streaming_heads.md", "prompt, tokens", "without streaming heads")
    assert len(rows) == 3
    for tokens, without, default in rows:
        assert shows(without, VALUES[f"without streaming heads, widened, TTFT, {tokens} tokens"]), tokens
        assert shows(default, VALUES[f"default, widened, TTFT, {tokens} tokens"]), tokens
    rows = table(QUALITY, "model", "streaming heads", "tokens")
    assert len(rows) == 9
    for model, setting, tokens, answers, error, perplexity, density in rows:
        streaming = "without streaming heads" if setting == "none" else f"streaming heads {setting}"
        name = f"{model}, " + ("default" if setting == "after 16,384" else streaming) + f", {tokens} tokens"
        assert shows(answers, VALUES[f"{name}: answers"]), name
        assert shows(error, VALUES[f"{name}: answers, standard error"]), name
        assert shows(perplexity, percent(VALUES[f"{name}: perplexity"])), name
        assert shows(density, VALUES[f"{name}: density"]), name


def test_rules_of_other_projects() -> None:
    for model, rule, *cells in table("docs/compared_with.md", "model", "rule"):
        for tokens, row in (("16,384", cells[:4]), ("32,768", cells[4:])):
            answers, perplexity, error, density = row
            name = f"{model}, emulated rule {rule}, {tokens} tokens: "
            right = f"{name}right answers"
            assert answers == f"{VALUES[right]} {UNITS[right]}", name
            assert shows(perplexity, percent(VALUES[f"{name}perplexity"])), name
            stretches = "standard error over stretches of 4,096 tokens"
            assert shows(error, 100 * VALUES[f"{name}perplexity, {stretches}"]), name
            assert shows(density, VALUES[f"{name}density"]), name


def test_speed_of_the_default_and_of_profiles() -> None:
    profile = "profile best, widened, made with --tokens 32768 --count 1"
    for tokens, default, best in table("docs/profiles.md", "prompt tokens", "default"):
        assert shows(default, VALUES[f"widened 8B, {tokens} tokens: TTFT, stock's ÷ ours"]), tokens
        assert_shows_with_error(best, f"{profile}, TTFT, {tokens} tokens")


def test_the_papers_settings() -> None:
    rows = table(PAPERS, "setting", "answers, 16,384")
    assert len(rows) == 9
    for setting, short, long, perplexity, density, speed_up, seconds in rows:
        name = "papers on SmolLM2, " + setting.replace("`", "")
        assert shows(short, VALUES[f"{name}, 16,384 tokens: answers"]), name
        assert shows(long, VALUES[f"{name}, 65,536 tokens: answers"]), name
        assert shows(perplexity, percent(VALUES[f"{name}, 65,536 tokens: perplexity"])), name
        assert shows(density, VALUES[f"{name}, 65,536 tokens: density"]), name
        if speed_up:
            assert shows(speed_up, VALUES[f"{name}, after 57,344: times faster than FlashAttention-3"]), name
        for other in VALUES:
            if other.startswith(f"{name}: time of calibration"):
                assert shows(seconds, VALUES[other]), name


ANSWERS_PROFILES = {
    "vertical_slash-answers": "MInference",
    "anchor_attention-answers": "AnchorAttention",
    "sparge_attn-answers": "SpargeAttn",
    "flex_vertical_slash-answers": "FlexPrefill",
}


def test_settings_that_keep_nine_of_ten_answers() -> None:
    rows = table(QUALITY, "profile", "lowest answers")
    assert len(rows) == len(ANSWERS_PROFILES)
    ends = (
        ": right answers ÷ stock's, least of all lengths",
        ": perplexity ÷ stock's, most of all lengths",
        ": density, 130,000 tokens",
    )
    for profile, *cells in rows:
        start = f"shipped setting of {ANSWERS_PROFILES[profile.split('`')[1]]} ("
        for cell, end in zip(cells, ends, strict=True):
            (name,) = (name for name in VALUES if name.startswith(start) and name.endswith(end))
            assert shows(cell, VALUES[name]), name


def setting(cell: str) -> str:
    """Return a setting as figures name it."""
    return cell.replace("`", "") + ", code-lm-29m-128k"


def test_accuracy_and_speed_by_setting() -> None:
    rows = table(QUALITY, "setting", "answers, 32,000 tokens")
    assert len(rows) == 12
    for name, short, long, perplexity, density, speed_up in rows:
        about = name.replace("`", "")
        assert shows(short, VALUES[f"{about}, 32,000 tokens, code-lm-29m-128k: right answers ÷ stock's"]), name
        assert shows(long, VALUES[f"{about}, 130,000 tokens, code-lm-29m-128k: right answers ÷ stock's"]), name
        assert shows(perplexity, VALUES[f"{about}, 130,000 tokens, code-lm-29m-128k: perplexity ÷ stock's"]), name
        assert shows(density, VALUES[f"whole method, {setting(name)}, after 122,880: density"]), name
        assert shows(speed_up, VALUES[f"whole method, {setting(name)}, after 122,880: times faster"]), name


def test_accuracy_and_ttft_by_setting() -> None:
    rows = table(QUALITY, "setting, 65,536 tokens", "answers ÷ stock's")
    assert len(rows) == 8
    for cell, answers, questions, perplexity, density, speed_up in rows:
        about = f"65,536 tokens, {cell.replace('`', '')}: "
        name = f"code-lm, {about}"
        assert UNITS[f"{name}answers"] == f"÷ stock's, of {questions} questions", name
        ratio, error = answers.split("±")
        assert shows(ratio, VALUES[f"{name}answers"]), name
        assert shows(error, VALUES[f"{name}answers, standard error"]), name
        change, error = perplexity.split("±")
        assert shows(change, percent(VALUES[f"{name}perplexity"])), name
        assert shows(error, 100 * VALUES[f"{name}perplexity, standard error"]), name
        assert shows(density, VALUES[f"{name}density"]), name
        assert shows(speed_up, VALUES[f"widened 8B, {about}TTFT, stock's ÷ ours"]), name


def test_methods() -> None:
    rows = table(PERFORMANCE, "method", "selection")
    assert len(rows) == 8
    for name, selection, *cells in rows:
        row = f"selection, {setting(name)}, chunk after 122,880: share of FlashAttention-3"
        assert shows(selection, VALUES[row]), row
        for quantity, cell in zip(("times faster", "density", "output error"), cells, strict=True):
            row = f"whole method, {setting(name)}, after 122,880: {quantity}"
            assert shows(cell, VALUES[row]), row


def test_selection_of_the_default() -> None:
    for tokens, share in table(PERFORMANCE, "tokens before the chunk", "selection ÷ dense attention"):
        name = f"selection, top_p, after {tokens}, structured data: share of FlashAttention-3 of the same run"
        assert shows(share, VALUES[name]), name


def test_servers_of_a_shape() -> None:
    rows = table(PERFORMANCE, "new tokens", "cached tokens")
    assert len(rows) == 9
    for new, cached, time, speed_up in rows:
        name = (
            f"vllm serve, a_shape, {new} tokens"
            if cached == "0"
            else f"vllm serve, a_shape, {new} new after {cached} cached"
        )
        assert shows(time, VALUES[f"{name}: TTFT"]), name
        assert shows(speed_up, VALUES[f"{name}: TTFT, speed-up"]), name


def test_efficiency_of_attention() -> None:
    shares = ("1", "0.5", "0.2", "0.08", "0.03")
    for tokens, width, *cells in table(PERFORMANCE, "tokens before the chunk", "keys per block", *shares):
        for share, cell in zip(shares, cells, strict=True):
            (row,) = [
                name
                for name in VALUES
                if re.fullmatch(f"attend, .*after {tokens}, blocks of {width}, density {share}: efficiency", name)
            ]
            assert shows(cell, VALUES[row]), row


def assert_shows_with_error(cell: str, name: str) -> None:
    """The unit of a figure has its standard error."""
    value, error = cell.split(" ± ")
    assert shows(value, VALUES[name]), name
    assert shows(error, Decimal(UNITS[name].split("± ")[1])), name


TRAFFIC_MODELS = ["code-lm widened to an 8B's shape", EXPERTS]


@pytest.mark.parametrize(("place", "model"), enumerate(TRAFFIC_MODELS))
def test_after_a_cached_prefix(place: int, model: str) -> None:
    cached = ("8,000", "16,000", "30,000", "60,000", "100,000")
    rows = table(PERFORMANCE, "new tokens", *(f"after {tokens}" for tokens in cached), place=place)
    assert len(rows) == 6
    for new, *cells in rows:
        for tokens, cell in zip(cached, cells, strict=True):
            name = f"{model}, {new} tokens after {tokens}: TTFT, stock's ÷ ours"
            assert_shows_with_error(cell, name)


def test_agents() -> None:
    rows = table(PERFORMANCE, "model", "figure", "stock's, s")
    assert len(rows) == 12
    for model, figure, stock, ratio in rows:
        name = {"experts": EXPERTS}.get(model, f"widened {model}") + ", eight agents to 80,000 tokens"
        assert shows(stock, VALUES[f"{name}: stock's {figure}"])
        assert_shows_with_error(ratio, f"{name}: {figure}, stock's ÷ ours")


def test_mixed_load() -> None:
    for share, kind, statistic, _, stock, ratio in table(PERFORMANCE, "share", "requests", "figure", "number"):
        name = f"widened 8B, open loop at {share} of stock's capacity, {kind} requests: "
        assert shows(stock, VALUES[f"{name}stock's {statistic} of TTFT"]), name
        assert_shows_with_error(ratio, f"{name}{statistic} of TTFT, stock's ÷ ours")
    capacities = [VALUES[f"widened 8B, open loop: {figure}"] for figure in (
        "stock's capacity", "our capacity", "capacity, ours ÷ stock's"
    )]  # fmt: skip
    says = "Stock's is {:.2f} requests per second.*Ours is at least {:.2f}.*at least {:.2f} times stock's"
    assert re.search(says.format(*capacities), (ROOT / PERFORMANCE).read_text(), re.DOTALL)


def test_settings_in_turns() -> None:
    rows = table(PERFORMANCE, "setting", "conversations", "answers ÷ stock's", "lowest turn")
    assert len(rows) == 6
    for setting, conversations, answers, lowest, kl, density in rows:
        name = f"SmolLM2, {conversations} conversations of 12 turns"
        name += ": " if setting.startswith("the default") else f", {setting}: "
        assert_shows_with_error(answers, f"{name}answers")
        assert_shows_with_error(kl, f"{name}KL to stock")
        assert shows(lowest, VALUES[f"{name}lowest turn's answers"]), name
        assert shows(density, VALUES[f"{name}density of sparse rows"]), name


def test_turns() -> None:
    rows = table(PERFORMANCE, "model", "answers ÷ stock's", "about old facts")
    assert len(rows) == 2
    for model, answers, old, lowest, kl, top1 in rows:
        name = f"{model}, eight conversations of 12 turns"
        assert shows(lowest, VALUES[f"{name}: lowest turn's answers"])
        for cell, figure in (
            (answers, "answers"), (old, "answers about old facts"), (kl, "KL to stock"),
            (top1, "top-1 agreement with stock"),
        ):  # fmt: skip
            assert_shows_with_error(cell, f"{name}: {figure}")


def test_two_gpus() -> None:
    rows = table(PERFORMANCE, "parallelism", "tokens")
    assert len(rows) == 4
    for gpus, tokens, stock, default, speed_up, share in rows:
        name = "code-lm, widened to 8B, {}, " + f"{gpus}, {tokens} tokens: TTFT"
        default_name = name.format("default with streaming heads")
        assert shows(stock, VALUES[f"{name.format('stock')}, 3 requests"]), name
        assert shows(default, VALUES[f"{default_name}, 3 requests"]), name
        assert shows(speed_up, VALUES[f"{default_name}, speed-up over stock, 3 requests"]), name
        assert shows(share, VALUES[f"{default_name}, speed-up over stock ÷ one H100's, 3 requests"]), name


DEVICES = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3", "others, until measured": "another device"}


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("row", table("docs/choosing_a_setting.md", "GPU, with the default method"), ids=" ".join)
def test_dense_prompts(row: list[str]) -> None:
    """The shortest prompt, without a cached prefix and in one row, that runs sparse with the default method."""
    device, num_heads, head_dim, weights, dense_below, dense_positions = row
    size = LayerSize(1, 1) if head_dim == "any" else LayerSize(number(num_heads) * number(head_dim), number(weights))
    method = METHODS[PRESETS["default"]].parameters()
    lengths = resolve_lengths(AUTO, AUTO, [method], load_crossover(), Place(DEVICES[device], "hopper", size))
    assert lengths.min_tokens == number(dense_positions)
    shortest = next(length for length in range(1, 200_000) if lengths.dense_reason(length, length) is None)
    assert shortest == number(dense_below)


def test_crossovers_by_engine() -> None:
    default = METHODS[PRESETS["default"]].parameters()
    measured = {
        (entry.num_heads, entry.num_kv_heads, entry.head_dim, entry.engine): entry.min_tokens
        for entry in load_crossover().entries
        if (entry.device, entry.parameters) == (DEVICES["H100"], default)
    }
    for model, *heads, hopper, flash, portable in table(PERFORMANCE, "model", "heads", "kv heads"):
        for engine, cell in (("hopper", hopper), ("flash", flash), ("portable", portable)):
            assert measured[(*map(number, heads), engine)] == number(cell), (model, engine)


def test_ttft_of_latent_attention() -> None:
    rows = table("docs/research/mla.md", "tokens", "stock: TTFT, s")
    assert len(rows) == 3
    for tokens, stock, *cells in rows:
        name = f"deepseek-r1's shape, 16 heads, {tokens} tokens"
        assert shows(stock, VALUES[f"{name}: stock beside the others, TTFT of 4 layers"]), name
        for method, (speed_up, share) in zip(("a_shape", "top_p"), (cells[:2], cells[2:]), strict=True):
            assert shows(speed_up, VALUES[f"{name}: {method}, TTFT speed-up of 4 layers"]), (name, method)
            assert shows(share, VALUES[f"{name}: {method}, kept share of sparse rows' pairs"]), (name, method)
            assert VALUES[f"{name}: {method}, exact requests with stock's tokens"] == 1, (name, method)


def test_hybrids() -> None:
    models = {"Qwen3-Next": "qwen3-next", "Nemotron-H": "nemotron-h"}
    rows = table(PERFORMANCE, "model", "setting", "density", "TTFT, s")
    assert len(rows) == 6
    for model, setting, density, time, speed_up in rows:
        name = f"{models[model]}'s shape, 65,536 tokens: {setting.strip('`')}"
        assert shows(time, VALUES[f"{name}, TTFT"]), name
        assert not speed_up or shows(speed_up, VALUES[f"{name}, TTFT speed-up"]), name
        assert not density or shows(density, VALUES[f"{name}, density"]), name


def test_fp8_caches() -> None:
    rows = table("docs/fp8.md", "method", "speed-up over FlashAttention-3 in fp8")
    assert len(rows) == 4
    for method, speed_up, of_bf16, error in rows:
        name = f"fp8 cache, {method.replace('`', '').replace(', tau ', ' tau=')}, structured, after 122,880"
        assert shows(speed_up, VALUES[f"{name}: times faster than FlashAttention-3 in fp8"]), name
        assert shows(of_bf16, VALUES[f"{name}: times faster ÷ bf16's"]), name
        assert shows(error, VALUES[f"{name}: error by fp8 ÷ stock's"]), name


def test_tasks_inside_the_prompt() -> None:
    for model, task, *cells in table(QUALITY, "model", "task"):
        for tokens, stock, ours in zip(LENGTHS, cells[::2], cells[1::2], strict=True):
            name = f"{model}, {task.strip('`')} inside the prompt, {tokens} tokens"
            number, total = stock.split(" of ")
            assert (Decimal(number), f"of {total}") == (VALUES[key := f"{name}: stock's right answers"], UNITS[key])
            assert Decimal(ours) == VALUES[f"{name}: our right answers"], name

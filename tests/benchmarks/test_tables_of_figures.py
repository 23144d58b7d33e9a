# SPDX-License-Identifier: Apache-2.0
"""Tables of README.md and docs/ show the figures of docs/results, and the lengths of the bundled crossover table."""

import itertools
import re
from collections import Counter
from decimal import Decimal
from fnmatch import filter as matching

import pytest

from benchmarks.figures import read_figures
from tests.helpers.external_tools import ROOT
from vllm_sparse_backend.config.crossover_table import AUTO, LayerSize, Place, load_crossover, resolve_lengths
from vllm_sparse_backend.config.method_parameters import PRESETS
from vllm_sparse_kernels.methods import METHODS

FILES = sorted((ROOT / "docs/results").glob("*.jsonl"))
FIGURES = [figure for path in FILES for figure in read_figures(path)]
VALUES = {figure.name.replace("`", ""): Decimal(str(figure.value)) for figure in FIGURES}
UNITS = {figure.name.replace("`", ""): figure.unit for figure in FIGURES}
PERFORMANCE, QUALITY = "docs/research/performance.md", "docs/research/quality.md"

EXPERTS = "16 layers of experts of Qwen3-30B-A3B's shape"
WORDS = {
    "8B": "widened 8B", "8B, bf16": "widened 8B, bf16", "8B, fp8 weights": "widened 8B, fp8 weights",
    "none": "without streaming heads", "after 8,192": "streaming heads after 8,192", "after 16,384": "default",
    "0": "tokens", "102,400": "new after 102,400 cached", "sale, tau 0.03": "sale tau=0.03",
    "experts": EXPERTS, "Qwen3-Next": "qwen3-next", "Nemotron-H": "nemotron-h",
    "vertical_slash-answers (MInference)": "MInference", "anchor_attention-answers": "AnchorAttention",
    "sparge_attn-answers": "SpargeAttn", "flex_vertical_slash-answers": "FlexPrefill",
}  # fmt: skip
"""Words of tables for which figures have others."""

STOCK_TO_OURS = "TTFT, stock's ÷ ours"
CACHED = ("8,000", "16,000", "30,000", "60,000", "100,000")
SHARES = ("1", "0.5", "0.2", "0.08", "0.03")
TABLES: list[tuple[str, tuple[str, ...], int, list[str | None]]] = [
    ("README.md", ("prompt, tokens", "stock's TTFT, s"), 5, [
        "widened 8B, {0} tokens: stock's TTFT", None,
        *(f"{model}, {{0}} tokens: {STOCK_TO_OURS}" for model in ("widened 8B", "widened 8B, fp8 weights", EXPERTS)),
    ]),
    ("README.md", ("model", "prompt, tokens", "questions"), 7, [
        None, None, *(f"{{0}}, the default, {{1}} tokens: {figure}" for figure in ("answers", "perplexity", "density")),
    ]),
    ("docs/streaming_heads.md", ("prompt, tokens",), 3, [
        "without streaming heads, widened, TTFT, {0} tokens", "default, widened, TTFT, {0} tokens",
    ]),
    ("docs/profiles.md", ("prompt tokens", "default"), 3, [
        "profile best, widened, the default in the same run, TTFT, {0} tokens",
        "profile best, widened, made with --tokens 32768 --count 1, TTFT, {0} tokens",
    ]),
    ("docs/research/papers.md", ("setting", "answers, 16,384"), 9, [
        "papers on SmolLM2, {0}, 16,384 tokens: answers", "papers on SmolLM2, {0}, 65,536 tokens: answers",
        "papers on SmolLM2, {0}, 65,536 tokens: perplexity", "papers on SmolLM2, {0}, 65,536 tokens: density",
        "papers on SmolLM2, {0}, after 57,344: times faster than FlashAttention-3",
        "papers on SmolLM2, {0}: time of calibration*",
    ]),
    (QUALITY, ("profile", "lowest answers"), 4, [
        "shipped setting of {0} (*: right answers ÷ stock's, least of all lengths",
        "shipped setting of {0} (*: perplexity ÷ stock's, most of all lengths",
        "shipped setting of {0} (*: density, 130,000 tokens",
    ]),
    (QUALITY, ("setting", "answers, 32,000 tokens"), 12, [
        "{0}, 32,000 tokens, code-lm-29m-128k: right answers ÷ stock's",
        "{0}, 130,000 tokens, code-lm-29m-128k: right answers ÷ stock's",
        "{0}, 130,000 tokens, code-lm-29m-128k: perplexity ÷ stock's",
        "whole method, {0}, code-lm-29m-128k, after 122,880: density",
        "whole method, {0}, code-lm-29m-128k, after 122,880: times faster",
    ]),
    (QUALITY, ("setting, 65,536 tokens",), 8, [
        "code-lm, 65,536 tokens, {0}: answers", None, "code-lm, 65,536 tokens, {0}: perplexity",
        "code-lm, 65,536 tokens, {0}: density", f"widened 8B, 65,536 tokens, {{0}}: {STOCK_TO_OURS}",
    ]),
    (PERFORMANCE, ("method", "selection"), 8, [
        "selection, {0}, code-lm-29m-128k, chunk after 122,880: share of FlashAttention-3",
        *(f"whole method, {{0}}, code-lm-29m-128k, after 122,880: {figure}"
          for figure in ("times faster", "density", "output error")),
    ]),
    (PERFORMANCE, ("tokens before the chunk", "selection ÷ dense attention"), 2, [
        "selection, top_p, after {0}, structured data: share of FlashAttention-3 of the same run",
    ]),
    (PERFORMANCE, ("tokens before the chunk", "keys per block", *SHARES), 4, [
        None, *(f"attend, *after {{0}}, blocks of {{1}}, density {share}: efficiency" for share in SHARES),
    ]),
    (PERFORMANCE, ("model", "figure", "stock's, s"), 12, [
        None, "{0}, eight agents to 80,000 tokens: stock's {1}",
        "{0}, eight agents to 80,000 tokens: {1}, stock's ÷ ours",
    ]),
    (PERFORMANCE, ("share", "requests", "figure"), 9, [
        None, None, None, "widened 8B, open loop at {0} of stock's capacity, {1} requests: stock's {2} of TTFT",
        "widened 8B, open loop at {0} of stock's capacity, {1} requests: {2} of TTFT, stock's ÷ ours",
    ]),
    (PERFORMANCE, ("model", "answers ÷ stock's"), 2, [
        f"{{0}}, eight conversations of 12 turns: {figure}"
        for figure in ("answers", "answers about old facts", "lowest turn's answers", "KL to stock",
                       "top-1 agreement with stock")
    ]),
    (PERFORMANCE, ("parallelism", "tokens"), 4, [
        None, "code-lm, widened to 8B, stock, {0}, {1} tokens: TTFT, 3 requests",
        *(f"code-lm, widened to 8B, default with streaming heads, {{0}}, {{1}} tokens: TTFT{figure}, 3 requests"
          for figure in ("", ", speed-up over stock", ", speed-up over stock ÷ one H100's")),
    ]),
    ("docs/research/mla.md", ("tokens", "stock: TTFT, s"), 3, [
        "deepseek-r1's shape, 16 heads, {0} tokens: stock beside the others, TTFT of 4 layers",
        *(f"deepseek-r1's shape, 16 heads, {{0}} tokens: {method}, {figure}" for method in ("a_shape", "top_p")
          for figure in ("TTFT speed-up of 4 layers", "kept share of sparse rows' pairs")),
    ]),
    (PERFORMANCE, ("model", "setting", "density"), 6, [
        None, *(f"{{0}}'s shape, 65,536 tokens: {{1}}, {figure}" for figure in ("density", "TTFT", "TTFT speed-up")),
    ]),
    ("docs/fp8.md", ("method", "speed-up over FlashAttention-3 in fp8"), 4, [
        f"fp8 cache, {{0}}, structured, after 122,880: {figure}"
        for figure in ("times faster than FlashAttention-3 in fp8", "times faster ÷ bf16's", "error by fp8 ÷ stock's")
    ]),
    ("docs/compared_with.md", ("model", "rule"), 11, [
        None, *(f"{{0}}, emulated rule {{1}}, {tokens} tokens: {figure}" for tokens in ("16,384", "32,768")
        for figure in ("right answers", "perplexity",
                       "perplexity, standard error over stretches of 4,096 tokens", "density")),
    ]),
    (QUALITY, ("model", "streaming heads", "tokens"), 9, [
        None, None, *(f"{{0}}, {{1}}, {{2}} tokens: {figure}"
                      for figure in ("answers", "answers, standard error", "perplexity", "density")),
    ]),
    (QUALITY, ("model", "task"), 4, [
        None, *(f"{{0}}, {{1}} inside the prompt, {tokens} tokens: {whose} right answers"
                for tokens in ("16,384", "32,768", "65,536") for whose in ("stock's", "our")),
    ]),
    (PERFORMANCE, ("new tokens", "cached tokens"), 9, [
        None, "vllm serve, a_shape, {0} {1}: TTFT", "vllm serve, a_shape, {0} {1}: TTFT, speed-up",
    ]),
]  # fmt: skip
"""Page, first columns, number of rows, and the figure of each column after the first: ``{0}`` is a row's first cell."""


def table(page: str, *columns: str, place: int = 0) -> list[list[str]]:
    """Return the header and the rows of a table: of those whose headers begin with these columns, the one at
    ``place``."""
    lines = [
        [cell.strip() for cell in re.sub(r"[`*]", "", line).strip()[1:-1].split("|")] if line.startswith("|") else []
        for line in (ROOT / page).read_text().splitlines()
    ]
    start = [i for i, cells in enumerate(lines) if cells[: len(columns)] == list(columns)][place]
    return [lines[start], *itertools.takewhile(bool, lines[start + 2 :])]


def assert_rounded(cell: str, value: Decimal, name: str) -> None:
    """Check that a cell is this value, rounded to the digits of the cell."""
    shown = Decimal(re.sub(r"[\s,]", "", cell).replace("−", "-"))
    assert abs(shown - value) <= Decimal("0.5").scaleb(int(shown.as_tuple().exponent)), name


def assert_shows(cell: str, name: str, is_change: bool = False) -> None:
    """Check a cell such as 1.2, 1.2 ± 0.1 and 12 of 100. ``is_change``: in percent, of a ratio to stock's."""
    names = matching(VALUES, name) if "*" in name else [name]
    if not cell:
        assert not {*names} & {*VALUES}, name
        return
    (name,) = names
    if " of " in cell:
        number, total = cell.split(" of ")
        assert (Decimal(number), f"of {total}") == (VALUES[name], UNITS[name]), name
        return
    shown, _, error = cell.partition(" ± ")
    times = 100 if "perplexity, standard error" in name else 1
    assert_rounded(shown, (VALUES[name] - 1) * 100 if is_change else times * VALUES[name], name)
    if error and f"{name}, standard error" in VALUES:
        assert_shows(error, f"{name}, standard error")
    elif error:
        assert_rounded(error, Decimal(UNITS[name].split("± ")[1]), name)


@pytest.mark.parametrize(("page", "columns", "num_rows", "names"), TABLES, ids=lambda value: str(value)[:50])
def test_a_table_shows_its_figures(page: str, columns: tuple[str, ...], num_rows: int, names: list[str | None]) -> None:
    header, *rows = table(page, *columns)
    assert len(rows) == num_rows
    for row in rows:
        words = [WORDS.get(cell, cell) for cell in row]
        for title, cell, name in zip(header[1:], row[1:], names, strict=True):
            if name is not None:
                assert_shows(cell, name.format(*words), is_change="%" in title)


def test_each_figure_is_stored_once_and_whole() -> None:
    assert len(VALUES) == len(FIGURES)
    assert [figure.name for figure in FIGURES if not (figure.device and figure.command and figure.date)] == []


def test_the_page_counts_missed_targets() -> None:
    missed = Counter()
    for path in FILES:
        for figure in read_figures(path):
            if figure.bar is not None and figure.value is not None:
                is_missed = figure.value < figure.bar if figure.better == "higher" else figure.value > figure.bar
                missed[path.name] += is_missed
    counts = ", ".join(f"{count} in `{name}`" for name, count in missed.items() if count)
    text = " ".join((ROOT / "docs/results/README.md").read_text().split())
    assert f"Some figures miss their targets: {counts}." in text


def test_our_times_are_stocks_by_the_speed_up() -> None:
    for tokens, _, ours, *_ in table("README.md", "prompt, tokens", "stock's TTFT, s")[1:]:
        name = f"widened 8B, {tokens} tokens: "
        assert_rounded(ours, VALUES[f"{name}stock's TTFT"] / VALUES[name + STOCK_TO_OURS], tokens)


def test_numbers_of_questions() -> None:
    for setting, _, questions, *_ in table(QUALITY, "setting, 65,536 tokens")[1:]:
        assert UNITS[f"code-lm, 65,536 tokens, {setting}: answers"] == f"÷ stock's, of {questions} questions", setting


@pytest.mark.parametrize(("place", "model"), enumerate(("code-lm widened to an 8B's shape", EXPERTS)))
def test_after_a_cached_prefix(place: int, model: str) -> None:
    _, *rows = table(PERFORMANCE, "new tokens", *(f"after {tokens}" for tokens in CACHED), place=place)
    assert len(rows) == 6
    for new, *cells in rows:
        for tokens, cell in zip(CACHED, cells, strict=True):
            assert_shows(cell, f"{model}, {new} tokens after {tokens}: {STOCK_TO_OURS}")


def test_capacity() -> None:
    capacities = [VALUES[f"widened 8B, open loop: {figure}"] for figure in (
        "stock's capacity", "our capacity", "capacity, ours ÷ stock's"
    )]  # fmt: skip
    says = "Stock's is {:.2f} requests per second.*Ours is at least {:.2f}.*at least {:.2f} times stock's"
    assert re.search(says.format(*capacities), (ROOT / PERFORMANCE).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("says", "names"),
    [
        (
            "TTFT with default settings is {:.2f} times better than stock's at\n  32,768 tokens and {:.2f} times",
            [f"widened 8B, {tokens} tokens: {STOCK_TO_OURS}" for tokens in ("32,768", "131,000")],
        ),
        (
            "{:.2f} at a share of 0.08, and {:.2f} at 0.03",
            [
                f"attend in pages of 16, chunk after 122,880, blocks of 32, density {density}: efficiency"
                for density in ("0.08", "0.03")
            ],
        ),
        (
            "another run of 15 requests gave {:.2f} ± 0.05 with the 8B and {:.2f} ± 0.06 with experts",
            [
                f"{model}, 2,000 tokens after 60,000, another run: {STOCK_TO_OURS}"
                for model in ("code-lm widened to an 8B's shape", EXPERTS)
            ],
        ),
    ],
)
def test_sentences_have_the_figures(says: str, names: list[str]) -> None:
    assert says.format(*(VALUES[name] for name in names)) in (ROOT / PERFORMANCE).read_text()


def test_settings_in_turns() -> None:
    _, *rows = table(PERFORMANCE, "setting", "conversations", "answers ÷ stock's", "lowest turn")
    assert len(rows) == 5
    for setting, conversations, *cells in rows:
        name = f"SmolLM2, {conversations} conversations of 12 turns, {setting}"
        figures = "answers", "lowest turn's answers", "KL to stock", "density of sparse rows"
        for cell, figure in zip(cells, figures, strict=True):
            assert_shows(cell, f"{name}: {figure}")


DEVICES = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3", "others, until measured": "another device"}


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("row", table("docs/choosing_a_setting.md", "GPU, with the default method")[1:], ids=" ".join)
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
    for model, *heads, hopper, flash, portable in table(PERFORMANCE, "model", "heads", "kv heads")[1:]:
        for engine, cell in (("hopper", hopper), ("flash", flash), ("portable", portable)):
            assert measured[(*map(number, heads), engine)] == number(cell), (model, engine)

# SPDX-License-Identifier: Apache-2.0
"""Tables of README.md and docs/ show the figures of docs/results, and the lengths of the bundled crossover table."""

import itertools
import re
from decimal import Decimal

import pytest

from benchmarks.figures import read_figures
from tests.helpers.external_tools import ROOT
from vllm_sparse_backend.config.crossover_table import AUTO, load_crossover, resolve_thresholds
from vllm_sparse_backend.config.method_parameters import PRESETS
from vllm_sparse_kernels.methods import METHODS

HALF_A_UNIT = Decimal("0.5")
MODELS = ("SmolLM2", "code-lm")
LENGTHS = ("16,384", "32,768", "65,536")


def values_of(name: str) -> dict[str, Decimal]:
    """Return the value of each row of a file in docs/results, by the row's name."""
    return {figure.name: Decimal(str(figure.value)) for figure in read_figures(ROOT / "docs/results" / name)}


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


def test_a_cell_shows_rounded_values_only() -> None:
    assert shows("**2.41**", Decimal("2.414"))
    assert shows("1.01", Decimal("1.005"))
    assert shows("− 0.6 %", Decimal("-0.63"))
    assert not shows("2.41", Decimal("2.416"))
    assert not shows("0.6", Decimal("-0.6"))


def test_the_times_of_the_readme() -> None:
    values = values_of("floor.jsonl")
    rows = table("README.md", "prompt, tokens", "TTFT of stock vLLM, s")
    assert len(rows) == 5
    for tokens, stock, ours, speed_up in rows:
        time, ratio = (values[f"{who}, widened, TTFT, {tokens} tokens"] for who in ("stock", "default"))
        assert shows(stock, time), tokens
        assert shows(ours, time / ratio), tokens
        assert shows(speed_up, ratio), tokens


def test_the_accuracy_of_the_readme() -> None:
    values = values_of("floor.jsonl")
    rows = table("README.md", "model", "prompt, tokens", "questions", "right answers ÷ stock's")
    longest = ("code-lm", "122,880")  # the accuracy next to the largest speed-up
    assert [tuple(row[:2]) for row in rows] == [*((model, n) for model in MODELS for n in LENGTHS), longest]
    settings = {"SmolLM2": "default", "code-lm": "streaming heads after 8,192"}
    for model, tokens, _, answers, perplexity, density in rows:
        name = f"{model}, {settings[model]}, {tokens} tokens"
        for cell, quantity, change in ((answers, "answers", lambda x: x), (perplexity, "perplexity", percent)):
            value, error = cell.split("±")
            assert shows(value, change(values[f"{name}: {quantity}"])), name
            assert shows(
                error, values[f"{name}: {quantity}, standard error"] * (100 if quantity == "perplexity" else 1)
            ), name
        assert shows(density, values[f"{name}: density"]), name


def test_the_accuracy_of_half_of_the_queries() -> None:
    values = values_of("floor.jsonl")
    rows = table("docs/quality.md", "model", "tokens", "answers ÷ stock's")
    assert [tuple(row[:2]) for row in rows] == [
        (model, length) for model in MODELS for length in (*LENGTHS, "all three")
    ]
    for model, tokens, answers, error, perplexity, *density in rows:
        name = f"{model}, queries half, {tokens} " + ("lengths" if tokens == "all three" else "tokens")
        assert shows(answers, values[f"{name}: answers"]), name
        assert shows(error, values[f"{name}: answers, standard error"]), name
        assert shows(perplexity, percent(values[f"{name}: perplexity"])), name
        assert all(shows(cell, values[f"{name}: density"]) for cell in density if cell), name


def test_streaming_heads() -> None:
    values = values_of("floor.jsonl")
    rows = table("docs/streaming_heads.md", "prompt, tokens", "without streaming heads")
    assert len(rows) == 3
    for tokens, without, default in rows:
        assert shows(without, values[f"without streaming heads, widened, TTFT, {tokens} tokens"]), tokens
        assert shows(default, values[f"default, widened, TTFT, {tokens} tokens"]), tokens
    rows = table("docs/quality.md", "model", "streaming heads", "tokens")
    assert len(rows) == 16
    for model, setting, tokens, answers, error, perplexity, density in rows:
        streaming = "without streaming heads" if setting == "none" else f"streaming heads {setting}"
        name = f"{model}, " + ("default" if setting == "after 16,384" else streaming) + f", {tokens} tokens"
        assert shows(answers, values[f"{name}: answers"]), name
        assert shows(error, values[f"{name}: answers, standard error"]), name
        assert shows(perplexity, percent(values[f"{name}: perplexity"])), name
        assert shows(density, values[f"{name}: density"]), name


def test_settings_of_top_p_with_streaming_heads() -> None:
    values = values_of("floor.jsonl")
    rows = table("docs/quality.md", "setting, with streaming heads", "answers ÷ stock's")
    assert len(rows) == 5
    for setting, *cells in rows:
        name = "SmolLM2, " + ("default" if setting == "default" else re.sub(r"[`{}\":]", "", setting))
        name += "" if setting in ("default", "`engine: portable`") else ", streaming heads"
        name = name.replace("SmolLM2, engine portable", "SmolLM2, default, engine portable")
        for lengths, of_lengths in (("all three lengths", cells[:3]), ("both lengths, other prompts", cells[3:])):
            answers, error, perplexity = of_lengths
            assert shows(answers, values[f"{name}, {lengths}: answers"]), name
            assert shows(error, values[f"{name}, {lengths}: answers, standard error"]), name
            assert shows(perplexity, percent(values[f"{name}, {lengths}: perplexity"])), name


def test_speed_of_the_default_and_of_profiles() -> None:
    values = values_of("floor.jsonl")
    profile = "profile best, widened, made with --tokens 32768 --count 1"
    for tokens, default, best, _ in table("docs/profiles.md", "prompt tokens", "default"):
        assert shows(default, values[f"default, widened, TTFT, {tokens} tokens"]), tokens
        assert shows(best, values[f"{profile}, TTFT, {tokens} tokens"]), tokens


def paper_setting(cell: str) -> str:
    """Return a setting as docs/results/papers.jsonl names it."""
    name = cell.replace("`", "").replace("queries: all", "queries all")
    return "papers on SmolLM2, " + name.replace("both options", "dense_tail and first_group")


def test_the_papers_answers_and_perplexity() -> None:
    values = values_of("papers.jsonl")
    answers = table("docs/quality.md", "setting", "16,384", "±")
    perplexity = table("docs/quality.md", "setting", "16,384, %", "±")
    assert [row[0] for row in answers] == [row[0] for row in perplexity]
    for setting, *cells in answers:
        for tokens, share, error in zip(LENGTHS, cells[::2], cells[1::2], strict=True):
            name = f"{paper_setting(setting)}, {tokens} tokens: answers"
            assert shows(share, values[name]), name
            assert shows(error, values[f"{name}, standard error"]), name
    for setting, *cells in perplexity:
        for tokens, change, error in zip(LENGTHS, cells[::2], cells[1::2], strict=True):
            name = f"{paper_setting(setting)}, {tokens} tokens: perplexity"
            assert shows(change, percent(values[name])), name
            assert shows(error, values[f"{name}, standard error"] * 100), name


def test_the_papers_densities_and_times() -> None:
    values = values_of("papers.jsonl")
    for setting, *cells in table("docs/quality.md", "setting", "density, 16,384"):
        name = paper_setting(setting)
        names = [f"{name}, {tokens} tokens: density" for tokens in LENGTHS]
        names += [f"{name}, after {tokens}: times faster than FlashAttention-3" for tokens in ("24,576", "57,344")]
        names += [other for other in values if other.startswith(f"{name}: time of calibration")] or [""]
        for cell, name in zip(cells, names, strict=True):
            assert shows(cell, values[name]) if cell else name not in values, name


def setting(cell: str) -> str:
    """Return a setting as the files of code-lm's figures name it."""
    return cell.replace("`", "") + ", code-lm-29m-128k"


@pytest.mark.parametrize(("place", "quantity"), [(0, "right answers ÷ stock's"), (1, "perplexity ÷ stock's")])
def test_answers_and_perplexity_by_setting(place: int, quantity: str) -> None:
    values = values_of("quality.jsonl")
    lengths = ("12,000", "32,000", "65,000", "130,000")
    for name, *cells in table("docs/quality.md", "setting", *lengths, place=place):
        for tokens, cell in zip(lengths, cells, strict=True):
            row = f"{name.replace('`', '')}, {tokens} tokens, code-lm-29m-128k: {quantity}"
            assert shows(cell, values[row]), row


def test_speed_and_density_by_setting() -> None:
    values = values_of("performance.jsonl")
    columns = [
        f"after {tokens}: {quantity}" for quantity in ("times faster", "density") for tokens in ("24,576", "122,880")
    ]
    for name, *cells in table("docs/quality.md", "setting", "speed-up after 24,576"):
        for column, cell in zip(columns, cells, strict=True):
            row = f"whole method, {setting(name)}, {column}"
            assert shows(cell, values[row]), row


@pytest.mark.parametrize(("place", "tokens"), [(0, "24,576"), (1, "122,880")])
def test_methods(place: int, tokens: str) -> None:
    values = values_of("performance.jsonl")
    for name, selection, *cells in table("docs/performance.md", "method", "selection", place=place):
        row = f"selection, {setting(name)}, chunk after {tokens}: share of FlashAttention-3"
        assert shows(selection, values[row]), row
        for quantity, cell in zip(("times faster", "density", "output error"), cells, strict=True):
            row = f"whole method, {setting(name)}, after {tokens}: {quantity}"
            assert shows(cell, values[row]), row


def test_efficiency_of_attention() -> None:
    values = values_of("performance.jsonl")
    shares = ("1", "0.5", "0.2", "0.08", "0.03")
    for tokens, width, *cells in table("docs/performance.md", "tokens before the chunk", "keys per block", *shares):
        for share, cell in zip(shares, cells, strict=True):
            (row,) = [
                name
                for name in values
                if re.fullmatch(f"attend, .*after {tokens}, blocks of {width}, density {share}: efficiency", name)
            ]
            assert shows(cell, values[row]), row


def test_two_gpus() -> None:
    values = values_of("two_gpus.jsonl")
    rows = table("docs/performance.md", "GPUs", "setting", "tokens", "TTFT, s")
    assert len(rows) == 10
    for gpus, setting, tokens, time, speed_up, tpot in rows:
        name = f"code-lm, widened to 8B, {setting.strip('`')}, TP {gpus}, {tokens} tokens"
        assert shows(time, values[f"{name}: TTFT, 8 requests"]), name
        assert shows(tpot, values[f"{name}: TPOT"]), name
        assert not speed_up or shows(speed_up, values[f"{name}: TTFT, speed-up over stock, 8 requests"]), name


DEVICES = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3", "others, until measured": "another device"}
KV_HEADS = {32: 8, 8: 2, 9: 3}
"""kv heads by query heads, of the shapes in the bundled table."""


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("row", table("docs/choosing_a_setting.md", "GPU, with the default method"), ids=" ".join)
def test_dense_prompts(row: list[str]) -> None:
    """The shortest prompt, without a cached prefix and in one row, that runs sparse with the default method."""
    device, heads, head_dim, dense_below, dense_positions = row
    num_heads = 32 if heads == "any" else number(heads)
    shape = (num_heads, KV_HEADS[num_heads], 128 if head_dim == "any" else number(head_dim))
    crossovers = load_crossover()
    method = METHODS[PRESETS["default"][0]].parameters()
    thresholds = resolve_thresholds(AUTO, AUTO, [method], crossovers, DEVICES[device], "hopper", shape)
    assert thresholds.min_tokens == number(dense_positions)
    shortest = next(length for length in range(1, 200_000) if thresholds.dense_reason(length, length) is None)
    assert shortest == number(dense_below)


def test_crossovers_by_engine() -> None:
    crossovers = load_crossover()
    method = METHODS[PRESETS["default"][0]].parameters()
    for model, heads, kv_heads, head_dim, *cells in table("docs/performance.md", "model", "heads", "kv heads"):
        shape = (number(heads), number(kv_heads), number(head_dim))
        for engine, cell in zip(("hopper", "flash", "portable"), cells, strict=True):
            (entry,) = crossovers.find(DEVICES["H100"], engine, method, shape)
            assert entry.shape == shape
            assert entry.min_tokens == number(cell), (model, engine)


MLA_SHAPES = ("deepseek-r1's shape, 16 heads", "kimi-k2's shape, 8 heads")
MLA_METHODS = {
    "dense, with these kernels": "dense",
    "`a_shape`": "A-shape",
    "`top_p`, 192 channels": "top_p 0.9",
    "`top_p`, 192 channels (`all`)": "top_p 0.9",
    "`top_p`, 128 channels": "top_p 0.9, 128 channels",
    "`top_p`, 128 channels (`half`)": "top_p 0.9, 128 channels",
    "`top_p`, 64 channels": "top_p 0.9, 64 channels",
    "`top_p`, 64 channels, `most_share` 0.25": "top_p 0.9, 64 channels, at most a quarter",
}
"""Names of methods in docs/results/cards.jsonl, by their names in docs/mla.md."""


def test_times_of_latent_attention() -> None:
    """The times of K2 with earlier kernels have no rows: they were measured before the present kernels' times."""
    values = values_of("cards.jsonl")
    without_row = []
    for name, *cells in table("docs/mla.md", "method", "R1", "R1, selection"):
        is_earlier = name.startswith("*earlier*: ")
        kernels = "earlier MLA kernels" if is_earlier else "MLA kernels"
        method = MLA_METHODS[name.removeprefix("*earlier*: ")]
        for shape, of_shape in zip(MLA_SHAPES, (cells[:3], cells[3:]), strict=True):
            row = f"{kernels}, {shape}, 8,192 tokens after 65,536, {method}, "
            quantities = ("step: attend's time to stock's", "step: selection's time to stock's", "chunk: density")
            for quantity, cell in zip(quantities, of_shape, strict=True):
                if cell in ("", "–"):
                    continue
                if row + quantity in values:
                    assert shows(cell, values[row + quantity]), row + quantity
                else:
                    without_row.append((is_earlier, shape))
    assert without_row == [(True, MLA_SHAPES[1])] * 6


def test_ttft_of_latent_attention() -> None:
    values = values_of("cards.jsonl")
    rows = table("docs/mla.md", "tokens", "stock: TTFT, s")
    assert len(rows) == 3
    for tokens, stock, *cells in rows:
        name = f"{MLA_SHAPES[0]}, {tokens} tokens"
        assert shows(stock, values[f"{name}: stock beside the others, TTFT of 4 layers"]), name
        for method, (speed_up, share) in zip(("a_shape", "top_p"), (cells[:2], cells[2:]), strict=True):
            assert shows(speed_up, values[f"{name}: {method}, TTFT speed-up of 4 layers"]), (name, method)
            assert shows(share, values[f"{name}: {method}, kept share of sparse rows' pairs"]), (name, method)
            assert values[f"{name}: {method}, exact requests with stock's tokens"] == 1, (name, method)


HYBRID_SETTINGS = {"exact requests": "exact", "`a_shape`": "a_shape", "`a_shape`, as sparse as possible": "least"}
"""Names of settings in docs/results/cards.jsonl, by their names in docs/performance.md."""


def test_hybrids() -> None:
    values = values_of("cards.jsonl")
    models = {"Qwen3-Next": "qwen3-next", "Nemotron-H": "nemotron-h"}
    rows = table("docs/performance.md", "model", "setting", "density", "TTFT, s")
    assert len(rows) == 10
    for model, setting, density, time, speed_up in rows:
        name = f"{models[model]}'s shape, 65,536 tokens: {HYBRID_SETTINGS.get(setting, setting)}"
        assert shows(time, values[f"{name}, TTFT"]), name
        assert not speed_up or shows(speed_up, values[f"{name}, TTFT speed-up"]), name
        assert density in ("", "1") or shows(density, values[f"{name}, density"]), name

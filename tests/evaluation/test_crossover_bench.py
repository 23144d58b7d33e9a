# SPDX-License-Identifier: Apache-2.0
"""`bench crossover` finds the lengths from which measured times pay."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.crossover_cases import entry, written
from tests.helpers.folders import LLAMA_8B, model_folder
from vllm_sparse_backend.config.crossover_table import NEVER, Entry, Lengths, load_crossover
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.evaluation import crossover_bench
from vllm_sparse_backend.evaluation.client import Endpoint, TimedAnswer
from vllm_sparse_backend.evaluation.compared_servers import Contestant, Settings
from vllm_sparse_backend.evaluation.crossover_bench import (
    Cell,
    Crossover,
    fit_lengths,
    lengths_to_measure,
    replace_entry,
)
from vllm_sparse_backend.evaluation.report import BenchError
from vllm_sparse_backend.progress import Progress


def cells(saved_s: Callable[[Cell], float]) -> list[Cell]:
    """Return cells in which sparse prefill saves a time, with a noise of 1 %."""
    noise = random.Random(0)
    measured = []
    for length in lengths_to_measure(131_072):
        cell = Cell(length.new_tokens, length.cached_tokens, 0.0, 0.0)
        dense_s = 0.02 + 2e-5 * cell.new_tokens + 3e-10 * cell.pairs
        times = (dense_s * noise.gauss(1, 0.01), (dense_s - saved_s(cell)) * noise.gauss(1, 0.01))
        measured.append(Cell(cell.new_tokens, cell.cached_tokens, *times))
    return measured


@pytest.mark.parametrize("lengths", [Lengths(2048, 1000, 36_000_000, 4000), Lengths(2048, 2000, 160_000_000, 12_000)])
def test_the_fit_finds_the_lengths_by_which_times_were_saved(lengths: Lengths) -> None:
    def saved_s(cell: Cell) -> float:
        return 2e-10 * (lengths.pairs(cell.sparse_tokens, cell.num_tokens) - lengths.min_pairs)

    fitted = fit_lengths(cells(saved_s))
    assert fitted.min_pairs == pytest.approx(lengths.min_pairs, rel=0.2)
    assert fitted.pairs_per_token == pytest.approx(lengths.pairs_per_token, rel=0.4)
    assert fitted.min_tokens == lengths.min_tokens


@dataclass(frozen=True)
class SimulatedServer(Endpoint):
    """A server with a prefix cache for each level, whose sparse requests save time from given lengths on."""

    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def metrics(self) -> str:
        return 'sparse_prefill_layers{attention="hopper"} 30.0\nsparse_prefill_layers{attention="dense"} 2.0\n'

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        return list(range(50_000))

    def ask(self, prompt: Sequence[int], tokens: int) -> TimedAnswer:
        level, known = str(self.extra), 0
        for cached_level, prefix in self.cached:
            if level == cached_level and prefix == tuple(prompt[: len(prefix)]):
                known = max(known, len(prefix))
        self.cached.add((level, tuple(prompt)))
        cell = Cell(len(prompt) - known, known, 0.0, 0.0)
        saved_s = (
            0.0 if "0" in level else 1e-10 * (MEASURED.pairs(cell.sparse_tokens, len(prompt)) - MEASURED.min_pairs)
        )
        taken_s = 0.02 + 2e-5 * cell.new_tokens + 3e-10 * cell.pairs - saved_s
        return TimedAnswer(taken_s, taken_s, 1)


MEASURED = Lengths(2048, 1000, 36_000_000, 4000)


def test_a_server_is_measured_at_both_of_its_levels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def served(label: str, model: Path, args: Sequence[str], what: str) -> Contestant:
        assert {"--max-num-batched-tokens", "sparse-prefill"} < set(args)
        return Contestant(label, "model", what, lambda: nullcontext(SimulatedServer("ours", "http://x", "model")))

    monkeypatch.setattr(crossover_bench.Contestant, "served", served)
    monkeypatch.setattr(crossover_bench, "REPEATS", 1)
    crossover = Crossover(model_folder(tmp_path / "model", LLAMA_8B), Settings({"method": "top_p"}), 65_536, "")
    engine, measured = crossover.measure(Progress())
    assert engine == "hopper"
    assert fit_lengths(measured) == MEASURED


def test_new_tokens_that_cost_time_do_not_count() -> None:
    fitted = fit_lengths(cells(lambda cell: 2e-10 * cell.pairs - 4e-7 * cell.sparse_tokens - 0.003))
    assert fitted.pairs_per_token == 0
    assert fitted.min_pairs > 0


@pytest.mark.parametrize("saved_s", [lambda cell: -0.001, lambda cell: 1e-12 * cell.pairs - 0.01])
def test_what_saves_time_in_no_cell_never_pays(saved_s: Callable[[Cell], float], tmp_path: Path) -> None:
    assert fit_lengths(cells(saved_s)) == NEVER
    crossover = Crossover(model_folder(tmp_path / "model", LLAMA_8B), Settings({"method": "sale"}), 131_072, "")
    replace_entry(tmp_path / "table.json", crossover.entry("a GPU", "hopper", NEVER, "a command"))
    (measured,) = load_crossover(str(tmp_path / "table.json")).entries
    assert measured.lengths == NEVER


def test_an_entry_replaces_that_of_the_same_layers(tmp_path: Path) -> None:
    (table := tmp_path / "table.json").write_text(written(entry(9000), entry(8000, layer_weights=1)))
    replace_entry(table, Entry(**entry(3000)))
    assert [measured.min_tokens for measured in load_crossover(str(table)).entries] == [8000, 3000]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="given profile 'minference', expected a method"):
        Crossover(tmp_path, Settings({"profile": "minference"}), 131_072, "")
    with pytest.raises(BenchError, match="--longest: given 3,000, expected enough tokens"):
        lengths_to_measure(3000)
    model = model_folder(tmp_path / "model", LLAMA_8B | {"intermediate_size": "wide"})
    with pytest.raises(ConfigurationError, match="intermediate_size: given 'wide'"):
        Crossover(model, Settings({"method": "top_p"}), 131_072, "").measure(Progress())

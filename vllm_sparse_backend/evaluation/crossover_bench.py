# SPDX-License-Identifier: Apache-2.0
"""`bench crossover`: the lengths from which a method is faster than dense attention, as served. ``auto`` reads them.

A cell is a number of new tokens after a number of cached tokens. The time that sparse prefill saves in a cell is the
TTFT of exact requests less that of sparse requests to the same server, whose lengths are set so low that all cells run
sparse. Selection costs the host a fixed time for its launches, every pair of a new token with a key saves time, and new
tokens keep the device busy during the launches:

    saved time = a · pairs + b · new tokens - c

``fit_lengths`` finds a, b and c by least squares, relative to each cell's dense time. A step pays if its pairs, and
b / a more for each new token, are at least c / a.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vllm_sparse_backend.config.crossover_table import NEVER, CrossoverTable, Entry, Lengths, load_crossover
from vllm_sparse_backend.config.keys import KEY
from vllm_sparse_backend.config.layer_weights import mean_layer_weights
from vllm_sparse_backend.config.method_parameters import changed_fields
from vllm_sparse_backend.config.model_check import read_config
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.settings import load_config
from vllm_sparse_backend.evaluation.client import Prompts
from vllm_sparse_backend.evaluation.compared_servers import Contestant, Settings, opened, split_server_args
from vllm_sparse_backend.evaluation.metrics_scrape import parse_metrics
from vllm_sparse_backend.evaluation.report import BenchError, write_json
from vllm_sparse_backend.evaluation.serve_bench import Length, ServeWorkload, alternate_requests
from vllm_sparse_backend.evaluation.vllm_server import sparse_args
from vllm_sparse_backend.identity import package_version
from vllm_sparse_backend.progress import Progress
from vllm_sparse_kernels.methods import name_of

NEW_TOKENS = (200, 500, 1000, 2000, 4000, 8000)
CACHED_TOKENS = (0, 4000, 8000, 16000, 30000, 60000, 100_000)
STEP_TOKENS = 8192
"""Tokens of the server's steps. New tokens fit into one step, also with those of a cached prefix's last page."""
REPEATS = 9
LEAST = Lengths(min_tokens=2048, min_query_tokens=64)
"""Lengths from which the measured server runs sparse."""

COLUMNS = {
    "cached_tokens": "cached", "new_tokens": "new", "dense_s": "exact: TTFT, s", "sparse_s": "sparse: TTFT, s",
    "times_faster": "speed-up", "runs": "fitted",
}  # fmt: skip
LENGTHS_COLUMNS = {
    name: name
    for name in ("engine", "method", "params", "min_tokens", "min_query_tokens", "min_pairs", "pairs_per_token")
}


@dataclass(frozen=True)
class Cell:
    """Median TTFTs, in seconds, of new tokens after cached tokens."""

    new_tokens: int
    cached_tokens: int
    dense_s: float
    sparse_s: float

    @property
    def num_tokens(self) -> int:
        return self.new_tokens + self.cached_tokens

    @property
    def sparse_tokens(self) -> int:
        """New tokens that the measured server runs sparse."""
        return min(self.new_tokens, self.num_tokens - LEAST.min_tokens)

    @property
    def pairs(self) -> int:
        return LEAST.pairs(self.sparse_tokens, self.num_tokens)

    def runs_sparse(self, lengths: Lengths) -> bool:
        """Return whether the cell runs sparse with these lengths."""
        return lengths.dense_reason(self.new_tokens, self.num_tokens) is None

    def case(self, lengths: Lengths) -> dict[str, Any]:
        """Return the cell as a case of a report, with how it runs by the fit."""
        runs = "sparse" if self.runs_sparse(lengths) else "dense"
        return {**asdict(self), "times_faster": self.dense_s / self.sparse_s, "runs": runs}


def lengths_to_measure(longest: int) -> tuple[Length, ...]:
    """Return the cells that run sparse on the measured server, of at most ``longest`` tokens."""
    lengths = [Length(new, cached) for cached in CACHED_TOKENS for new in NEW_TOKENS if new + cached <= longest]
    least = LEAST.min_tokens + LEAST.min_query_tokens
    measured = tuple(length for length in lengths if length.new_tokens + length.cached_tokens >= least)
    if len(measured) < 4:  # one more than the fit's parameters
        raise BenchError(f"--longest: given {longest:,}, expected enough tokens for four cells, such as 32,768")
    return measured


def fit_lengths(cells: Sequence[Cell]) -> Lengths:
    """Return the lengths from which a step saves time by the fit; ``NEVER`` if it does in no cell."""
    dense_s = torch.tensor([[cell.dense_s] for cell in cells], dtype=torch.float64)
    terms = torch.tensor([[cell.pairs, -1, cell.sparse_tokens] for cell in cells], dtype=torch.float64) / dense_s
    saved = torch.tensor([[cell.dense_s - cell.sparse_s] for cell in cells], dtype=torch.float64) / dense_s
    # float64 needs no scaling, although pairs reach 1e9.
    s_per_pair, fixed_s, s_per_token = torch.linalg.lstsq(terms, saved).solution[:, 0].tolist()
    if s_per_token < 0:  # new tokens would cost time
        s_per_pair, fixed_s = torch.linalg.lstsq(terms[:, :2], saved).solution[:, 0].tolist()
        s_per_token = 0.0
    if s_per_pair <= 0:
        return NEVER
    min_pairs, pairs_per_token = max(round(fixed_s / s_per_pair), 0), round(s_per_token / s_per_pair)
    lengths = Lengths(LEAST.min_tokens, LEAST.min_query_tokens, min_pairs, pairs_per_token)
    paying = [cell.sparse_tokens for cell in cells if cell.runs_sparse(lengths)]
    return replace(lengths, min_query_tokens=min(paying)) if paying else NEVER


@dataclass(frozen=True)
class Crossover:
    """The measurement of one configuration of a model on this machine."""

    model: Path
    settings: Settings
    longest: int
    server_args: str

    def __post_init__(self) -> None:
        """Check that the configuration names a method: the table holds measurements of methods."""
        if (profile := self.settings.values.get("profile")) is not None:
            expected = """a method, such as '{"method": "sale"}'"""
            raise BenchError(f"--settings: given profile {profile!r}, expected {expected}")

    def contestants(self) -> list[Contestant]:
        """Return the server at its exact and its own level."""
        values = {**self.settings.values, "min_tokens": LEAST.min_tokens, "min_query_tokens": LEAST.min_query_tokens}
        steps = ("--max-model-len", str(self.longest + 1), "--max-num-batched-tokens", str(STEP_TOKENS))
        args = (*steps, *split_server_args(self.server_args), *sparse_args(values))
        return Contestant.served(str(self.settings), self.model, args, str(self.settings)).at([0, 1])

    def measure(self, progress: Progress) -> tuple[str, list[Cell]]:
        """Return the server's engine, and the cells."""
        self.model_size()  # refuses a model that it cannot read before minutes of measuring
        workload, cells = ServeWorkload(lengths_to_measure(self.longest), 1, REPEATS, None), list[Cell]()
        progress.begin(f"crossover of {self.settings}", 2 * workload.num_requests)
        with opened(self.contestants(), progress) as servers:
            layers = parse_metrics(servers[0].metrics()).by("layers", "attention")
            for length, (dense, sparse) in alternate_requests(servers, workload, Prompts.of(servers[0]), progress):
                if dense.first_s is None or sparse.first_s is None:
                    raise BenchError(f"{length}: no request was answered: {(dense.failures + sparse.failures)[0]}")
                cells.append(Cell(length.new_tokens, length.cached_tokens, dense.first_s, sparse.first_s))
        del layers["dense"]
        ((engine, _),) = layers.most_common(1)
        return "portable" if engine == "torch" else engine, cells

    def model_size(self) -> tuple[ModelShape, int]:
        """Return the model's shape, and the mean weights of its linear layers."""
        shape = ModelShape.from_folder(self.model)
        return shape, mean_layer_weights(read_config(self.model), shape, str(self.model))

    def entry(self, device: str, engine: str, lengths: Lengths, command: str) -> Entry:
        """Return the table's entry."""
        method, pays = load_config({KEY: self.settings.values}).uniform_method(), lengths != NEVER
        shape, layer_weights = self.model_size()
        return Entry(
            device=device,
            engine=engine,
            method=name_of(method),
            params=changed_fields(method),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            layer_weights=layer_weights,
            min_tokens=lengths.min_tokens if pays else None,
            min_query_tokens=lengths.min_query_tokens if pays else None,
            min_pairs=lengths.min_pairs,
            pairs_per_token=lengths.pairs_per_token,
            vllm=package_version("vllm"),
            triton=package_version("triton"),
            date=datetime.now(UTC).date().isoformat(),
            command=command,
        )


SAME = {"device", "engine", "method", "params", "num_heads", "num_kv_heads", "head_dim", "layer_weights"}


def read_table(path: Path) -> CrossoverTable:
    """Read a table; an empty one if there is no file. Raises ConfigurationError if the file is not such a table."""
    return load_crossover(str(path)) if path.exists() else CrossoverTable(format=1, entries=())


def replace_entry(path: Path, entry: Entry) -> None:
    """Write an entry into a table, instead of that of the same card, engine, method and layers."""
    table = read_table(path)
    others = [old for old in table.entries if old.model_dump(include=SAME) != entry.model_dump(include=SAME)]
    write_json(path, table.model_copy(update={"entries": (*others, entry)}).model_dump())

# SPDX-License-Identifier: Apache-2.0
"""From which lengths on each method is faster than dense attention on this card: the table that ``auto`` reads.

Two ladders, each from its longest rung down, for what a server loses: wall time of a layer's selection and attention,
launches by the host included, against FlashAttention's.

* ``min_tokens``: what follows so many tokens, half a chunk (4,096), or as many again where that is less. So many are
  dense in every row, and what a row has of its chunk after them is half of it in the mean.
* ``min_query_tokens``: so many new tokens after a long cached prefix.

A rung counts if sparse is faster by ``MARGIN``, and so are all longer ones. null: not even at the longest.
"""

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from vllm_sparse_backend.identity import package_version
from vllm_sparse_backend.measure.asked import Asked, methods_asked
from vllm_sparse_backend.measure.card import Card, Run
from vllm_sparse_backend.measure.check import check_attention
from vllm_sparse_backend.measure.data import Heads, Prompt, structured_clusters, structured_prompts
from vllm_sparse_backend.measure.layers import Layer, layers_of, new_step
from vllm_sparse_backend.measure.report import BenchError, Report, write_json
from vllm_sparse_backend.settings.plan import Plan
from vllm_sparse_kernels.attend import Engine

MARGIN = 1.03
STEPS = 2
"""Steps of a pass: the more follow each other, the less waiting for the last of them counts."""

PASSES_S = 0.25
"""For so long a rung is measured."""

FORMAT = 1
NEW_TOKENS = (20, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

COLUMNS = {
    "method": "method",
    "engine": "engine",
    "ladder": "ladder",
    "context_len": "after",
    "query_len": "new",
    "dense_ms": "dense ms",
    "ms": "ms",
    "times_faster": "times faster",
    "problem": "not timed",
    "least": "sparse from",
}
ENTRY_COLUMNS = {name: name for name in ("method", "params", "engine", "min_tokens", "min_query_tokens")}


def ladder(least: int, most: int) -> list[int]:
    """Powers of two and their midpoints: 2,048, 3,072, 4,096, 6,144 …"""
    rungs, rung = [], 1
    while rung <= most:
        rungs += [rung, rung * 3 // 2]
        rung *= 2
    return sorted({r for r in rungs if least <= r <= most})


def climb_down(
    rungs: Mapping[int, tuple[int, int]], measure: Callable[[int, int], dict[str, Any]], margin: float = MARGIN
) -> Generator[dict[str, Any], None, int | None]:
    """The least rung from which on all are faster by ``margin``; None if the longest is not. Yields what it measured.

    ``rungs`` gives each rung's (seq_len, query_len), which ``measure`` is called with.
    It asks from the longest down, and no further than the first that is not: shorter ones change nothing. A rung whose
    result was not right has no ``times_faster``, and is none that pays.
    """
    found = None
    for rung in sorted(rungs, reverse=True):
        row = measure(*rungs[rung])
        yield row
        if not row.get("times_faster", math.nan) >= margin:
            break
        found = rung
    return found


@dataclass(frozen=True)
class Asking:
    """Which lengths are tried, and with which engines."""

    engines: Sequence[str]
    shortest: int
    longest: int
    chunk_tokens: int
    margin: float = MARGIN
    layers: int = 4
    new_tokens: Sequence[int] | None = None
    """After a long cached prefix; None for ``NEW_TOKENS`` as far as they fit."""

    def ladders(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Of both thresholds: each rung's (seq_len, query_len). Raises BenchError where the prompt is too short."""
        new = self.new_tokens or [n for n in NEW_TOKENS if n <= self.chunk_tokens and n < self.longest]
        after_dense = {
            n: (n + query_len, query_len)
            for n in ladder(self.shortest, self.longest)
            if n + (query_len := min(n, self.chunk_tokens // 2)) <= self.longest
        }
        if not after_dense or max(new) >= self.longest:
            raise BenchError(
                f"--longest: given {self.longest:,}, expected more than --shortest {self.shortest:,} and half a chunk "
                f"after it, and more than {max(new):,} new tokens"
            )
        return {"min_tokens": after_dense, "min_query_tokens": {n: (self.longest, n) for n in new}}


def run(
    card: Card,
    heads: Heads,
    methods: Sequence[str],
    profiles: Sequence[str],
    asking: Asking,
    table: Path,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Measures each method with each engine on structured prompts, and writes ``table`` as it goes.

    Yields each rung, and after those of a method and engine what the table says of them.
    """
    ladders, shape = asking.ladders(), heads.model(asking.layers)
    clusters = structured_clusters(heads, asking.layers)
    plans = [(asked, asked.plan(shape, clusters)) for asked in methods_asked(methods, profiles, shape)]
    merge_entries(table, [])  # what is no table is found out before anything is measured
    prompts = structured_prompts(heads, asking.longest, asking.layers, card.device)
    for asked, plan in plans:
        for engine in asking.engines:
            found: dict[str, int | None] = {}
            for name, rungs in ladders.items():
                measure = partial(_rung, card, prompts, asked, plan, card.engines[engine], report, name)
                found[name] = yield from climb_down(rungs, measure, asking.margin)
            entry = entry_of(card, heads, asked, engine, found, report.command)
            merge_entries(table, [entry])
            report.add_case(case := {"method": str(asked), "engine": engine, "entry": entry, "least": _told(found)})
            yield case


def _told(found: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {least}" for name, least in found.items())


def _rung(
    card: Card, prompts: Sequence[Prompt], asked: Asked, plan: Plan, engine: Engine, report: Report,
    which: str, seq_len: int, query_len: int,
) -> dict[str, Any]:  # fmt: skip
    """The last ``query_len`` tokens of ``seq_len``, measured and reported."""
    row: dict[str, Any] = {"method": str(asked), "engine": engine.name, "ladder": which}
    row |= {"context_len": seq_len - query_len, "query_len": query_len}
    layers = layers_of(prompts, plan, seq_len - query_len, query_len, engine.name)
    _measure(card, layers, engine, row)
    report.add_case(row)
    return row


def _measure(card: Card, layers: Sequence[Layer], engine: Engine, row: dict[str, Any]) -> None:
    new_step(layers)()
    for layer in layers:
        if why := layer.refusal(engine):
            row["problem"] = why
            return
        layer.run(engine)
        if layer.options is None and not (check := check_attention(layer.batch, layer.index, layer.out)).passed:
            row["problem"] = str(check)
            return
    dense: list[Run] = [card.dense(layer.batch, layer.batch.empty_out()) for layer in layers]
    ours: list[Run] = [partial(layer.run, engine) for layer in layers]
    ours[0] = _in_order(new_step(layers), ours[0])
    taken = card.wall_ms({"dense": dense * STEPS, "ours": ours * STEPS}, PASSES_S)
    row["dense_ms"], row["ms"] = median(taken["dense"]), median(taken["ours"])
    row["times_faster"] = row["dense_ms"] / row["ms"]


def _in_order(*runs: Run) -> Run:
    def run() -> None:
        for one in runs:
            one()

    return run


def entry_of(
    card: Card, heads: Heads, asked: Asked, engine: str, found: Mapping[str, int | None], command: str
) -> dict[str, Any]:
    """What the table says of one method and engine on this card."""
    return {
        "device": card.name, "engine": engine, "method": asked.method, "params": dict(asked.params),
        "num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim, **found,
        "vllm": package_version("vllm"), "triton": package_version("triton"),
        "date": datetime.now(UTC).date().isoformat(), "command": command,
    }  # fmt: skip


SAME = ("device", "engine", "method", "params", "num_heads", "num_kv_heads", "head_dim")


def merge_entries(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write entries into a table; those of the same card, engine, method and heads give way."""
    old: list[dict[str, Any]] = []
    if path.exists():
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            assert table["format"] == FORMAT
            old = table["entries"]
        except (ValueError, KeyError, TypeError, AssertionError):
            raise BenchError(f"{path}: not a crossover table of format {FORMAT}") from None
    if not entries:
        return

    def key(entry: dict[str, Any]) -> list[Any]:
        return [entry.get(name) for name in SAME]

    new = [key(entry) for entry in entries]
    write_json(path, {"format": FORMAT, "entries": [*(e for e in old if key(e) not in new), *entries]})

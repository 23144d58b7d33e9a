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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from vllm_sparse_backend.identity import package_version
from vllm_sparse_backend.measure.asked import Asked
from vllm_sparse_backend.measure.card import Card, Run
from vllm_sparse_backend.measure.check import check_attention
from vllm_sparse_backend.measure.data import Heads, Prompt
from vllm_sparse_backend.measure.methods import Layer, layers_of, new_step
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


def run_crossover(
    card: Card,
    heads: Heads,
    prompts: Sequence[Prompt],
    plans: Sequence[tuple[Asked, Plan]],
    engines: Sequence[str],
    rungs: Sequence[int],
    new_tokens: Sequence[int],
    chunk_tokens: int,
    report: Report,
    margin: float = MARGIN,
) -> Iterator[dict[str, Any]]:
    """Measures each method with each engine; yields each rung as it is reported, and after them ``{"entry": …}``."""
    longest = min(prompt.num_tokens for prompt in prompts)
    after_dense = {
        n: (n + query_len, query_len) for n in rungs if n + (query_len := min(n, chunk_tokens // 2)) <= longest
    }
    if not after_dense or max(new_tokens) >= longest:
        raise BenchError(f"crossover: {max(2 * min(rungs), *new_tokens):,} tokens of a prompt of {longest:,}")
    after_prefix = {n: (longest, n) for n in new_tokens}
    for asked, plan in plans:
        for engine in engines:
            measure = partial(_rung, card, prompts, asked, plan, card.engines[engine], report)
            least = yield from climb_down(after_dense, partial(measure, "min_tokens"), margin)
            least_new = yield from climb_down(after_prefix, partial(measure, "min_query_tokens"), margin)
            yield {"entry": entry_of(card, heads, asked, engine, least, least_new, report.command)}


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
    card: Card,
    heads: Heads,
    asked: Asked,
    engine: str,
    min_tokens: int | None,
    min_query_tokens: int | None,
    command: str,
) -> dict[str, Any]:
    """What the table says of one method and engine on this card."""
    return {
        "device": card.name, "engine": engine, "method": asked.method, "params": dict(asked.params),
        "num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim,
        "min_tokens": min_tokens, "min_query_tokens": min_query_tokens,
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

    def key(entry: dict[str, Any]) -> list[Any]:
        return [entry.get(name) for name in SAME]

    new = [key(entry) for entry in entries]
    write_json(path, {"format": FORMAT, "entries": [*(e for e in old if key(e) not in new), *entries]})

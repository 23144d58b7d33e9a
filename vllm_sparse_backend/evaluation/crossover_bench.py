# SPDX-License-Identifier: Apache-2.0
"""Prompt lengths from which each method is faster than dense attention on this card: the table that ``auto`` reads.

The benchmark measures two ladders of lengths, from the longest rung down. It compares the wall time that a layer's
selection and attention add to its linear layers with the time that FlashAttention adds. The device multiplies matrices
of the linear layers' size while the host launches the next layer's selection, as on a server. A layer of a large model
hides these launches; in a small model, they take longer than the device's work. One product stands for all products of
a layer, so launches of the others are left out.

* ``min_tokens``: this many tokens are dense in every row. The benchmark times the tokens after them: half a chunk
  (4,096 tokens), which is the average sparse part of a chunk, or the same number as the dense tokens, if that is
  smaller.
* ``min_query_tokens``: this many new tokens after a long cached prefix.

A rung counts if sparse prefill is faster by ``MARGIN`` there and on all longer rungs. Null means that it is not faster
even on the longest rung. Before a method is timed on an engine, its result on a short chunk is compared with float64.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from vllm_sparse_backend.config.crossover_table import load_crossover, timed_tokens
from vllm_sparse_backend.config.layer_weights import LinearSizes
from vllm_sparse_backend.config.method_parameters import make_method
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_backend.config.settings import KEY, load_config
from vllm_sparse_backend.evaluation.attention_prompts import AttentionPrompt, Heads, planted_prompt
from vllm_sparse_backend.evaluation.cuda_device import Card, Run
from vllm_sparse_backend.evaluation.layer_timing import TimedLayer, layers_of, new_step
from vllm_sparse_backend.evaluation.report import BenchError, Report, write_json
from vllm_sparse_backend.identity import package_version
from vllm_sparse_kernels.attention import AttendEngine
from vllm_sparse_kernels.index import causal_pairs
from vllm_sparse_kernels.layer import layer_plan
from vllm_sparse_kernels.methods import METHODS, name_of, sparse_names
from vllm_sparse_kernels.methods.base import Method

MARGIN = 1.03
LAYERS = 4
"""Layers that follow each other in a step."""
NOISE = 0.01
"""Repeated measurements of linear layers differ by this share of their time. Attention counts as taking at least it."""
STEPS = 2
"""Steps of a pass. With more steps, the wait for the last step matters less."""
PASSES_S = 0.25
"""Measuring time for each rung, in seconds."""
CHECKED_TOKENS = (1792, 256)
"""Cached and new tokens of the chunk whose result is compared with float64."""
SHORTEST_TOKENS = 2048
"""Lowest rung for ``min_tokens``."""
NEW_TOKENS = (20, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FORMAT = 1

COLUMNS = {
    "method": "method",
    "engine": "engine",
    "context_len": "after",
    "query_len": "new",
    "times_faster": "speed-up",
    "problem": "not timed",
    "least": "sparse from",
}
ENTRY_COLUMNS = {name: name for name in ("method", "params", "engine", "min_tokens", "min_query_tokens")}


def changed_fields(method: Method) -> dict[str, Any]:
    """Return the parameters that differ from the method's defaults."""
    values = {field.name: getattr(method, field.name) for field in fields(method) if field.init}
    default = METHODS[name_of(method)].parameters()
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def method_label(method: Method) -> str:
    """Return the method's name and the parameters that differ from its defaults, such as ``sale tau=0.03``."""
    changed = changed_fields(method).items()
    values = {name: f"{value:g}" if isinstance(value, float) else json.dumps(value) for name, value in changed}
    return " ".join([name_of(method), *(f"{name}={value}" for name, value in values.items())])


def methods_of_settings(settings: Sequence[Mapping[str, Any]], shape: ModelShape) -> list[Method]:
    """Return each kind of method in these configurations, with the most common parameters of its heads.

    Without configurations, return all methods at their defaults, and the server's default method.
    """
    methods: dict[Method, None] = {}
    for values in settings:
        layers = Plan.build(load_config({KEY: values}), shape).layers
        counted = Counter(method for layer in layers if layer is not None for method in layer.methods)
        kinds: dict[str, Method] = {}
        for method, _ in counted.most_common():
            kinds.setdefault(name_of(method), method)
        methods |= dict.fromkeys(kinds.values())
    every = [*(METHODS[name].parameters() for name in sparse_names()), make_method("default", {})]
    return list(methods or dict.fromkeys(every))


def ladder(least: int, most: int) -> list[int]:
    """Return the powers of two and their midpoints in a range, such as 2,048, 3,072, 4,096, 6,144."""
    rungs, rung = [], 1
    while rung <= most:
        rungs += [rung, rung * 3 // 2]
        rung *= 2
    return sorted({r for r in rungs if least <= r <= most})


def crossover_ladders(longest: int, chunk_tokens: int) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the rungs of both thresholds with (seq_len, query_len). Raises BenchError if the prompt is too short."""
    after_dense = {
        n: (n + query_len, query_len)
        for n in ladder(SHORTEST_TOKENS, longest)
        if n + (query_len := timed_tokens(n, chunk_tokens)) <= longest
    }
    if not after_dense:
        raise BenchError(f"--longest: given {longest:,}, expected at least half a chunk more than {SHORTEST_TOKENS:,}")
    new = [n for n in NEW_TOKENS if n <= chunk_tokens and n < longest]
    return {"min_tokens": after_dense, "min_query_tokens": {n: (longest, n) for n in new}}


def measure_crossovers(
    card: Card,
    heads: Heads,
    linear: LinearSizes,
    methods: Sequence[Method],
    longest: int,
    chunk_tokens: int,
    table: Path,
    report: Report,
) -> None:
    """Measure each method with each engine on planted prompts, and update ``table`` after each such pair.

    Adds a case for each rung, and after the rungs of a pair a case with its entry in the table.
    """
    ladders = crossover_ladders(longest, chunk_tokens)
    read_entries(table)  # fails before measuring if the file is not a table
    prompts = [planted_prompt(heads, longest, card.device, seed) for seed in range(LAYERS)]
    for method in methods:
        for engine in card.engines.values():
            timer = MethodTimer(card, prompts, linear, method, engine)
            about = {"method": method_label(method), "engine": engine.name}
            least = dict[str, int | None].fromkeys(ladders)
            for name, rungs in ladders.items():
                for rung in sorted(rungs, reverse=True):
                    case = about | {"ladder": name} | timer.measure(*rungs[rung])
                    report.add_case(case)
                    if case.get("times_faster", 0.0) < MARGIN:
                        break  # shorter rungs do not change the result
                    least[name] = rung
            entry = entry_of(card, heads, method, engine.name, least, report.command) | {"chunk_tokens": chunk_tokens}
            replace_entry(table, entry)
            report.add_case(about | {"entry": entry, "least": ", ".join(f"{n} {rung}" for n, rung in least.items())})


class MethodTimer:
    """Timer of one method on one engine, in all layers. ``problem`` is the reason if it cannot be timed."""

    def __init__(
        self, card: Card, prompts: Sequence[AttentionPrompt], linear: LinearSizes, method: Method, engine: AttendEngine
    ) -> None:
        self.card, self.prompts, self.linear, self.method, self.engine = card, prompts, linear, method, engine
        # All heads are in the same cluster, so SharePrefill's heads share patterns.
        shared: dict[str, Any] = {"cluster": 0} if hasattr(method, "cluster") else {}
        timed_method = replace(method, **shared)
        self.plan = [layer_plan([timed_method] * prompts[0].whole.num_heads)] * len(prompts)
        self.problem = self._problem()

    def layers(self, context_len: int, query_len: int) -> list[TimedLayer]:
        return layers_of(self.prompts, self.plan, context_len, query_len, self.engine.name)

    def _problem(self) -> str | None:
        first, *_ = layers = self.layers(*CHECKED_TOKENS)
        new_step(layers)()
        if why := first.refusal(self.engine):
            return why
        first.select()
        return first.wrong(self.engine)

    def measure(self, seq_len: int, query_len: int) -> dict[str, Any]:
        """Measure a chunk of the last ``query_len`` of ``seq_len`` tokens; without times if there is a problem."""
        case: dict[str, Any] = {"context_len": seq_len - query_len, "query_len": query_len}
        if self.problem:
            return case | {"problem": self.problem}
        layers = self.layers(seq_len - query_len, query_len)
        return case | against_dense(self.card, layers, [self.engine] * len(layers), self.linear)


def against_dense(
    card: Card, layers: Sequence[TimedLayer], engines: Sequence[AttendEngine], linear: LinearSizes
) -> dict[str, float]:
    """Return the mean wall time per layer that attention adds to a step: sparse on each engine, and dense.

    Between attention of two layers, the device multiplies matrices of the size of ``linear``.
    """
    begin, multiply = new_step(layers), card.linear(linear, sum(layers[0].batch.rows.query_lens))

    def first() -> None:
        begin()
        layers[0].run(engines[0])

    dense: list[Run] = [card.dense(layer.batch, layer.batch.empty_out()) for layer in layers]
    sparse: list[Run] = [first, *(partial(layer.run, engine) for layer, engine in list(zip(layers, engines))[1:])]

    def between(runs: Sequence[Run]) -> Sequence[Run]:
        return [partial(_in_turn, attend, multiply) for attend in runs] * STEPS

    taken = card.wall_ms(
        {"dense": between(dense), "ours": between(sparse), "linear": [multiply] * (len(layers) * STEPS)}, PASSES_S
    )
    least_ms = NOISE * median(taken["linear"])
    dense_ms, ms = (
        max(least_ms, median(total - linear_ms for total, linear_ms in zip(taken[name], taken["linear"], strict=True)))
        for name in ("dense", "ours")
    )
    kept = sum(int(layer.index.kept_pairs()) for layer in layers)
    causal = sum(layer.batch.num_heads * causal_pairs(layer.batch.rows) for layer in layers)
    return {"density": kept / causal, "dense_ms": dense_ms, "ms": ms, "times_faster": dense_ms / ms}


def _in_turn(*runs: Run) -> None:
    for run in runs:
        run()


def entry_of(
    card: Card, heads: Heads, method: Method, engine: str, least_rungs: Mapping[str, int | None], command: str
) -> dict[str, Any]:
    """Return the table's entry of one method and engine on this card."""
    return {
        "device": card.name, "engine": engine, "method": name_of(method), "params": changed_fields(method),
        "num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim, **least_rungs,
        "vllm": package_version("vllm"), "triton": package_version("triton"),
        "date": datetime.now(UTC).date().isoformat(), "command": command,
    }  # fmt: skip


SAME = ("device", "engine", "method", "params", "num_heads", "num_kv_heads", "head_dim")


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Read a table's entries; none if there is no file. Raises ConfigurationError if it is not such a table."""
    return [entry.model_dump() for entry in load_crossover(str(path)).entries] if path.exists() else []


def replace_entry(path: Path, entry: dict[str, Any]) -> None:
    """Write an entry into a table, instead of that of the same card, engine, method and heads."""
    others = [old for old in read_entries(path) if any(old[name] != entry[name] for name in SAME)]
    write_json(path, {"format": FORMAT, "entries": [*others, entry]})

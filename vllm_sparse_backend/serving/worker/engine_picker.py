# SPDX-License-Identifier: Apache-2.0
"""Which engines each layer's selection and attention run on: the fastest that can and that a trial finds right.

A trial is one call on the warm-up batch: attention against float64 over the same index, selection against the method's
portable engine. So an engine that a new compiler or driver breaks costs speed, never a server or a wrong answer.
The choice is made at start-up, on all tensor-parallel ranks alike, and stays: what an engine raises in a step surfaces.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_sparse_backend.config.errors import ConfigurationError, unexpected
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.config.settings import AUTO
from vllm_sparse_backend.identity import LOGGER
from vllm_sparse_backend.serving import compat
from vllm_sparse_kernels import AttendOptions, SparseIndex, shared_bytes, widest_block
from vllm_sparse_kernels.attention import PORTABLE, AttendSpec, Engine, EngineChoice, choose_engine, engines
from vllm_sparse_kernels.engine_trial import Batch, expected_attention, failure, selection_failure, sharpened
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec, choose_select_engine

logger = logging.getLogger(LOGGER)

FIELD = "--additional-config sparse_prefill.engine"


Report = dict[str, dict[str, str]]
"""One rank's choices: by subject, in words that are the same on all ranks, the engines passed over and why."""


class EnginePicker:
    """Chooses engines for attention and for selection, one for each distinct layer of a server, at start-up.

    Args:
        wanted: Name of the attention engine that the operator asks for, or AUTO.
        table: The attention engines by name, the fastest first; those of this process unless given.
    """

    def __init__(self, wanted: str = AUTO, table: Mapping[str, Engine] | None = None) -> None:
        self.wanted = wanted
        self.table = engines(compat.flash_attention()) if table is None else table
        self._attention: dict[AttendSpec, EngineChoice[Engine]] = {}
        self._selection: dict[SelectSpec, EngineChoice[SelectEngine]] = {}
        self._excluded: Report = {}

    def pick(self, batch: Batch, index: SparseIndex, options: AttendOptions | None) -> Engine:
        """The attention engine for layers like this one, whose selection on the warm-up batch is ``index``.

        Raises:
            ConfigurationError: No engine is left; the message has the reason of each.
        """
        spec = AttendSpec.of(batch.cache, index, options, batch.sinks)
        if spec not in self._attention:
            # Skips and 8 bits are approximations: that there is no NaN is all that can be asked there.
            exact = expected_attention(batch, index, options) if options is None else None
            excluded = self._excluded.get(_subject(spec), {})

            def trial(engine: Engine) -> str | None:
                return excluded.get(engine.name) or failure(engine, batch, index, options, exact)

            try:
                self._attention[spec] = choose_engine(
                    self.table, spec, None if self.wanted == AUTO else self.wanted, trial
                )
            except ValueError as error:
                raise ConfigurationError(f"{FIELD}: given {self.wanted!r}, but {error}") from None
        return self._attention[spec].engine

    def pick_selection(self, layer: Layer, batch: Batch) -> tuple[SelectEngine, ...]:
        """The selection engine of each of the layer's groups, tried on the warm-up batch.

        A method that has one engine needs no trial: there is nothing to choose, and warm-up runs it.

        Raises:
            ConfigurationError: No engine is left for a group; the message has the reason of each.
        """
        chosen = []
        for group, heads in zip(layer.groups, layer.head_ids, strict=True):
            *faster, portable = group.method.select_engines
            chosen.append(self._pick_selection_of(group.method, heads, layer, batch) if faster else portable)
        return tuple(chosen)

    def _pick_selection_of(self, method: Method, heads: torch.Tensor, layer: Layer, batch: Batch) -> SelectEngine:
        # Methods of one size run the same kernels: one trial is enough.
        spec = SelectSpec(method.size_key, heads.device, batch.cache.head_dim)
        if spec not in self._selection:
            excluded, sharp, portable = (
                self._excluded.get(_subject(spec), {}),
                sharpened(batch),
                method.select_engines[-1],
            )
            by_portable = layer.index(batch.rows)
            is_right = selection_failure(portable, method, sharp, by_portable, heads, None) is None
            expected = by_portable if is_right else None  # else the trial of the portable engine says why

            def trial(engine: SelectEngine) -> str | None:
                index, reference = layer.index(batch.rows), None if engine.name == portable.name else expected
                return excluded.get(engine.name) or selection_failure(engine, method, sharp, index, heads, reference)

            try:
                self._selection[spec] = choose_select_engine(spec, trial)
            except ValueError as error:
                raise ConfigurationError(f"{_subject(spec)}: {error}") from None
        return self._selection[spec].engine

    @property
    def passed_over(self) -> Report:
        """What this rank passed over, for ``settle``."""
        attention = {_subject(spec): choice.passed_over for spec, choice in self._attention.items()}
        return attention | {_subject(spec): choice.passed_over for spec, choice in self._selection.items()}

    def settle(self, reports: Sequence[Report]) -> bool:
        """Have all tensor-parallel ranks take the same engine where they decide the same.

        An engine that one rank passes over is passed over on all, which the log says: the choices that this changes are
        forgotten, and layers ask ``pick`` and ``pick_selection`` again.

        Args:
            reports: ``passed_over`` of each rank, by rank: the same on all of them.

        Returns:
            Whether all ranks agree already: the same on all of them.
        """
        merged: Report = {}
        for rank, report in enumerate(reports):
            for subject, passed_over in report.items():
                for name, reason in passed_over.items():
                    merged.setdefault(subject, {}).setdefault(name, f"on rank {rank} {reason}")
        decided = [(subject, passed_over) for report in reports for subject, passed_over in report.items()]
        if all(passed_over.keys() == merged.get(subject, {}).keys() for subject, passed_over in decided):
            return True
        for subject, passed_over in self.passed_over.items():
            news = {name: why for name, why in merged.get(subject, {}).items() if name not in passed_over}
            for name, why in news.items():
                logger.warning(
                    "sparse-prefill: engine %s is not taken for %s, as all tensor-parallel ranks take the same: %s",
                    name, subject, why,
                )  # fmt: skip
            self._excluded.setdefault(subject, {}).update(news)
        self._attention = {k: v for k, v in self._attention.items() if not self._changes(k, v)}
        self._selection = {k: v for k, v in self._selection.items() if not self._changes(k, v)}
        return False

    def _changes(
        self, spec: AttendSpec | SelectSpec, choice: EngineChoice[Engine] | EngineChoice[SelectEngine]
    ) -> bool:
        """Whether the choice would be another one with what is excluded by now."""
        return not self._excluded.get(_subject(spec), {}).keys() <= choice.passed_over.keys()

    def report(self, layers: Mapping[int, Engine]) -> None:
        """Log which layers attend on which engine, and why the engines before it were not taken."""
        self._report_passed_over(self._attention.values(), "engine")
        logger.info("sparse-prefill: attention: %s", _by_engine(layers, self.table))
        narrow = [s.block_tokens for s, c in self._attention.items() if c.engine.name == PORTABLE.name]
        if self.wanted == AUTO and min(narrow, default=64) < 64:
            logger.warning(
                "sparse-prefill: engine portable takes longer for blocks of %d keys, made for engines that were not "
                "taken, than for the fewer ones of 64 that %s 'portable' gives it", min(narrow), FIELD,
            )  # fmt: skip

    def report_selection(self, layers: Mapping[int, Layer]) -> None:
        """Log which layers select on which engine, for methods that have several, and why others were not taken."""
        self._report_passed_over(self._selection.values(), "selection engine")
        numbers: dict[str, dict[int, SelectEngine]] = {}
        names: dict[str, None] = {}
        for number, layer in layers.items():
            for group, engine in zip(layer.groups, layer.select_engines, strict=True):
                if len(group.method.select_engines) > 1:
                    numbers.setdefault(name_of(group.method), {})[number] = engine
                    names |= dict.fromkeys(known.name for known in group.method.select_engines)
        for method, engines_of_layers in numbers.items():
            logger.info("sparse-prefill: selection by %s: %s", method, _by_engine(engines_of_layers, names))

    @staticmethod
    def _report_passed_over(choices: Iterable[EngineChoice[Any]], what: str) -> None:
        reasons = (item for choice in choices for item in choice.passed_over.items())
        for name, reason in dict.fromkeys(reasons):
            logger.info("sparse-prefill: %s %s not taken: %s", what, name, reason)


def _subject(spec: AttendSpec | SelectSpec) -> str:
    """What is chosen for, in the same words on all ranks: they have devices of their own."""
    if isinstance(spec, SelectSpec):
        return f"selection ({spec.method}, heads of {spec.head_dim})"
    return f"attention ({replace(spec, device=torch.device(spec.device.type))})"


def _by_engine(layers: Mapping[int, Engine] | Mapping[int, SelectEngine], order: Iterable[str]) -> str:
    """Such as "layers 0-3 on hopper; layers 4-7 on portable", engines in that order."""
    parts = []
    for name in order:
        numbers = sorted(number for number, engine in layers.items() if engine.name == name)
        if numbers:
            parts.append(f"layers {format_ranges(numbers)} on {name}")
    return "; ".join(parts)


def refuse_on_cpu(wanted: str) -> None:
    """Raise ConfigurationError where an engine is asked for on a CPU, on which attention runs in torch."""
    if compat.IS_CPU and wanted != AUTO:
        raise ConfigurationError(
            f"{FIELD}: {unexpected(wanted, f'{AUTO!r}: vLLM runs on a CPU here, and attention in torch, on no engine')}"
        )


def forecast(spec: AttendSpec) -> tuple[str | None, dict[str, str]]:
    """The engine that would serve such a layer, as far as can be told without a trial, and why others would not."""
    refusals = {name: engine.refusal(spec) for name, engine in engines(compat.flash_attention()).items()}
    taken = next((name for name, why in refusals.items() if why is None), None)
    return taken, {name: why for name, why in refusals.items() if why is not None}


def forecast_selection(method: Method, head_dim: int) -> EngineChoice[SelectEngine]:
    """The engine that would select for layers of that method, as far as can be told without a trial."""
    return choose_select_engine(SelectSpec(method, torch.device(compat.DEVICE_TYPE), head_dim))


def usual_attention(shape: ModelShape | None = None) -> AttendSpec | None:
    """What layers of such a model (of Llama-3.1-8B's heads unless told) mostly ask for; None where no block fits."""
    shape = shape or ModelShape("LlamaForCausalLM", num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    device = torch.device(compat.DEVICE_TYPE)
    block_tokens = widest_block(head_dim, shared_bytes(device))
    page_size = 128 if compat.prefers_bulk_pages() else 16
    stride_token = 2 * head_dim * num_kv_heads
    if block_tokens is None:
        return None
    return AttendSpec(
        device, torch.bfloat16, num_heads, num_kv_heads, head_dim, page_size,
        (page_size * stride_token, stride_token, 2 * head_dim), block_tokens, has_stripes=True,
    )  # fmt: skip

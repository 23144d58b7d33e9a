# SPDX-License-Identifier: Apache-2.0
"""Chooses the engines of each layer's selection and attention: the fastest that supports the layer and passes a trial.

A trial is one call on the warm-up batch. Attention is compared with float64 over the same index, and selection with the
method's portable engine. If a new compiler or driver breaks an engine, the server is therefore slower, but it starts
and its answers are correct. The choice is made once, at start-up, and is the same on all tensor-parallel ranks. An
exception that an engine raises in a later step is not caught.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from vllm_sparse_kernels.attention import PORTABLE, AttendEngine, AttendSpec, EngineChoice, choose_engine, engines
from vllm_sparse_kernels.call import HeadGroup
from vllm_sparse_kernels.engine_choice import EngineT
from vllm_sparse_kernels.engine_trial import Batch, expected_attention, failure, selection_failure, sharpened
from vllm_sparse_kernels.layer import Layer
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.selection.engine import SelectEngine, SelectSpec, choose_select_engine

logger = logging.getLogger(LOGGER)

FIELD = "--additional-config sparse_prefill.engine"


Report = dict[str, dict[str, str]]
"""Engines that a rank passed over: by subject, the reason by engine name. All ranks use the same subject names."""


class EnginePicker:
    """Chooses engines for attention and for selection, once for each distinct layer of a server, at start-up."""

    def __init__(self, wanted: str = AUTO, table: Mapping[str, AttendEngine] | None = None) -> None:
        self.wanted = wanted
        self.table = engines(compat.flash_attention()) if table is None else table
        self._choices: dict[AttendSpec | SelectSpec, EngineChoice[Any]] = {}
        self._excluded: Report = {}

    def pick(self, batch: Batch, index: SparseIndex, options: AttendOptions | None) -> AttendEngine:
        """Return the attention engine for a kind of layer. The first call for a kind runs the trials."""
        spec = AttendSpec.of(batch.cache, index, options, batch.sinks)
        if spec not in self._choices:
            # Skipped products and 8-bit scores are approximations: the trial can only check them for NaN.
            exact = expected_attention(batch, index, options) if options is None else None
            forced = None if self.wanted == AUTO else self.wanted
            try:
                self._choose(spec, self.table, lambda engine: failure(engine, batch, index, options, exact), forced)
            except ValueError as error:
                raise ConfigurationError(f"{FIELD}: given {self.wanted!r}, but {error}") from None
        engine: AttendEngine = self._choices[spec].engine
        return engine

    def pick_selection(self, layer: Layer, batch: Batch) -> tuple[SelectEngine, ...]:
        """Return the selection engine of each group of a layer. The first call for a method runs the trials.

        A method with a single engine needs no trial: there is nothing to choose, and warm-up runs it.
        """
        chosen = []
        for group in layer.plan.groups:
            *faster, portable = group.method.select_engines
            chosen.append(self._pick_selection_of(group, layer, batch) if faster else portable)
        return tuple(chosen)

    def _pick_selection_of(self, group: HeadGroup[Method], layer: Layer, batch: Batch) -> SelectEngine:
        # Methods with the same key run the same kernels, so a single trial is enough.
        spec = SelectSpec(group.method.group_key, batch.q.device, batch.cache.head_dim)
        if spec not in self._choices:
            sharp, candidates = sharpened(batch), {engine.name: engine for engine in group.method.select_engines}
            portable = group.method.select_engines[-1]
            by_portable = layer.allocate_index(batch.rows)
            is_right = selection_failure(portable, sharp, by_portable, group, None) is None
            expected = by_portable if is_right else None  # otherwise the portable engine's own trial reports why

            def trial(engine: SelectEngine) -> str | None:
                index, reference = layer.allocate_index(batch.rows), None if engine.name == portable.name else expected
                return selection_failure(engine, sharp, index, group, reference)

            try:
                self._choose(spec, candidates, trial, work="selection")
            except ValueError as error:
                raise ConfigurationError(f"{_subject(spec)}: {error}") from None
        engine: SelectEngine = self._choices[spec].engine
        return engine

    def _choose(
        self,
        spec: AttendSpec | SelectSpec,
        candidates: Mapping[str, EngineT],
        trial: Callable[[EngineT], str | None],
        forced: str | None = None,
        work: str = "attention",
    ) -> None:
        excluded = self._excluded.get(_subject(spec), {})
        self._choices[spec] = choose_engine(
            candidates, spec, forced, lambda engine: excluded.get(engine.name) or trial(engine), work
        )

    @property
    def passed_over(self) -> Report:
        """The engines that this rank passed over, for ``settle``."""
        return {_subject(spec): choice.passed_over for spec, choice in self._choices.items()}

    def settle(self, reports: Sequence[Report]) -> bool:
        """Make all tensor-parallel ranks choose the same engine for the same subject.

        An engine that any rank passes over is excluded on all ranks, and the log says so. This drops the choices that
        change: call ``pick`` and ``pick_selection`` again.
        """
        merged: Report = {}
        for rank, report in enumerate(reports):
            for subject, passed_over in report.items():
                for name, reason in passed_over.items():
                    merged.setdefault(subject, {}).setdefault(name, f"on rank {rank} {reason}")
        decided = [(subject, passed_over) for report in reports for subject, passed_over in report.items()]
        if all(passed_over.keys() == merged.get(subject, {}).keys() for subject, passed_over in decided):
            return True
        for spec, choice in list(self._choices.items()):
            excluded = merged.get(_subject(spec), {})
            for name in excluded.keys() - choice.passed_over.keys():
                logger.warning(
                    "sparse-prefill: engine %s is not used for %s, as all tensor-parallel ranks must use the same: %s",
                    name, _subject(spec), excluded[name],
                )  # fmt: skip
                self._excluded.setdefault(_subject(spec), {})[name] = excluded[name]
                self._choices.pop(spec, None)
        return False

    def report(self, layers: Mapping[int, Layer]) -> None:
        """Log which layers attend and select on which engine, and why faster engines were not chosen.

        Methods with a single selection engine are left out.
        """
        reasons = {
            (what, *item)
            for kind, what in ((AttendSpec, "engine"), (SelectSpec, "selection engine"))
            for spec, choice in self._choices.items() if isinstance(spec, kind)
            for item in choice.passed_over.items()
        }  # fmt: skip
        for reason in sorted(reasons):
            logger.info("sparse-prefill: %s %s not used: %s", *reason)
        engines_of = {number: layer.engine.name for number, layer in layers.items()}
        logger.info("sparse-prefill: attention: %s", _by_engine(engines_of, self.table))
        for method, (names, of_layers) in _selection_engines(layers).items():
            logger.info("sparse-prefill: selection by %s: %s", method, _by_engine(of_layers, names))
        narrow = [
            spec.block_tokens
            for spec, choice in self._choices.items()
            if isinstance(spec, AttendSpec) and choice.engine.name == PORTABLE.name
        ]
        if self.wanted == AUTO and min(narrow, default=64) < 64:
            logger.warning(
                "sparse-prefill: engine portable runs with index blocks of %d keys, which are meant for engines that "
                "are not used here; set %s to 'portable' for blocks of 64 keys, which are faster", min(narrow), FIELD,
            )  # fmt: skip


def _selection_engines(layers: Mapping[int, Layer]) -> dict[str, tuple[list[str], dict[int, str]]]:
    """Return, by method with several engines, the names of these and the engine of each layer."""
    by_method: dict[str, tuple[list[str], dict[int, str]]] = {}
    for number, layer in layers.items():
        for group, engine in zip(layer.plan.groups, layer.select_engines, strict=True):
            names = [known.name for known in group.method.select_engines]
            if len(names) > 1:
                by_method.setdefault(name_of(group.method), (names, {}))[1][number] = engine.name
    return by_method


def _subject(spec: AttendSpec | SelectSpec) -> str:
    """Name the subject of a choice, without the device, so that all ranks give it the same name."""
    if isinstance(spec, SelectSpec):
        return f"selection ({spec.method}, heads of {spec.head_dim})"
    return f"attention ({replace(spec, device=torch.device(spec.device.type))})"


def _by_engine(layers: Mapping[int, str], order: Iterable[str]) -> str:
    """Return for example "layers 0-3 on hopper; layers 4-7 on portable", with the engines in that order."""
    numbers = {name: sorted(number for number, engine in layers.items() if engine == name) for name in order}
    return "; ".join(f"layers {format_ranges(of_engine)} on {name}" for name, of_engine in numbers.items() if of_engine)


def refuse_on_cpu(wanted: str) -> None:
    """Check that the settings name no attention engine on a CPU, where attention runs in plain torch."""
    if compat.IS_CPU and wanted != AUTO:
        raise ConfigurationError(
            f"{FIELD}: {unexpected(wanted, f'{AUTO!r}: on a CPU, attention runs in torch, without an engine')}"
        )


def forecast(spec: AttendSpec) -> tuple[str | None, dict[str, str]]:
    """Return the attention engine that a server would choose, if its trial passes."""
    refusals = {name: engine.refusal(spec) for name, engine in engines(compat.flash_attention()).items()}
    taken = next((name for name, why in refusals.items() if why is None), None)
    return taken, {name: why for name, why in refusals.items() if why is not None}


def forecast_selection(method: Method, head_dim: int) -> EngineChoice[SelectEngine]:
    """Return the selection engine that a server would choose, if its trial passes."""
    return choose_select_engine(SelectSpec(method, torch.device(compat.DEVICE_TYPE), head_dim))


def usual_attention(shape: ModelShape | None = None) -> AttendSpec | None:
    """Return the kind of attention that most layers of a model need on this device."""
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

# SPDX-License-Identifier: Apache-2.0
"""Which query heads of each layer this tensor-parallel rank prefills with which method.

Pure Python, from the configuration, its profile and the model's shape; made once, before the first step. Rank r of n
owns the model's query heads [r · H/n, (r + 1) · H/n). Key-value heads are split or replicated as vLLM does it; the
query heads, which the plan is about, are split alike in both cases.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from vllm_sparse_backend.settings.config import OPTION, SparsePrefillConfig
from vllm_sparse_backend.settings.crossover import Crossover, OwnCrossover, Thresholds, TokenCount, resolve
from vllm_sparse_backend.settings.documents import Documents
from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
from vllm_sparse_backend.settings.methods import make_method, summarize
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import EXACT, Profile
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels.layer import HeadGroup, LayerPlan, group_heads, methods_by_head
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method

DEFAULT = "default"
"""The level that rows have whose request asks for none."""


def layer_by_level(plans: Iterable["Plan"], layer: int) -> tuple[LayerPlan, ...]:
    """One layer's groups at each level; empty where it is dense at all of them.

    Where it is dense at some, its heads keep everything there: rows of several levels may share a step.
    """
    each = [plan.layer(layer) for plan in plans]
    num_heads = max((len(methods_by_head(groups)) for groups in each if groups), default=0)
    dense = (HeadGroup(tuple(range(num_heads)), make_method("dense", {})),)
    return tuple(dense if groups is None else groups for groups in each) if num_heads else ()


@dataclass(frozen=True)
class Plan:
    """``layers[i]`` holds layer i's groups, which cover each query head of this rank once; None if it runs dense."""

    layers: tuple[LayerPlan | None, ...]
    min_tokens: TokenCount
    min_query_tokens: TokenCount
    source: str
    """The profile or method that was asked for."""
    shape: ModelShape
    level: str | None = None
    """Its name, where the profile has one for it."""
    level_names: tuple[str, ...] = (EXACT,)
    """Those that requests may ask for, of the server's own plan."""
    methods: frozenset[Method] = frozenset()
    """Of all heads of the model, those of other ranks too. What goes by them, such as the positions that every row
    computes densely, must be the same on all ranks: else a block that all levels share is sparse in some heads."""
    own: OwnCrossover | None = None
    """What its profile says of when it pays, which goes before a table."""

    @staticmethod
    def build(
        config: SparsePrefillConfig, shape: ModelShape, tp_rank: int = 0, tp_size: int = 1, level: str = DEFAULT
    ) -> "Plan":
        """The plan of one rank at one level, the server's own unless told; errors are ``by_level``'s."""
        documents = Documents.read(config, shape)
        return _build(config, documents.parse_profile(config), documents.source, shape, tp_rank, tp_size, level)

    @staticmethod
    def by_level(
        config: SparsePrefillConfig,
        shape: ModelShape,
        tp_rank: int = 0,
        tp_size: int = 1,
        documents: Documents | None = None,
    ) -> dict[str, "Plan"]:
        """The plan of each level that has one, which ``exact`` has not: the server's own first.

        Raises ``ConfigurationError`` where the profile does not fit the model, or the heads do not divide by
        ``tp_size``. ``documents``: those of the configuration, read anew unless given.
        """
        documents = documents or Documents.read(config, shape)
        profile = documents.parse_profile(config)
        levels = [DEFAULT, *(name for name in profile.level_names if name not in (EXACT, profile.level))]
        return {level: _build(config, profile, documents.source, shape, tp_rank, tp_size, level) for level in levels}

    def layer(self, layer: int) -> LayerPlan | None:
        """Groups of a layer; None if it is to run dense, as do layers past the model's own (a draft model's)."""
        return self.layers[layer] if layer < len(self.layers) else None

    @property
    def has_shares(self) -> bool:
        """Whether some head's method has a p, which requests may set."""
        return any(method.share_kept is not None for method in self.methods)

    @property
    def largest_share(self) -> float:
        """The largest p of all heads of the model, those of other ranks too; 0 where no head has one.

        A request with that p or a larger one keeps at least what this plan keeps, in every head.
        """
        return max((method.share_kept for method in self.methods if method.share_kept is not None), default=0.0)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(i for i, groups in enumerate(self.layers) if groups is None)

    def thresholds(self, table: Crossover, device: str, engines: Collection[str]) -> Thresholds:
        """From which lengths on rows go sparse, on this device and with these engines, each of which some layer has."""
        shape = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim)
        numbers = (self.min_tokens, self.min_query_tokens)
        each = [resolve(*numbers, self.methods, table, device, engine, shape, self.own) for engine in sorted(engines)]
        return max(each, key=lambda one: one.severity)

    def earliest_thresholds(self, table: Crossover, device: str) -> Thresholds:
        """Those with whichever engine is measured to pay first: what there is to prepare for before one is chosen."""
        each = [self.thresholds(table, device, [engine]) for engine in self._engines(table, device) or ["any"]]
        return min(each, key=lambda one: one.severity)

    def exact_tokens(self, table: Crossover, device: str) -> int | None:
        """So many positions of every row are dense on whichever engine; None if all are."""
        each = [min_tokens for min_tokens, _ in self.numbers(table, device).values()]
        return min((tokens for tokens in each if tokens is not None), default=None)

    def numbers(self, table: Crossover, device: str) -> dict[str, list[int | None]]:
        """[min_tokens, min_query_tokens] by the engines that were measured on this device, and for any other one."""
        thresholds = {
            engine: self.thresholds(table, device, [engine])
            for engine in [*sorted(self._engines(table, device)), "any other"]
        }
        return {engine: [found.min_tokens, found.min_query_tokens] for engine, found in thresholds.items()}

    def _engines(self, table: Crossover, device: str) -> set[str]:
        """Those with which something was measured on this device."""
        own = self.own.engines if self.own is not None else ()
        return {*table.engines(device), *own}

    def describe(self, thresholds: Thresholds) -> list[str]:
        """Lines for the log at start-up: what runs how."""
        lines = [f"sparse prefill with {self.source}, for {thresholds}", *thresholds.notes]
        if self.dense_layers:
            lines.append(f"layers {format_ranges(self.dense_layers)}: dense")
        layers: dict[str, set[int]] = defaultdict(set)
        heads: dict[str, int] = defaultdict(int)
        methods: dict[str, dict[Method, list[Method]]] = defaultdict(lambda: defaultdict(list))
        for i, groups in enumerate(self.layers):
            for group in groups or ():
                name = name_of(group.method)
                layers[name].add(i)
                heads[name] += len(group.heads)
                methods[name][group.method.alike].append(group.method)
        for name, settings in methods.items():
            alike = next(iter(settings.values()))
            what = summarize(alike) if len(settings) == 1 else f"{name} ({len(settings)} settings)"
            lines.append(f"layers {format_ranges(layers[name])}: {what} on {heads[name]} heads of this rank")
        return lines


def _build(
    config: SparsePrefillConfig,
    profile: Profile,
    source: str,
    shape: ModelShape,
    tp_rank: int,
    tp_size: int,
    level: str,
) -> Plan:
    if not 0 <= tp_rank < tp_size or shape.num_heads % tp_size:
        raise ConfigurationError(
            f"tensor parallelism: given rank {tp_rank} of {tp_size} for {shape.num_heads} query heads, expected a rank "
            "below the size, and a size that divides the heads"
        )
    profile.check_model(shape, source if config.profile is not None else f"{OPTION} sparse_prefill.method")
    if level != DEFAULT:
        profile, source = profile.at_level(level), f"{source} at level {level}"
    if config.dense_layers and config.dense_layers[-1] >= shape.num_layers:
        problem = unexpected(config.dense_layers[-1], f"at most {shape.num_layers - 1}, as the model is {shape}")
        raise ConfigurationError(f"{OPTION} sparse_prefill.dense_layers: {problem}")
    dense = {*config.dense_layers, *profile.dense_layers}
    if len(dense) == shape.num_layers:
        where = f"{OPTION} and {source}" if config.dense_layers else source
        raise ConfigurationError(f"dense_layers of {where} name all {len(dense)} layers, expected fewer")
    num_local = shape.num_heads // tp_size
    own = slice(tp_rank * num_local, (tp_rank + 1) * num_local)
    whole = [() if layer in dense else profile.methods_of(layer, shape.num_heads) for layer in range(shape.num_layers)]
    layers = _group_layers([methods[own] for methods in whole])
    numbers = _first_given(config, profile, "min_tokens"), _first_given(config, profile, "min_query_tokens")
    methods = _methods(layers if tp_size == 1 else _group_layers(whole))
    return Plan(layers, *numbers, source, shape, profile.level, profile.level_names, methods, profile.crossover)


def _group_layers(methods: Sequence[Sequence[Method]]) -> tuple[LayerPlan | None, ...]:
    """The groups of each layer whose heads have these methods; None of one that has none. Layers that are alike have
    one object."""
    counts = Counter(method.sharing for method in chain.from_iterable(methods))
    known: dict[LayerPlan, LayerPlan] = {}
    groups = (group_heads(of_layer, counts) for of_layer in methods)
    return tuple(known.setdefault(of_layer, of_layer) or None for of_layer in groups)


def _first_given(config: SparsePrefillConfig, profile: Profile, field: str) -> TokenCount:
    """The operator's number goes before the profile's."""
    theirs: TokenCount | None = getattr(profile, field)
    ours: TokenCount = getattr(config, field)
    return ours if theirs is None or field in config.model_fields_set else theirs


def _methods(layers: Iterable[LayerPlan | None]) -> frozenset[Method]:
    """The methods of all heads, each as the configuration states it."""
    return frozenset(method for groups in set(layers) if groups for method in methods_by_head(groups))

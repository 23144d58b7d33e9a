# SPDX-License-Identifier: Apache-2.0
"""The plan: the method with which this tensor-parallel rank prefills each query head of each layer.

A plan is built once, before the first step, from the configuration, its profile and the model's shape. Rank r of n owns
the model's query heads [r · H/n, (r + 1) · H/n), whether vLLM splits the key-value heads or replicates them.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from vllm_sparse_backend.config.carried import Carried
from vllm_sparse_backend.config.crossover_table import Lengths, TokenCount
from vllm_sparse_backend.config.errors import ConfigurationError, refusal
from vllm_sparse_backend.config.keys import OPTION, SETTINGS
from vllm_sparse_backend.config.method_parameters import summarize
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import EXACT, ON, Profile
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_kernels.layer import LayerPlan
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.base import Method


@dataclass(frozen=True)
class Plan:
    """Methods of the heads of one rank at one level."""

    layers: tuple[LayerPlan | None, ...]
    min_tokens: TokenCount
    min_query_tokens: TokenCount
    source: str
    shape: ModelShape
    level: str | None = None
    level_names: tuple[str, ...] = (EXACT,)
    methods: frozenset[Method] = frozenset()
    """Methods of all ranks."""
    measured_methods: frozenset[Method] = frozenset()
    """Methods whose measured lengths ``auto`` stands for."""

    @staticmethod
    def by_level(
        config: SparsePrefillConfig,
        shape: ModelShape,
        tp_rank: int = 0,
        tp_size: int = 1,
        carried: Carried | None = None,
    ) -> dict[str, "Plan"]:
        """Build the plan of each level except ``exact``, which needs none."""
        carried = carried or Carried.read(config)
        profile, source = carried.profile_for(config), carried.source
        profile.check_model(shape, source if config.profile is not None else f"{SETTINGS}.method")
        if config.dense_layers and config.dense_layers[-1] >= shape.num_layers:
            expected = f"at most {shape.num_layers - 1}, because the model is {shape}"
            raise refusal(f"{SETTINGS}.dense_layers", config.dense_layers[-1], expected)
        num_local = shape.num_heads // tp_size
        local_heads = slice(tp_rank * num_local, (tp_rank + 1) * num_local)
        plans = {ON: _build(config, profile, source, shape, local_heads)}
        for level in profile.level_names:
            if level not in (EXACT, profile.level):
                at_level = profile.at_level(level)
                plans[level] = _build(config, at_level, f"{source} at level {level}", shape, local_heads)
        return plans

    def layer(self, layer: int) -> LayerPlan | None:
        """Return the plan of a layer; None if it is dense."""
        return self.layers[layer] if layer < len(self.layers) else None

    @property
    def has_shares(self) -> bool:
        """Whether any head's method lets requests set its share of kept attention mass, p."""
        return any(method.share_kept is not None for method in self.methods)

    def describe(self, lengths: Lengths) -> list[str]:
        """Describe the plan for the log at start-up."""
        return [f"sparse prefill with {self.source}, for {lengths}", *lengths.notes, *self.describe_layers()]

    def describe_layers(self) -> list[str]:
        """Describe the methods of this rank's heads."""
        lines = []
        if dense_layers := [i for i, layer in enumerate(self.layers) if layer is None]:
            lines.append(f"layers {format_ranges(dense_layers)}: dense")
        heads: dict[str, list[tuple[int, Method]]] = defaultdict(list)
        for i, layer in enumerate(self.layers):
            for method in layer.methods if layer is not None else ():
                heads[name_of(method)].append((i, method))
        for name, layers_and_methods in heads.items():
            layers, methods = zip(*layers_and_methods, strict=True)
            num_settings = len({method.group_key for method in methods})
            text = summarize(methods) if num_settings == 1 else f"{name} ({num_settings} settings)"
            lines.append(f"layers {format_ranges(layers)}: {text} on {len(methods)} heads of this rank")
        return lines


def _build(config: SparsePrefillConfig, profile: Profile, source: str, shape: ModelShape, local_heads: slice) -> Plan:
    dense = {*config.dense_layers, *profile.dense_layers}
    if len(dense) == shape.num_layers:
        where = f"{OPTION} and {source}" if config.dense_layers else source
        raise ConfigurationError(f"dense_layers of {where} name all {len(dense)} layers, expected fewer")
    all_methods = [
        () if layer in dense else profile.methods_of(layer, shape.num_heads) for layer in range(shape.num_layers)
    ]
    # As the configuration states them: all ranks need the same lengths.
    methods = frozenset(
        chain.from_iterable(layer.methods for layer in {*layer_plans(all_methods)} if layer is not None)
    )
    return Plan(
        layers=layer_plans([methods_of_layer[local_heads] for methods_of_layer in all_methods]),
        min_tokens=_select_setting(config, profile, "min_tokens"),
        min_query_tokens=_select_setting(config, profile, "min_query_tokens"),
        source=source,
        shape=shape,
        level=profile.level,
        level_names=profile.level_names,
        methods=methods,
        measured_methods=methods if profile.lengths_of is None else frozenset({profile.lengths_of}),
    )


def layer_plans(methods: Sequence[Sequence[Method]]) -> tuple[LayerPlan | None, ...]:
    """Return the plan of each layer; None for a layer without methods."""
    counts = Counter(method.sharing for method in chain.from_iterable(methods))
    return tuple(LayerPlan.of(layer_methods, counts) if layer_methods else None for layer_methods in methods)


def _select_setting(config: SparsePrefillConfig, profile: Profile, field: str) -> TokenCount:
    """Return the configuration's number if it is set, otherwise the profile's, otherwise the default."""
    profile_value: TokenCount | None = getattr(profile, field)
    config_value: TokenCount = getattr(config, field)
    return config_value if profile_value is None or field in config.model_fields_set else profile_value

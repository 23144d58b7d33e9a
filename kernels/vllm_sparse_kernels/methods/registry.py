# SPDX-License-Identifier: Apache-2.0
"""The registry of methods: of this package, and of other installed packages by entry points."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from vllm_sparse_kernels.methods.spec import MethodSpec

GROUP = "vllm_sparse_backend.methods"
"""Group of entry points. Each entry point is a MethodSpec or a tuple of MethodSpecs."""


class PluginError(ValueError):
    """An entry point of an installed package that does not provide a method."""


class Registry(Mapping[str, MethodSpec]):
    """Descriptions of methods by name, in alphabetical order."""

    def __init__(self, builtin_specs: Iterable[MethodSpec]) -> None:
        self.builtin_specs = tuple(builtin_specs)

    @cached_property
    def specs(self) -> dict[str, MethodSpec]:
        """All methods by name."""
        specs = {spec.name: spec for spec in self.builtin_specs}
        # On first access rather than on construction: the packages behind entry points import this package.
        for entry_point in entry_points(group=GROUP):
            for spec in _load_specs(entry_point):
                if spec.name in specs:
                    raise PluginError(
                        f"{_origin(entry_point)}: the method's name {spec.name!r} is taken; expected a name other than "
                        f"{', '.join(sorted(specs))}"
                    )
                specs[spec.name] = spec
        return dict(sorted(specs.items()))

    def __getitem__(self, name: str) -> MethodSpec:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def _load_specs(entry_point: EntryPoint) -> tuple[MethodSpec, ...]:
    try:
        provided = entry_point.load()
    except Exception as error:  # the import of a foreign package may raise anything
        raise PluginError(f"{_origin(entry_point)}: {type(error).__name__}: {error}") from error
    specs = provided if isinstance(provided, tuple) else (provided,)
    if not specs or not all(isinstance(spec, MethodSpec) for spec in specs):
        raise PluginError(f"{_origin(entry_point)}: given {provided!r}, expected a MethodSpec or a tuple of them")
    return specs


def _origin(entry_point: EntryPoint) -> str:
    name = "a package without a name" if entry_point.dist is None else entry_point.dist.name
    return (
        f"{name} cannot provide a method for sparse-prefill (entry point {entry_point.name} = {entry_point.value} of "
        f"the group {GROUP})"
    )

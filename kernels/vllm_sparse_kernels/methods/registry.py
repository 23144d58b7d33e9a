# SPDX-License-Identifier: Apache-2.0
"""All methods by name: those of this package, and those of other installed packages, by entry points."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from vllm_sparse_kernels.methods.spec import MethodSpec

GROUP = "vllm_sparse_backend.methods"
"""Entry points of it are a MethodSpec or a tuple of them."""


class PluginError(ValueError):
    """An installed package whose entry point gives no method: which one, what was given, what was expected."""


class Registry(Mapping[str, MethodSpec]):
    """By name, in the order of names.

    Other packages are asked when the first name is: they import this one, so that its own import can't wait for them.
    """

    def __init__(self, builtin: Iterable[MethodSpec]) -> None:
        self._builtin = tuple(builtin)

    @cached_property
    def specs(self) -> dict[str, MethodSpec]:
        """Raises PluginError where a package's entry point gives no method, or one whose name is taken."""
        specs = {spec.name: spec for spec in self._builtin}
        for entry_point in entry_points(group=GROUP):
            for spec in _specs_of(entry_point):
                if spec.name in specs:
                    raise PluginError(
                        f"{_origin(entry_point)}: the method's name {spec.name!r} is taken; expected another than "
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


def _specs_of(entry_point: EntryPoint) -> tuple[MethodSpec, ...]:
    try:
        loaded = entry_point.load()
    except Exception as error:  # whatever a package of somebody else's raises while it is imported
        raise PluginError(f"{_origin(entry_point)}: {type(error).__name__}: {error}") from error
    specs = loaded if isinstance(loaded, tuple) else (loaded,)
    if not specs or not all(isinstance(spec, MethodSpec) for spec in specs):
        raise PluginError(f"{_origin(entry_point)}: given {loaded!r}, expected a MethodSpec or a tuple of them")
    return specs


def _origin(entry_point: EntryPoint) -> str:
    name = "a package without a name" if entry_point.dist is None else entry_point.dist.name
    return (
        f"{name} cannot give sparse-prefill a method (its entry point {entry_point.name} = {entry_point.value} of the "
        f"group {GROUP})"
    )

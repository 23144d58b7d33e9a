# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile`: show and check profiles, import other tools' files, and make profiles."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_sparse_backend.cli import profile_commands
from vllm_sparse_backend.cli.common import MaybeModel, Model, failure, failures, group, new_output, say
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.ranges import format_ranges
from vllm_sparse_backend.evaluation.report import table_of

if TYPE_CHECKING:
    from vllm_sparse_backend.config.profile import Level, Profile
    from vllm_sparse_kernels.methods.base import Method

profile_app = group("List, show, check, import and make profiles. A profile has a method for each layer and head.")

DENSE_LAYER = "dense layer"

ProfileName = Annotated[
    str, typer.Argument(metavar="PROFILE", help="Name of a bundled profile, or path of a YAML file.")
]
LevelOption = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="Level to show, high or fast. Default: the profile's own.")
]


@profile_app.command("list", epilog="Example: sparse-prefill profile list")
def list_profiles() -> None:
    """List the bundled profiles."""
    from vllm_sparse_backend.config.profile import bundled_profiles, load_profile

    models = {name: load_profile(path).model for name, path in bundled_profiles().items()}
    rows = ((name, "any" if model is None else ", ".join(model.names)) for name, model in models.items())
    _table(("profile", "model"), rows)


@profile_app.command(epilog="Example: sparse-prefill profile check mine.yaml MODEL")
def check(profile: ProfileName, model: MaybeModel = None) -> None:
    """Check and describe a profile.

    The checks are those of a server at start-up; exit code 1 if the profile is invalid.
    """
    from vllm_sparse_backend.config.plan import Plan
    from vllm_sparse_backend.config.settings import SparsePrefillConfig

    with failures():
        loaded, shape = _load(profile, model)
        if shape is not None:
            Plan.by_level(SparsePrefillConfig(profile=profile), shape)  # as a server does, on one rank
        _describe(loaded, shape)


@profile_app.command(epilog="Example: sparse-prefill profile show mine.yaml MODEL")
def show(profile: ProfileName, model: MaybeModel = None, level: LevelOption = None) -> None:
    """Show a profile by layer."""
    with failures():
        loaded, shape = _load(profile, model)
        if level is not None:
            try:
                loaded = loaded.at_level(level)
            except ValueError as error:
                raise failure(f"--{error}") from None
        _describe(loaded, shape)
        for name, value in loaded.provenance.model_dump(exclude_none=True, exclude={"figures"}).items():
            say(f"{name}: {_format_value(value)}")
        if shape is not None:
            _table(("layers", "heads by setting", "density", "p99 error"), _layer_rows(loaded, shape))


@profile_app.command("import", epilog="Example: sparse-prefill profile import patterns.json MODEL mine.yaml")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="MInference's patterns, or SharePrefill's clusters.")],
    model: Model,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The profile to write; it must not exist yet.", callback=new_output)
    ],
) -> None:
    """Convert another tool's JSON file to a profile."""
    from vllm_sparse_backend.calibration.imports import import_profile

    with failures():
        imported = import_profile(file, model)
        if imported.model is not None:
            imported.check_model(imported.model, str(file))
        profile_commands.write_profile(imported, out)
    _describe(imported, imported.model)
    say(f"{imported.provenance.source}\nWritten to {out}")


def _load(name: str, model: Path | None) -> "tuple[Profile, ModelShape | None]":
    """Return the profile, and the shape of ``model``, or of the profile if it is None. Raises ConfigurationError."""
    from vllm_sparse_backend.config.profile import load_profile

    loaded = load_profile(name)
    shape = loaded.model if model is None else ModelShape.from_folder(model)
    if shape is not None:
        loaded.check_model(shape, name)
    return loaded, shape


def _describe(profile: "Profile", shape: ModelShape | None) -> None:
    from vllm_sparse_backend.config.method_parameters import describe

    min_tokens = "the server's" if profile.min_tokens is None else profile.min_tokens
    min_query = "the server's" if profile.min_query_tokens is None else profile.min_query_tokens
    say(f"for {profile.model or 'any model'}; min_tokens {min_tokens}, min_query_tokens {min_query}")
    if shape is None:
        say(f"every head: {describe(profile.default)}")
        return
    _describe_level(profile, shape, f"level {profile.level}, " if profile.levels else "")
    for name, level in profile.levels.items():
        _describe_level(level, shape, f"level {name}, ")


def _describe_level(level: "Level", shape: ModelShape, start: str) -> None:
    from vllm_sparse_backend.config.method_parameters import summarize

    sparse_layers = [layer for layer in range(shape.num_layers) if layer not in level.dense_layers]
    heads: dict[Method, list[Method]] = defaultdict(list)
    for layer in sparse_layers:
        for method in level.methods_of(layer, shape.num_heads):
            heads[method.group_key].append(method)
    total = shape.num_layers * shape.num_heads
    for methods in sorted(heads.values(), key=len, reverse=True):
        say(f"{start}{len(methods)} of {total} heads: {summarize(methods)}")
    if dense := total - len(sparse_layers) * shape.num_heads:
        say(f"{start}{dense} of {total} heads: in dense_layers, always dense")


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    say(table_of("", {column: column for column in columns}, [dict(zip(columns, row)) for row in rows]))


def _layer_rows(level: "Level", shape: ModelShape) -> Iterator[Sequence[object]]:
    """Yield layers with their heads by setting, mean density and largest p99 error of a head.

    Neighbouring layers with equal values share a row.
    """
    figures = level.provenance.figures

    def row(layer: int) -> tuple[str, ...]:
        density = figures.density.get(layer) if figures else None
        errors = figures.p99_error.get(layer) if figures else None
        return (
            ", ".join(f"{count} {setting}" for setting, count in _head_settings(level, shape, layer).most_common()),
            f"{fmean(density):.4g}" if density else "",
            f"{max(errors):.4g}" if errors else "",
        )

    for cells, layers in groupby(range(shape.num_layers), row):
        yield format_ranges(layers), *cells


def _head_settings(level: "Level", shape: ModelShape, layer: int) -> Counter[str]:
    """Count the heads of each setting."""
    from vllm_sparse_backend.config.method_parameters import method_label

    if layer in level.dense_layers:
        return Counter({DENSE_LAYER: shape.num_heads})
    return Counter(map(method_label, level.methods_of(layer, shape.num_heads)))


profile_commands.add_commands(profile_app)

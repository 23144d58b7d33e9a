# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile`: look at profiles, check them, import those of other tools, and make one's own."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_sparse_backend.cli import making
from vllm_sparse_backend.cli.common import failure, failures, say

if TYPE_CHECKING:
    from vllm_sparse_backend.settings.model_shape import ModelShape
    from vllm_sparse_backend.settings.profile import Level, Profile
    from vllm_sparse_kernels.methods.base import Method

profile_app = typer.Typer(
    help="Profiles: which method, with which parameters, each layer and head prefills with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PIPED_WIDTH = 10_000
"""Tables that no terminal shows keep a row on a line."""

MODEL_HELP = "A model folder, or its config.json."
ProfileName = Annotated[str, typer.Argument(help="Name of a bundled profile, or path of a YAML file.")]
FittedModel = Annotated[Path | None, typer.Argument(help=f"{MODEL_HELP} The profile must fit it.")]
LevelOption = Annotated[str | None, typer.Option(help="Show this level: high or fast; by default the profile's own.")]


@profile_app.command()
def check(profile: ProfileName, model: FittedModel = None) -> None:
    """Check a profile as a server would at its start, and say what it does; exit code 1 if it is not right.

    `auto` with a model says which bundled profile a server would take.
    """
    from vllm_sparse_backend.settings.config import SparsePrefillConfig
    from vllm_sparse_backend.settings.errors import ConfigurationError
    from vllm_sparse_backend.settings.plan import Plan

    loaded, shape = _load(profile, model)
    if shape is not None:
        try:
            Plan.by_level(SparsePrefillConfig(profile=profile), shape)  # what a server does, on one rank
        except ConfigurationError as error:
            raise failure(error) from error
    _describe(loaded, shape)


@profile_app.command()
def show(
    profile: ProfileName,
    model: FittedModel = None,
    level: LevelOption = None,
    png: Annotated[Path | None, typer.Option(help="Draw heat maps of it to this PNG file; needs matplotlib.")] = None,
) -> None:
    """Tables of what a profile says: by layer, and by setting; as a picture too."""
    from vllm_sparse_backend.profiling import show as part

    loaded, shape = _load(profile, model)
    if level is not None:
        try:
            loaded = loaded.at_level(level)
        except ValueError as error:
            raise failure(f"{profile}: {error}") from None
    _describe(loaded, shape)
    for name, value in loaded.provenance.model_dump(exclude_none=True, exclude={"figures"}).items():
        say(f"{name}: {_told(value)}")
    if shape is None:
        if png is not None:
            raise failure(f"{profile}: fits any model: name one to draw it for")
        return
    _table(("layers", "heads by method", "settings", "density", "worst error"), part.layer_rows(loaded, shape))
    _table(("heads", "setting", "layers"), part.setting_rows(loaded, shape))
    if png is not None:
        with failures():
            say(f"Written to {png}: {', '.join(part.draw(loaded, shape, png, f'{profile}, {shape}'))}")


@profile_app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="A file of MInference, SharePrefill, SpargeAttn or SALE.")],
    model: Annotated[Path, typer.Argument(help=MODEL_HELP)],
    out: Annotated[Path, typer.Argument(help="The profile to write; it must not exist yet.")],
) -> None:
    """Turn what another tool saved into a profile; nothing in the file is executed.

    Files that are known: MInference's patterns and SharePrefill's clusters (JSON), SpargeAttn's and SALE's thresholds
    (torch.save).
    """
    from vllm_sparse_backend.profiling.importers.detect import import_profile
    from vllm_sparse_backend.settings.errors import ConfigurationError

    try:
        imported = import_profile(file, model)
        if imported.model is not None:
            imported.check_model(imported.model, str(file))
        with out.open("x", encoding="utf-8") as target:
            try:
                target.write(imported.to_yaml())
                target.flush()
            except OSError:  # a full disk: what is half written would be in the way of the next try
                out.unlink()
                raise
    except ConfigurationError as error:
        raise failure(error) from error
    except OSError as error:
        raise failure(f"{out}: cannot be written: {error.strerror}") from error
    _describe(imported, imported.model)
    say(f"{imported.provenance.source}\nWritten to {out}")


@profile_app.command()
def schema() -> None:
    """Print the JSON Schema of profiles, for editors and for other tools that write them."""
    from vllm_sparse_backend.settings.schema import profile_schema

    typer.echo(json.dumps(profile_schema(), indent=2, ensure_ascii=False))


def _load(name: str, model: Path | None) -> "tuple[Profile, ModelShape | None]":
    """The profile, and the shape that it is looked at for: the model's, else its own."""
    from vllm_sparse_backend.settings import auto
    from vllm_sparse_backend.settings.errors import ConfigurationError
    from vllm_sparse_backend.settings.model_shape import ModelShape
    from vllm_sparse_backend.settings.profile import load_profile

    try:
        shape = ModelShape.from_folder(model) if model is not None else None
        if name == auto.AUTO:
            if shape is None:
                raise failure("auto: which profile it is goes by the model: expected a MODEL too")
            choice = auto.choose(shape)
            if choice.profile is None:
                raise failure(f"auto: no profile, the server's default method runs: {choice.why}")
            say(f"auto: {choice.name}: {choice.why}")
            return choice.profile, shape
        loaded = load_profile(name)
        shape = shape or loaded.model
        if shape is not None:
            loaded.check_model(shape, name)
    except ConfigurationError as error:
        raise failure(error) from error
    return loaded, shape


def _describe(profile: "Profile", shape: "ModelShape | None") -> None:
    from vllm_sparse_backend.settings.methods import describe

    min_tokens = "the server's" if profile.min_tokens is None else profile.min_tokens
    min_query = "the server's" if profile.min_query_tokens is None else profile.min_query_tokens
    say(f"for {profile.model or 'any model'}; min_tokens {min_tokens}, min_query_tokens {min_query}")
    if shape is None:
        say(f"every head: {describe(profile.default)}")
        return
    _describe_level(profile, shape, f"level {profile.level}, " if profile.levels else "")
    for name, level in profile.levels.items():
        _describe_level(level, shape, f"level {name}, ")


def _describe_level(level: "Level", shape: "ModelShape", start: str) -> None:
    from vllm_sparse_backend.settings.methods import summarize

    sparse_layers = [layer for layer in range(shape.num_layers) if layer not in level.dense_layers]
    heads: dict[Method, list[Method]] = defaultdict(list)
    for layer in sparse_layers:
        for method in level.methods_of(layer, shape.num_heads):
            heads[method.alike].append(method)
    total = shape.num_layers * shape.num_heads
    for alike in sorted(heads.values(), key=len, reverse=True):
        say(f"{start}{len(alike)} of {total} heads: {summarize(alike)}")
    if dense := total - len(sparse_layers) * shape.num_heads:
        say(f"{start}{dense} of {total} heads: in dense_layers, always dense")


def _told(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*(escape(column) for column in columns), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(width=None if Console().is_terminal else PIPED_WIDTH).print(table, highlight=False)


for command in making.COMMANDS:
    profile_app.command()(command)

# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile`: list and check profiles, import other tools' files, and make profiles."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_sparse_backend.cli import profile_commands
from vllm_sparse_backend.cli.common import MaybeModel, Model, NewProfile, failures, group, say
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import table_of

if TYPE_CHECKING:
    from vllm_sparse_backend.config.profile import Level, Profile
    from vllm_sparse_kernels.methods.base import Method

profile_app = group("List, check, import and make profiles. A profile has a method for each layer and head.")

ProfileName = Annotated[
    str, typer.Argument(metavar="PROFILE", help="Name of a bundled profile, or path of a YAML file.")
]


@profile_app.command("list", epilog="Example: sparse-prefill profile list")
def list_profiles() -> None:
    """List the bundled profiles."""
    from vllm_sparse_backend.config.profile import bundled_profiles, load_profile

    models = {name: load_profile(path).model for name, path in bundled_profiles().items()}
    rows = [
        {"profile": name, "model": "any" if model is None else ", ".join(model.names)} for name, model in models.items()
    ]
    say(table_of("", {"profile": "profile", "model": "model"}, rows))


@profile_app.command(epilog="Example: sparse-prefill profile check mine.yaml MODEL")
def check(profile: ProfileName, model: MaybeModel = None) -> None:
    """Check and describe a profile.

    The checks are those of a server at start-up; exit code 1 if the profile is invalid.
    """
    from vllm_sparse_backend.config.plan import Plan
    from vllm_sparse_backend.config.profile import load_profile
    from vllm_sparse_backend.config.settings import SparsePrefillConfig

    with failures():
        loaded = load_profile(profile)
        shape = loaded.model if model is None else ModelShape.from_folder(model)
        if shape is not None:
            Plan.by_level(SparsePrefillConfig(profile=profile), shape)  # as a server does, on one rank
        _describe(loaded, shape)


@profile_app.command("import", epilog="Example: sparse-prefill profile import patterns.json MODEL --out mine.yaml")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="MInference's patterns, or SharePrefill's clusters.")],
    model: Model,
    out: NewProfile,
) -> None:
    """Convert another tool's JSON file to a profile."""
    from vllm_sparse_backend.calibration.imports import import_profile

    with failures():
        imported = import_profile(file, model)
        write_text(out, imported.to_yaml())
    _describe(imported, imported.model)
    say(f"{imported.provenance.source}\nWritten to {out}")


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


profile_commands.add_commands(profile_app)

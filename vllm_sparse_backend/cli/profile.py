# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile`: list and check profiles, import other tools' files, and make profiles."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_sparse_backend.cli import profile_commands
from vllm_sparse_backend.cli.common import MaybeModel, Model, NewProfile, failures, group, say
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import table_of

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
    with failures():
        _describe(profile, model)


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
        _describe(str(out), model)
    say(f"{imported.provenance.source}\nWritten to {out}")


def _describe(name: str, model: Path | None) -> None:
    """Check a profile as a server does at start-up, on one rank, and describe each level as its log does."""
    from vllm_sparse_backend.config.method_parameters import describe
    from vllm_sparse_backend.config.plan import Plan
    from vllm_sparse_backend.config.profile import load_profile
    from vllm_sparse_backend.config.settings import SparsePrefillConfig

    profile = load_profile(name)
    shape = profile.model if model is None else ModelShape.from_folder(model)
    plans = Plan.by_level(SparsePrefillConfig(profile=name), shape) if shape else {}
    min_tokens = "the server's" if profile.min_tokens is None else profile.min_tokens
    min_query = "the server's" if profile.min_query_tokens is None else profile.min_query_tokens
    say(f"for {profile.model or 'any model'}; min_tokens {min_tokens}, min_query_tokens {min_query}")
    if shape is None:
        say(f"every head: {describe(profile.default)}")
    for plan in plans.values():
        for line in plan.describe_layers():
            say(f"level {plan.level}, {line}" if profile.levels else line)


profile_commands.add_commands(profile_app)

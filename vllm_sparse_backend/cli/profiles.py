"""`sparse-prefill check-profile` and `sparse-prefill import-minference`."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from vllm_sparse_backend.settings.model_shape import ModelShape
    from vllm_sparse_backend.settings.profile import Profile
    from vllm_sparse_kernels.select.base import Method

MODEL_HELP = "A model folder, or its config.json."


def check_profile(
    profile: Annotated[str, typer.Argument(help="Name of a bundled profile, or path of a YAML file.")],
    model: Annotated[Path | None, typer.Argument(help=f"{MODEL_HELP} The profile must fit it.")] = None,
) -> None:
    """Check a profile as a server would at its start, and say what it does; exit code 1 if it is not right."""
    from vllm_sparse_backend.settings.errors import ConfigurationError
    from vllm_sparse_backend.settings.model_shape import ModelShape
    from vllm_sparse_backend.settings.profile import load_profile

    try:
        loaded = load_profile(profile)
        shape = loaded.model
        if model is not None:
            shape = ModelShape.from_folder(model)
        if shape is not None:
            loaded.check_model(shape, profile)
    except ConfigurationError as error:
        raise _failure(error) from error
    _describe(loaded, shape)


def import_minference(
    patterns: Annotated[Path, typer.Argument(help="A JSON file of MInference's offline search.")],
    model: Annotated[Path, typer.Argument(help=MODEL_HELP)],
    out: Annotated[Path, typer.Argument(help="The profile to write; it must not exist yet.")],
) -> None:
    """Turn the result of MInference's own search into a profile."""
    from vllm_sparse_backend.settings import profile
    from vllm_sparse_backend.settings.errors import ConfigurationError

    try:
        imported = profile.import_minference(patterns, model)
        with out.open("x", encoding="utf-8") as file:
            file.write(imported.to_yaml())
    except ConfigurationError as error:
        raise _failure(error) from error
    except OSError as error:
        raise _failure(f"{out}: cannot be written: {error.strerror}") from error
    _describe(imported, imported.model)
    _print(f"Written to {out}")


def _describe(profile: "Profile", shape: "ModelShape | None") -> None:
    from vllm_sparse_backend.settings.methods import describe, summarize

    min_tokens = "the server's" if profile.min_tokens is None else profile.min_tokens
    min_query = "the server's" if profile.min_query_tokens is None else profile.min_query_tokens
    _print(f"for {profile.model or 'any model'}; min_tokens {min_tokens}, min_query_tokens {min_query}")
    if shape is None:
        _print(f"every head: {describe(profile.default)}")
        return
    sparse_layers = [layer for layer in range(shape.num_layers) if layer not in profile.dense_layers]
    heads: dict[Method, list[Method]] = defaultdict(list)
    for layer in sparse_layers:
        for method in profile.methods_of(layer, shape.num_heads):
            heads[method.alike].append(method)
    total = shape.num_layers * shape.num_heads
    for alike in sorted(heads.values(), key=len, reverse=True):
        _print(f"{len(alike)} of {total} heads: {summarize(alike)}")
    if dense := total - len(sparse_layers) * shape.num_heads:
        _print(f"{dense} of {total} heads: in dense_layers, always dense")


def _print(text: str) -> None:
    Console().print(escape(text), highlight=False, soft_wrap=True)


def _failure(error: object) -> typer.Exit:
    Console(stderr=True).print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    app.command()(check_profile)
    app.command()(import_minference)

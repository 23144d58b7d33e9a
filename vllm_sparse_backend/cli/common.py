# SPDX-License-Identifier: Apache-2.0
"""Shared parts of commands: options, parsers of lists, levels and models, and output."""

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vllm_sparse_backend.config.errors import ConfigurationError, not_one_of
from vllm_sparse_backend.evaluation.output_files import require_output_file
from vllm_sparse_backend.evaluation.report import BenchError, CaseReport

if TYPE_CHECKING:
    from vllm_sparse_backend.evaluation.compared_servers import Contestant, Settings
    from vllm_sparse_backend.evaluation.serve_bench import Length

STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors in writing that only the operator can solve: full disk or quota, file limit, read-only file system."""

USAGE = re.compile(r"--[a-z]|[A-Z]+:")
"""Start of a message about the command line: the option or argument."""


TOKENS = r"0*[1-9]\d*"
"""A number of tokens in an option."""


def group(help: str) -> typer.Typer:
    """Return a group of commands, all of which accept -h."""
    return typer.Typer(
        help=help, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )  # fmt: skip


def output(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check an option that names an output file, before measurements begin."""
    if path is not None:
        with failures():
            if str(path) == "-":
                raise ConfigurationError(f"{param.opts[0]}: given '-', expected a file")
            require_output_file(param.opts[0], path)
    return path


def output_folder(param: typer.CallbackParam, path: Path) -> Path:
    """Check an option that names a folder for output files, and make the folder."""
    with failures():
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            expected = "a folder, or a name in an existing, writable folder"
            problem = f"{param.opts[0]}: given {str(path)!r}: {error.strerror}; expected {expected}"
            raise ConfigurationError(problem) from None
        require_output_file(param.opts[0], path / "report.md")
    return path


def new_output(param: typer.CallbackParam, path: Path) -> Path:
    """Check an option that names a new output file."""
    if os.path.lexists(path):
        raise failure(f"{param.opts[0]}: {path} already exists; name another file, or delete it")
    output(param, path)
    return path


def local_model(model: Path | None) -> Path | None:
    """Return a model's local folder; for a model name, its folder in the local hub cache. Downloads nothing."""
    if model is None or model.is_dir() or model.is_file():
        return model
    try:
        from huggingface_hub import try_to_load_from_cache

        cached_config = try_to_load_from_cache(str(model), "config.json")
    except (ImportError, ValueError):  # ValueError: not a valid name for the hub
        cached_config = None
    if isinstance(cached_config, str):
        return Path(cached_config).parent
    raise failure(
        f"MODEL: given {str(model)!r}, expected a model folder, or the name of a model in the local hub cache (to "
        "download a model: hf download NAME)"
    )


_MODEL = typer.Argument(metavar="MODEL", help="Model folder, or a name in the local hub cache.", callback=local_model)
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="JSON file for all results.", callback=output),
]
Model = Annotated[Path, _MODEL]
MaybeModel = Annotated[Path | None, _MODEL]
NewProfile = Annotated[
    Path,
    typer.Option("--out", metavar="FILE", help="The profile to write; it must not exist yet.", callback=new_output),
]
SparseSettings = Annotated[
    list[str] | None,
    typer.Option(metavar="JSON", help="sparse_prefill as JSON, or a profile; repeatable. Default: no settings."),
]
Text = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text file, or folder of *.py and *.md, from which prompts are made."),
]
ServerArgs = Annotated[
    str, typer.Option("--server-args", metavar="ARGS", help="Further arguments for all servers, as one text.")
]


@contextmanager
def failures(go_on: str = "") -> Iterator[None]:
    """Show an error that the operator can solve as one red line without a traceback.

    The exit code is 2 for an error of the command line, otherwise 1. After Ctrl-C, the line ends with ``go_on``, which
    says how to continue.
    """
    try:
        yield
    except (BenchError, ConfigurationError) as error:
        raise failure(error) from error
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        raise failure(f"{error.filename or 'output'}: cannot be written: {error.strerror}") from error
    except KeyboardInterrupt:
        raise failure(f"Stopped. {go_on}".rstrip(), 130) from None


def failure(error: object, code: int | None = None) -> typer.Exit:
    """Print the error in red, and return the exit to raise."""
    Console(stderr=True).print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
    return typer.Exit(code or (2 if USAGE.match(str(error)) else 1))


def say(text: str) -> None:
    Console().print(escape(text), highlight=False, soft_wrap=True)


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def levels_of(texts: Sequence[str] | None) -> list[float | str]:
    """Parse levels as requests give them: numbers as numbers, with 0 and 1 as integers."""
    return [
        int(text) if text in ("0", "1") else float(text) if re.fullmatch(r"0\.\d+", text) else text
        for text in texts or ()
    ]


def token_counts(option: str, text: str) -> list[int]:
    """Parse comma-separated numbers of tokens."""
    return [count for (count,) in _counts_in_parts(option, text, TOKENS, "whole numbers above 0")]


def serve_lengths(
    text: str | None, defaults: Sequence[int], output_tokens: int, model: Path | None
) -> "tuple[Length, ...]":
    """Parse --lengths, such as ``8192,200+32768``; by default, return those that fit into the model's positions."""
    from vllm_sparse_backend.evaluation.serve_bench import Length

    if text is None:
        return tuple(map(Length, prompt_lengths("--lengths", None, defaults, output_tokens, model)))
    form = "whole numbers above 0, or NEW+CACHED"
    return tuple(Length(*counts) for counts in _counts_in_parts("--lengths", text, rf"{TOKENS}(\+{TOKENS})?", form))


def _counts_in_parts(option: str, text: str, pattern: str, form: str) -> list[list[int]]:
    """Return the counts of each part of a list such as ``8192,200+32768``. Raises BenchError."""
    parts = split(text)
    if not parts or not all(re.fullmatch(pattern, part) for part in parts):
        raise BenchError(f"{option}: given {text!r}, expected {form}, separated by commas")
    return [[int(count) for count in part.split("+")] for part in parts]


def settings_of(texts: Sequence[str] | None, model: Path) -> "list[Settings]":
    """Parse --settings for a model. The default is a server without settings."""
    from vllm_sparse_backend.evaluation.compared_servers import Settings

    return [Settings.parse(text, model) for text in texts or ["{}"]]


def require_known(option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check the names that an option has."""
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{option}: {not_one_of(name, known)}")


def prompt_lengths(
    option: str, text: str | None, defaults: Sequence[int], output_tokens: int, model: Path | None
) -> list[int]:
    """Parse prompt lengths; by default, return those that fit into the model's positions with their answers."""
    if text is not None:
        return token_counts(option, text)
    from vllm_sparse_backend.config.model_check import max_positions, read_config

    most = None if model is None else max_positions(read_config(model))
    fitting = [length for length in defaults if most is None or length + output_tokens <= most]
    if not fitting:
        raise BenchError(f"{option}: given none, expected lengths within the {most:,} positions of {model}")
    return fitting


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of commands that compare servers, and their results."""

    model: MaybeModel = None
    settings: SparseSettings = None
    level: Annotated[
        list[str] | None, typer.Option("--level", metavar="LEVEL", help="Level of the requests; repeatable.")
    ] = None
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="A running server; repeatable. The first is the baseline."),
    ] = None
    text: Text = None
    server_args: ServerArgs = ""
    json_path: Json = None

    def contestants(self, max_len: int) -> "list[Contestant]":
        """Return the running servers at --url, or stock vLLM and each setting for the model.

        Started servers accept requests of ``max_len`` tokens. Raises BenchError if the options contradict each other.
        """
        from vllm_sparse_backend.evaluation.compared_servers import Contestant, once_each, servers_to_start

        urls, levels = self.url or (), levels_of(self.level)
        if (self.model is None) == (not urls):
            given = "neither a model nor --url" if self.model is None else "a model and --url"
            raise BenchError(f"MODEL: given {given}, expected a model to serve, or the --url of running servers")
        if self.model is not None:
            settings = settings_of(self.settings, self.model)
            return servers_to_start(self.model, settings, max_len, self.server_args, levels)
        options = (("--settings", self.settings), ("--server-args", self.server_args))
        if useless := [name for name, value in options if value]:
            raise BenchError(f"{', '.join(useless)}: given with running servers, expected only with a MODEL to serve")
        return once_each(chain.from_iterable(Contestant.running(url, levels) for url in urls))

    def report(self, bench: str) -> CaseReport:
        """Return an empty report about these servers, or about this machine."""
        from vllm_sparse_backend.evaluation.vllm_server import device_name

        return CaseReport(bench, ", ".join(self.url or ()) or device_name(), self.json_path)

# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile best|calibrate`: a profile of one's own model, from prompts."""

import errno
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_sparse_backend.cli.common import Chunk, Model, device_of, exit_on_sigterm, failures, folder_for, say
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of, unexpected

if TYPE_CHECKING:
    from vllm_sparse_backend.profiling.job import Job
    from vllm_sparse_backend.profiling.measure import Bound
    from vllm_sparse_backend.profiling.prompts import PromptSet
    from vllm_sparse_backend.settings.crossover import ProfileCrossover
    from vllm_sparse_backend.settings.profile import Profile

Level = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=MEAN[:P99[:P999[:HEADS]]], NAME high or fast: the most error of a head: its mean, p99 "
        "and p99.9 over queries, and the mean of all heads; or NAME=1.5x, best's bound. May be repeated; high=0.1:0.4."
    ),
]


def job_of(
    model: Model,
    out: Annotated[Path, typer.Option(help="The profile to write; it must not exist yet.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="A text, or .jsonl of prompts or chats; may be repeated. Else made of --text."),
    ] = None,
    held_out: Annotated[list[Path] | None, typer.Option(help="The same, for the check at the end.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py, to make prompts of; vLLM's sources.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of made prompts, the most of others.", min=64)] = 32768,
    count: Annotated[int, typer.Option(help="Made prompts.", min=1)] = 3,
    chunk: Chunk = 8192,
    min_tokens: Annotated[
        int | None,
        typer.Option(help="First positions, dense, as the profile then says; 4,096 not judged.", min=0),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, or cpu, where references judge, slowly.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder to go on in after a stop; beside --out.")] = None,
    tell: Any = None,
) -> "Job":
    """The options that both commands have."""
    from vllm_sparse_backend.profiling.capture import default_text, require_model
    from vllm_sparse_backend.profiling.job import Job, Tell
    from vllm_sparse_backend.profiling.judge import Served
    from vllm_sparse_backend.profiling.prompts import make_prompts, read_prompts

    work = _folders(out, work)
    require_model(model, tokens)

    def prompts_of(files: list[Path] | None, count: int, part: int) -> "PromptSet":
        if files:
            return read_prompts(model, files, tokens)
        return make_prompts(model, text or default_text(), tokens, count, part, part)

    return Job(
        model,
        prompts_of(prompts, count, 0),
        prompts_of(held_out, max(1, count // 2), 1),
        Served(chunk, min(4096, tokens // 2) if min_tokens is None else min_tokens),
        work,
        device_of(device),
        None if prompts else 0,
        min_tokens is not None,
        tell=tell or Tell(),
    )


def _folders(out: Path, work: Path | None) -> Path:
    """The run's folder. Raises where that or the profile can't be written."""

    if out.exists():
        raise ConfigurationError(f"--out {out}: exists already: name another file, or delete it")
    if not out.absolute().parent.is_dir():
        raise ConfigurationError(f"--out {out}: there is no folder {out.parent}: make it first")
    folder_for("--out", out.parent)
    work = folder_for("--work", work or out.with_suffix(".work"))
    if work.absolute() == out.absolute():
        raise ConfigurationError(f"--out {out}: the run's folder has that name: name another file, or another --work")
    return work


def _with_job(run: Callable[..., "Profile"]) -> Callable[..., None]:
    """A command with the options of ``job_of`` and its own: ``run(job, **own)`` makes the profile, which is written.

    ``run`` is given what makes the job: what is wrong with its own options is told before prompts are made.
    """
    own = [p for name, p in inspect.signature(run, eval_str=False).parameters.items() if name != "make_job"]
    shared = [p for name, p in inspect.signature(job_of).parameters.items() if name != "tell"]

    def command(**given: Any) -> None:
        from vllm_sparse_backend.profiling.job import Tell

        exit_on_sigterm()
        mine = {p.name: given.pop(p.name) for p in own}
        jobs: list[Job] = []

        def make_job() -> "Job":
            jobs.append(job_of(**given, tell=Tell(shown.begin, shown.step, shown.print)))
            return jobs[0]

        work = given["work"] or given["out"].with_suffix(".work")
        with failures(f"The same command goes on with what {work} holds."), bar("prompts") as shown:
            profile = run(make_job, **mine)
            write_whole(profile, given["out"])
            jobs[0].clear()
        _report(profile, given["out"])

    ordered = sorted([*shared, *own], key=lambda p: p.default is not inspect.Parameter.empty)
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in ordered}
    command.__doc__, command.__name__ = run.__doc__, run.__name__
    return command


def write_whole(profile: "Profile", out: Path) -> None:
    """Whole or not at all, and over no other file. Raises ConfigurationError."""

    aside = out.with_name(f".{out.name}.new")
    try:
        if out.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        aside.write_text(profile.to_yaml(), encoding="utf-8")
        aside.replace(out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigurationError(f"{out}: cannot be written: {error.strerror}") from error


def _report(profile: "Profile", out: Path) -> None:
    for name in profile.level_names[1:]:
        level = profile.at_level(name)
        of = level.provenance
        bounds = ", ".join(f"{what} {value:g}" for what, value in (of.bounds or {}).items())
        say(f"{name}: {bounds}; density {of.density:.3f} over all heads")
        held = ", ".join(f"{what.replace('_', ' ')} {value:.4g}" for what, value in (of.held_out or {}).items())
        say(f"  on held-out prompts: {held}")
        say(f"  {pays(level.crossover)}")
    say(f"Written to {out}")


def pays(found: "ProfileCrossover | None") -> str:
    if found is None:
        return "where it pays was not measured (no CUDA device, or prompts under 4,096 tokens): auto goes by its table"
    where = f"on {found.device} with {', '.join(found.engines)}, up to {found.longest_tokens:,} tokens"
    if found.pays:
        return f"pays from {found.min_tokens:,} tokens on, {found.min_query_tokens:,} of them new: {where}"
    return f"never pays {where}: auto leaves every row dense; expected longer prompts, or a larger bound"


def _bounds(levels: list[str] | None) -> Mapping[str, "Bound"]:
    from vllm_sparse_backend.profiling.measure import Bound
    from vllm_sparse_backend.settings.profile import BOUNDS

    found: dict[str, Bound] = {}
    for text in levels or ("high=0.1:0.4",):
        name, _, rest = text.partition("=")
        try:
            given = [float(number) for number in rest.removesuffix("x").split(":")]
        except ValueError:
            raise ConfigurationError(f"--level: {unexpected(text, 'NAME=MEAN:P99, such as high=0.1:0.4')}") from None
        if name not in BOUNDS:
            raise ConfigurationError(f"--level {text}: {not_one_of(name, BOUNDS)}")
        if not all(number > 0 for number in given) or len(given) > 4 or name in found:
            raise ConfigurationError(f"--level: {unexpected(text, 'errors above 0, and each level once')}")
        if rest.endswith("x") and (len(given) > 1 or given[0] < 1):
            raise ConfigurationError(f"--level: {unexpected(text, 'one number from 1 on before the x')}")
        found[name] = Bound(of_default=given[0]) if rest.endswith("x") else Bound(*given)
    return found


def best(
    make_job: "Callable[[], Job]",
    high: Annotated[float, typer.Option(help="The most that a head loses, ÷ what the default loses.", min=1)] = 1.5,
    fast: Annotated[float | None, typer.Option(help="The same of a second level.", min=1)] = None,
    method: Annotated[list[str] | None, typer.Option(help="A method to choose from; may be repeated. All.")] = None,
) -> "Profile":
    """Per head the cheapest of all methods, in time on this device, that loses little more than the default there."""
    from vllm_sparse_backend.profiling import calibrate as part
    from vllm_sparse_backend.profiling.measure import Bound

    how = part.best(method or part.by_themselves())
    bounds = {name: Bound(of_default=times) for name, times in (("high", high), ("fast", fast)) if times}
    return part.run(make_job(), how, bounds, "sparse-prefill profile best")


def calibrate(
    make_job: "Callable[[], Job]",
    method: Annotated[
        str,
        typer.Option(
            help="minference, sparge_attn+skip (its λ too), or a method with a ladder; NAME:FIELD=VALUE for a part."
        ),
    ],
    level: Level = None,
    distance: Annotated[
        float | None, typer.Option(help="Up to which share_prefill joins heads: 10; the authors' is 40.")
    ] = None,
) -> "Profile":
    """One method, as its paper calibrates it: each head's setting, as sparse as the bound allows; else dense."""
    from vllm_sparse_backend.profiling import calibrate as part

    bounds = _bounds(level)
    how = part.strategy(method, bounds, distance)
    cut = "" if distance is None else f" --distance {distance:g}"
    return part.run(make_job(), how, bounds, f"sparse-prefill profile calibrate --method {method}{cut}")


COMMANDS = tuple(_with_job(run) for run in (best, calibrate))
"""Of ``sparse-prefill profile``."""

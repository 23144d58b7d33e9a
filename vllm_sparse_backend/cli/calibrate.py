# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile search|calibrate|cluster|best`: a profile of one's own model, from prompts."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_sparse_backend.cli.common import device_of, exit_on_sigterm, failures, folder_for

if TYPE_CHECKING:
    from vllm_sparse_backend.profiling.job import Capturer, Job, Tell
    from vllm_sparse_backend.profiling.measure import Bound
    from vllm_sparse_backend.profiling.prompts import PromptSet
    from vllm_sparse_backend.settings.profile import Profile

Level = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=ERROR[:WORST[:RARE[:MEAN]]], high or fast: the most error of a head's output, on average, at the "
        "worst hundredth of queries and at the worst thousandth; and the most that all heads have on average, which is "
        "spent where it saves most. The first is the profile's own; may be repeated. By default high=0.1:0.4."
    ),
]
Margin = Annotated[float, typer.Option(help="Share of a bound that is left to unseen prompts.", min=0.0, max=0.9)]

Unseen = Annotated[
    bool,
    typer.Option(
        help="Leave unseen prompts as much more as the one with the most error has over the others, per head."
    ),
]

DEFAULT_LEVELS = ("high=0.1:0.4",)


def job_of(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    out: Annotated[Path, typer.Option(help="The profile to write; it must not exist yet.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="A text, or .jsonl of prompts or chats; may be repeated. Made of a text unless given."),
    ] = None,
    held_out: Annotated[
        list[Path] | None, typer.Option(help="The same for the check at the end; made of another text unless given.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py, to make prompts of; vLLM's sources unless given.")
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="What made prompts look up, by comma: retrieval, hops, repeats.")
    ] = "retrieval,hops,repeats",
    tokens: Annotated[int, typer.Option(help="Length of made prompts, and the most of others.", min=64)] = 32768,
    count: Annotated[int, typer.Option(help="Made prompts.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of made prompts.")] = 0,
    chunk: Annotated[int, typer.Option(help="Tokens of a step, as --max-num-batched-tokens.", min=1)] = 8192,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Positions up to which all is dense, which the profile will say; without it 4,096 are not judged.",
            min=0,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, or cpu, where references judge, slowly.")] = None,
    through: Annotated[str, typer.Option(help="What runs the model: transformers, or vllm.")] = "transformers",
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that vLLM spreads the model over.", min=1)] = 1,
    work: Annotated[
        Path | None, typer.Option(help="Folder to go on in where a run was broken off; beside --out unless given.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="File of measured costs, kept or read; in the folder unless given.")
    ] = None,
    repeat_heads: Annotated[
        int | None,
        typer.Option(help="Heads that the model's are repeated to where costs are measured; its own if none."),
    ] = None,
    keep_captures: Annotated[bool, typer.Option("--keep-captures", help="Leave captures in the folder.")] = False,
    tell: Any = None,
) -> "Job":
    """The options that all of these commands have."""
    from vllm_sparse_backend.profiling.capture import default_text, require_model
    from vllm_sparse_backend.profiling.job import Job, Tell
    from vllm_sparse_backend.profiling.judge import Served
    from vllm_sparse_backend.profiling.prompts import chosen_kinds, make_prompts, read_prompts
    from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of

    if out.exists():
        raise ConfigurationError(f"--out {out}: exists already: name another file, or delete it")
    if not out.absolute().parent.is_dir():
        raise ConfigurationError(f"--out {out}: there is no folder {out.parent}: make it first")
    folder_for("--out", out.parent)
    work = folder_for("--work", work or out.with_suffix(".work"))
    if work.absolute() == out.absolute():
        raise ConfigurationError(f"--out {out}: the run's folder has that name: name another file, or another --work")
    require_model(model, tokens)
    if through not in ("transformers", "vllm"):
        raise ConfigurationError(f"--through: {not_one_of(through, ('transformers', 'vllm'))}")
    if tensor_parallel_size > 1 and through != "vllm":
        raise ConfigurationError("--tensor-parallel-size: needs --through vllm")
    names, device = chosen_kinds(kinds), device_of(device)

    def prompts_of(files: list[Path] | None, count: int, part: int) -> "PromptSet":
        if files:
            return read_prompts(model, files, tokens)
        return make_prompts(model, text or default_text(), tokens, count, seed + part, names, part)

    return Job(
        model,
        prompts_of(prompts, count, 0),
        prompts_of(held_out, max(1, count // 2), 1),
        Served(chunk, min(4096, tokens // 2) if min_tokens is None else min_tokens),
        work,
        device,
        costs,
        None if prompts else seed,
        min_tokens is not None,
        _vllm_capturer(tensor_parallel_size) if through == "vllm" else None,
        _copies(model, repeat_heads),
        tell or Tell(),
    )


def _copies(model: Path, repeat_heads: int | None) -> int:
    from vllm_sparse_backend.settings.errors import ConfigurationError, unexpected
    from vllm_sparse_backend.settings.model_shape import ModelShape

    num_heads = ModelShape.from_folder(model).num_heads
    if repeat_heads is None:
        return 1
    if repeat_heads < num_heads or repeat_heads % num_heads:
        raise ConfigurationError(f"--repeat-heads: {unexpected(repeat_heads, f'a multiple of the {num_heads} heads')}")
    return repeat_heads // num_heads


def _vllm_capturer(tensor_parallel_size: int) -> "Capturer":
    from vllm_sparse_backend.profiling.vllm_capture import VllmCapturer

    return VllmCapturer(tensor_parallel_size)


def _with_job(run: Callable[..., "Profile"]) -> Callable[..., None]:
    """A command with the options of ``job_of`` and its own: ``run(job, **own)`` makes the profile, which is written."""
    own = [p for name, p in inspect.signature(run, eval_str=False).parameters.items() if name != "job"]
    shared = [p for name, p in inspect.signature(job_of).parameters.items() if name != "tell"]

    def command(**given: Any) -> None:
        exit_on_sigterm()
        mine = {p.name: given.pop(p.name) for p in own}
        with failures(), _progress() as tell:
            profile = run(job := job_of(**given, tell=tell), **mine)
            _write(profile, given["out"])
            if not given["keep_captures"]:
                job.clear()
            _report(profile, job.shape.num_heads * job.shape.num_layers, given["out"])

    ordered = sorted([*shared, *own], key=lambda p: p.default is not inspect.Parameter.empty)
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in ordered}
    command.__doc__, command.__name__ = run.__doc__, run.__name__
    return command


@contextmanager
def _progress() -> Iterator["Tell"]:
    """A bar on stderr with the time left."""
    from vllm_sparse_backend.profiling.job import Tell

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prompts", total=None)
        yield Tell(
            lambda what, steps: progress.reset(task, description=what, total=steps),
            lambda: progress.advance(task),
            lambda text: progress.update(task, description=escape(text)),
        )


def _write(profile: "Profile", out: Path) -> None:
    """Whole or not at all."""
    aside = out.with_name(f".{out.name}.new")
    aside.write_text(profile.to_yaml(), encoding="utf-8")
    aside.replace(out)


def _report(profile: "Profile", num_heads: int, out: Path) -> None:
    console = Console()
    for name in profile.level_names[1:] or (None,):
        of = (profile.at_level(name) if name else profile).provenance
        bounds = ", ".join(f"{what} {value:g}" for what, value in (of.bounds or {}).items())
        console.print(f"{name or 'bounds'}: {bounds}; density {of.density:.3f} over {num_heads} heads", highlight=False)
        held = ", ".join(f"{what.replace('_', ' ')} {value:.4g}" for what, value in (of.held_out or {}).items())
        console.print(f"  on held-out prompts: {held}", highlight=False, soft_wrap=True)
    console.print(f"Written to {out}", highlight=False, soft_wrap=True)


def _bounds(levels: list[str] | None) -> dict[str, "Bound"]:
    from vllm_sparse_backend.profiling.measure import Bound
    from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of, unexpected
    from vllm_sparse_backend.settings.profile import BOUNDS

    found: dict[str, Bound] = {}
    for text in levels or DEFAULT_LEVELS:
        name, _, rest = text.partition("=")
        try:
            given = [float(number) for number in rest.split(":")]
            error, worst, rare, mean = [*given, *[math.inf] * 3][:4]
            bound = Bound(error, worst, rare, mean)
        except ValueError:
            raise ConfigurationError(f"--level: {unexpected(text, 'NAME=ERROR:WORST, such as high=0.1:0.4')}") from None
        if name not in BOUNDS:
            raise ConfigurationError(f"--level {text}: {not_one_of(name, BOUNDS)}")
        if not all(number > 0 for number in given) or len(given) > 4 or name in found:
            raise ConfigurationError(f"--level: {unexpected(text, 'errors above 0, and each level once')}")
        found[name] = bound
    return found


def best(
    job: "Job",
    level: Level = None,
    margin: Margin = 0.1,
    unseen: Unseen = True,
    ladders: Annotated[
        str | None,
        typer.Option(help="Names of settings to choose from, by comma, such as sale or sale+half; else all."),
    ] = None,
    no_means: Annotated[bool, typer.Option("--no-means", help="Leave out means in place of dropped blocks.")] = False,
) -> "Profile":
    """Per head the cheapest of all methods, in time on this device, whose output error holds the bound; else dense."""
    from vllm_sparse_backend.profiling import balanced
    from vllm_sparse_backend.profiling import best as part
    from vllm_sparse_backend.profiling.job import run
    from vllm_sparse_backend.profiling.ladders import LADDERS
    from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of

    names = [name.strip() for name in ladders.split(",")] if ladders else list(LADDERS)
    for name in names:
        if name not in LADDERS:
            raise ConfigurationError(f"--ladders: {not_one_of(name, LADDERS)}")
    among = part.candidates(not no_means, names)
    bounds = _bounds(level)
    return run(job, balanced.search_of(job, among, bounds), bounds, "sparse-prefill profile best", margin, unseen)


def search(job: "Job", level: Level = None, margin: Margin = 0.1, unseen: Unseen = True) -> "Profile":
    """MInference's pattern for each head: candidates of equal measured cost, the one with the least error of output."""
    from vllm_sparse_backend.profiling import minference
    from vllm_sparse_backend.profiling.job import run
    from vllm_sparse_backend.settings.errors import ConfigurationError

    bounds = _bounds(level)
    if any(math.isfinite(bound.mean) for bound in bounds.values()):
        raise ConfigurationError(
            "--level: profile search chooses among patterns of equal cost, and spends no error where it saves most: "
            "expected no bound of the mean of all heads, or profile best --ladders a_shape,vertical_slash,block_sparse"
        )
    return run(job, minference.search, bounds, "sparse-prefill profile search", margin, unseen)


def calibrate(
    job: "Job",
    method: Annotated[
        str,
        typer.Option(
            help="sparge_attn, sale, anchor_attention, flex_vertical_slash, or beyond its paper as sale+wide."
        ),
    ],
    level: Level = None,
    margin: Margin = 0.1,
    unseen: Unseen = True,
) -> "Profile":
    """One method's threshold for each head, as sparse as the bound allows; heads that hold none are dense.

    Where a level bounds the mean of all heads too, heads choose among all settings of the method, beyond its paper.
    """
    from vllm_sparse_backend.profiling import balanced
    from vllm_sparse_backend.profiling.costs import PairCosts
    from vllm_sparse_backend.profiling.job import run
    from vllm_sparse_backend.profiling.ladders import SEARCHES, settings_of
    from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of

    if method not in SEARCHES:
        raise ConfigurationError(f"--method: {not_one_of(method, SEARCHES)}")
    source, bounds = f"sparse-prefill profile calibrate --method {method}", _bounds(level)
    bounded = {name for name, bound in bounds.items() if math.isfinite(bound.mean)}
    if bounded and (bounded != set(bounds) or not (among := settings_of(method))):
        raise ConfigurationError(
            f"--level, --method {method}: a bound of the mean of all heads is for all levels or none, and for "
            f"{', '.join(name for name in SEARCHES if settings_of(name))}"
        )
    search = balanced.search_of(job, among, bounds, PairCosts(job.shape.num_heads)) if bounded else SEARCHES[method]
    return run(job, search, bounds, source, margin, unseen)


def cluster(
    job: "Job",
    level: Level = None,
    margin: Margin = 0.1,
    unseen: Unseen = True,
    method: Annotated[
        str, typer.Option(help="share_prefill, or share_prefill+spread, whose lines queries all over a chunk estimate.")
    ] = "share_prefill",
    distance: Annotated[float, typer.Option(help="Up to which heads are joined; 40 in the authors' file.")] = 10.0,
    side: Annotated[
        int | None, typer.Option(help="Of the maps that heads are told by; the paper's 1,936, or what prompts allow.")
    ] = None,
) -> "Profile":
    """SharePrefill: clusters of heads with alike attention, and the least γ of each head that holds a bound there."""
    from vllm_sparse_backend.profiling import clustered
    from vllm_sparse_backend.profiling.share_prefill import BASES
    from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of

    if method not in BASES:
        raise ConfigurationError(f"--method: {not_one_of(method, BASES)}")
    return clustered.cluster(job, _bounds(level), distance, side, method, margin, unseen)


COMMANDS = tuple(_with_job(run) for run in (best, search, calibrate, cluster))
"""Of ``sparse-prefill profile``."""

# SPDX-License-Identifier: Apache-2.0
"""`sparse-prefill profile`: list and check profiles, import other tools' files, and make profiles from prompts."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_sparse_backend.cli.commands import add_command
from vllm_sparse_backend.cli.common import (
    MaybeModel,
    Model,
    NewProfile,
    failures,
    group,
    require_known,
    say,
)
from vllm_sparse_backend.cli.progress import bar
from vllm_sparse_backend.config.errors import ConfigurationError, not_one_of, refusal
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.evaluation.output_files import write_text
from vllm_sparse_backend.evaluation.report import table_of
from vllm_sparse_backend.progress import Progress

if TYPE_CHECKING:
    from vllm_sparse_backend.calibration.judge import Bound
    from vllm_sparse_backend.calibration.loop import Job
    from vllm_sparse_backend.config.profile import Profile

profile_app = group("List, check, import and make profiles. A profile has a method for each layer and head.")

_NUMBER = r"\d+(?:\.\d+)?"
LEVEL_BOUND = re.compile(
    rf"\w+=(?:(?P<of_default>{_NUMBER})x|(?P<absolute>{_NUMBER})abs|(?P<error>{_NUMBER})(?::(?P<p99>{_NUMBER}))?)"
)
"""A level's name and bound. The names of the groups are those of ``Bound``'s fields."""


@profile_app.command("list", epilog="Example: sparse-prefill profile list")
def list_profiles() -> None:
    """List the bundled profiles."""
    from vllm_sparse_backend.config.profile import bundled_profiles, load_profile

    rows = []
    for name in bundled_profiles():
        model = load_profile(name).model
        rows.append({"profile": name, "model": "any" if model is None else ", ".join(model.names)})
    say(table_of("", {"profile": "profile", "model": "model"}, rows))


@profile_app.command(epilog="Example: sparse-prefill profile check mine.yaml MODEL")
def check(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="Name of a bundled profile, or path of a YAML file.")
    ],
    model: MaybeModel = None,
) -> None:
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
        _describe(str(out.resolve()), model)  # no bundled profile of the same name
    say(f"{imported.provenance['source']}\nWritten to {out}")


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


@dataclass(frozen=True, kw_only=True)
class JobOptions(ABC):
    """Options of `best` and `calibrate`: a model, prompts and the output file."""

    model: Model
    out: NewProfile
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A text, or .jsonl of prompts or chats; repeatable. Default: made from --text."
        ),
    ] = None
    held_out: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="The same, for the final check.")] = None
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text file, or folder of *.py, to make prompts from. Default: vLLM's sources."
        ),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Length of generated prompts, and limit for --prompts. Default: 32,768, or the model's positions.",
            min=64,
        ),
    ] = None
    count: Annotated[int, typer.Option(metavar="N", help="Number of generated prompts.", min=1)] = 3
    chunk: Annotated[
        int, typer.Option(metavar="N", help="Maximum tokens of a step (--max-num-batched-tokens).", min=1)
    ] = 8192
    min_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Dense first positions, set in the profile. Default: not set; errors leave out the first 4,096.",
            min=0,
        ),
    ] = None

    @abstractmethod
    def search(self) -> "Callable[[Job], Profile]":
        """Check the options, and return the search. Called before prompts are made, which takes time."""

    def run(self) -> None:
        """Make the profile, write it, and report its figures."""
        with (
            failures(),
            bar("prompts") as progress,
            TemporaryDirectory(prefix=".sparse-prefill-", dir=self.out.parent) as folder,
        ):
            search = self.search()
            profile = search(self._job(Path(folder), progress))
            write_text(self.out, profile.to_yaml())
        _report(profile, self.out)

    def _job(self, folder: Path, progress: Progress) -> "Job":
        import torch

        from vllm_sparse_backend.calibration.capture import default_text, prompt_tokens
        from vllm_sparse_backend.calibration.judge import Served
        from vllm_sparse_backend.calibration.loop import Job
        from vllm_sparse_backend.calibration.prompts import make_prompts, read_prompts
        from vllm_sparse_backend.streaming_heads import found_by_default

        tokens = prompt_tokens(self.model, self.tokens)

        def prompts_of(files: list[Path] | None, count: int, part: int) -> list[list[int]]:
            if files:
                return read_prompts(self.model, files, tokens)
            return make_prompts(self.model, self.text or default_text(), tokens, count, part, part)

        return Job(
            self.model,
            prompts_of(self.prompts, self.count, 0),
            prompts_of(self.held_out, max(1, self.count // 2), 1),
            Served(
                self.chunk,
                min(4096, tokens // 2) if self.min_tokens is None else self.min_tokens,
                found_by_default(self.model, self.chunk),
            ),
            folder,
            torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            seed=None if self.prompts else 0,
            min_tokens=self.min_tokens,
            progress=progress,
        )


@dataclass(frozen=True, kw_only=True)
class Best(JobOptions):
    """Choose each head's fastest method on this device.

    Each head's error is close to that of the default method.
    """

    high: Annotated[
        float, typer.Option(metavar="FACTOR", help="Largest error of a head, relative to the default method's.", min=1)
    ] = 1.5
    fast: Annotated[float | None, typer.Option(metavar="FACTOR", help="The same for a second level.", min=1)] = None
    method: Annotated[
        list[str] | None,
        typer.Option("--method", metavar="METHOD", help="A method to choose from; repeatable. Default: all."),
    ] = None

    def search(self) -> "Callable[[Job], Profile]":
        from vllm_sparse_backend.calibration import loop
        from vllm_sparse_backend.calibration.judge import Bound
        from vllm_sparse_backend.config.method_parameters import make_method

        allowed = loop.independent_methods()
        methods = self.method or allowed
        require_known("--method", methods, allowed)
        factors = {"high": self.high, "fast": self.fast}
        bounds = {name: Bound(of_default=factor) for name, factor in factors.items() if factor}

        def search(job: "Job") -> "Profile":
            choose = loop.search_for_cheapest(job, methods)
            profile = loop.calibrate(job, choose, bounds, "sparse-prefill profile best")
            # The default method is a candidate for every head, so no head takes longer than with it, and its lengths
            # apply. The lengths of other methods were measured with one method in all heads, and would keep longer
            # prompts dense.
            return profile.model_copy(update={"lengths_of": make_method("default", {})})

        return search


@dataclass(frozen=True, kw_only=True)
class Calibrate(JobOptions):
    """Calibrate one method as its paper does.

    Each head gets its sparsest setting within the bound, or stays dense.
    """

    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="minference, sale, share_prefill (without --level), sparge_attn, sparge_attn+skip (with its λ), or a "
            "method with a ladder.",
        ),
    ]
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BOUND",
            help="Error bound of a level (high or fast), as NAME=MEAN[:P99]: the largest mean and p99 over "
            "a head's queries; or NAME=1.5x, as in best; or NAME=0.4abs, as in SALE: |o - dense| summed over channels, "
            "mean over tokens. Repeatable. Default: high=0.1:0.4.",
        ),
    ] = None

    def search(self) -> "Callable[[Job], Profile]":
        from vllm_sparse_backend.calibration import loop
        from vllm_sparse_backend.calibration.papers.share_prefill import require_scipy, shared_heads
        from vllm_sparse_backend.config.profile import Profile

        require_known("--method", [self.method], {*loop.PAPERS, *loop.independent_methods()})
        command = f"sparse-prefill profile calibrate --method {self.method}"
        if self.method != loop.SHARE_PREFILL:
            bounds = _parse_bounds(self.level)
            return lambda job: loop.calibrate(job, loop.search_of_method(job, self.method), bounds, command)
        if self.level is not None:
            raise ConfigurationError(
                "--level: given with --method share_prefill, expected none: the paper has one γ for all heads; leave "
                "it out"
            )
        require_scipy()
        return lambda job: Profile.of_heads(shared_heads(job), job.provenance(command), **job.profile_fields)


add_command(profile_app, Best, "Example: sparse-prefill profile best MODEL --out mine.yaml")
add_command(profile_app, Calibrate, "Example: sparse-prefill profile calibrate MODEL --method sale --out mine.yaml")


def _report(profile: "Profile", out: Path) -> None:
    for name in profile.level_names[1:]:
        provenance = profile.at_level(name).provenance
        bounds = ", ".join(f"{quantity} {value:g}" for quantity, value in provenance["bounds"].items())
        say(f"{name}: {bounds}; density {provenance['density']:.3f} over all heads")
        figures = provenance["held_out"].items()
        held_out = ", ".join(f"{quantity.replace('_', ' ')} {value:.4g}" for quantity, value in figures)
        say(f"  on held-out prompts: {held_out}")
    say(f"Written to {out}")


def _parse_bounds(levels: list[str] | None) -> Mapping[str, "Bound"]:
    """Parse the bounds of --level options, by the level's name."""
    from vllm_sparse_backend.calibration.judge import Bound
    from vllm_sparse_backend.config.profile import BOUNDS

    bounds: dict[str, Bound] = {}
    for text in levels or ("high=0.1:0.4",):
        name, match = text.partition("=")[0], LEVEL_BOUND.fullmatch(text)
        limits = {limit: float(number) for limit, number in match.groupdict().items() if number} if match else {}
        if not limits or not all(limits.values()) or name in bounds:
            expected = "NAME=MEAN:P99, NAME=1.5x or NAME=0.4abs, with numbers above 0, and each level only once"
            raise refusal("--level", text, expected)
        if name not in BOUNDS:
            raise ConfigurationError(f"--level {text}: {not_one_of(name, BOUNDS)}")
        if limits.get("of_default", 1) < 1:
            raise refusal("--level", text, "a number of at least 1 before the x")
        bounds[name] = Bound(**limits)
    return bounds

# SPDX-License-Identifier: Apache-2.0
"""What one setting for all heads does on the prompts that a profile was calibrated on, for ``benchmarks.profiles``.

    sparse-prefill profile calibrate MODEL --method sale --work FOLDER --keep-captures --out NAME.yaml …
    python -m benchmarks.one_setting MODEL --method sale --work FOLDER …
    python -m benchmarks.profiles NAME.yaml --against NAME.yaml=FOLDER

Options are those of the calibration: the folder refuses other prompts. Into its ``one-setting.json`` goes what came of
every head under each setting: ``own`` are those of the method's paper, of which an operator without a profile takes
one; ``every`` all that heads choose from under a bound of the mean of all heads. MInference's own is vertical-slash for
all. SharePrefill has one setting and all clusters that were found, its layers in order, as a server runs them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_sparse_backend.cli.calibrate import job_of
from vllm_sparse_backend.profiling.clustered import company_of, priced_settings
from vllm_sparse_backend.profiling.ladders import LADDERS, settings_of

from vllm_sparse_backend.cli.common import failures
from vllm_sparse_backend.measure.report import write_json
from vllm_sparse_backend.profiling.flow import Flow
from vllm_sparse_backend.profiling.job import Job
from vllm_sparse_backend.profiling.measure import Figures
from vllm_sparse_backend.profiling.share_prefill import BASES, Clusters
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of
from vllm_sparse_backend.settings.methods import parameters_of
from vllm_sparse_kernels.methods.base import Method
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.share_prefill.method import SharePrefill

FILE = "one-setting.json"
PATTERNS = ("a_shape", "vertical_slash", "block_sparse")
METHODS = ("minference", "sparge_attn", "sale", "anchor_attention", "flex_vertical_slash", "share_prefill")

Outcomes = list[dict[str, Any]]
"""Of each setting its parameters, and of every head of the model [error, worst, rare, density]."""


def settings(method: str) -> tuple[Sequence[Method], Sequence[Method]]:
    """(own, every) of a method other than SharePrefill."""
    if method == "minference":
        return LADDERS["vertical_slash"], [one for name in PATTERNS for one in LADDERS[name]]
    return LADDERS[method], settings_of(method)


def judged(job: Job, among: Sequence[Method]) -> list[list[list[Figures] | None]]:
    """By setting, of each layer what comes of its heads; None where none goes sparse."""
    found: list[list[list[Figures] | None]] = [[None] * job.shape.num_layers for _ in among]
    for layer in job.layers:
        judge = job.judge(layer)
        for setting, of in zip(among, found, strict=True):
            of[layer] = judge.judge([setting] * job.shape.num_heads)
        judge.save()
    return found


def shared(job: Job, clusters: Clusters, base: SharePrefill) -> Iterator[tuple[Method, list[list[Figures] | None]]]:
    """The same of SharePrefill, by all that its heads may choose but for clusters, which alone are handed on."""
    found = dict[SharePrefill, list[list[Figures] | None]]((setting, []) for setting in priced_settings(base))
    flow = Flow(job, "prompts", company_of(base, clusters))
    for layer, numbers in enumerate(clusters):
        judge = flow.judge() if layer in job.layers else None
        for setting, of in found.items():
            of.append(judge.judge([replace(setting, cluster=number) for number in numbers]) if judge else None)
        if judge:
            judge.save()
        flow.add([replace(base, cluster=number) if judge else Dense() for number in numbers])
    yield from found.items()


def outcome(setting: Method, layers: Sequence[Sequence[Figures] | None], num_heads: int) -> dict[str, Any]:
    heads = [
        [one.error, one.worst, one.rare, one.density] for of in layers for one in of or ()
    ] + [[0.0, 0.0, 0.0, 1.0]] * (num_heads * sum(of is None for of in layers))  # fmt: skip
    return {"setting": parameters_of(setting), "heads": heads}


def measure(job: Job, method: str) -> dict[str, Any]:
    job.enter()
    num_heads = job.shape.num_heads
    if method == "share_prefill":
        files = sorted(job.folder.glob("clusters-*.json"))
        if len(files) != 1:
            raise ConfigurationError(
                f"{job.folder}: has {len(files)} files of clusters, expected a `profile cluster`'s"
            )
        clusters = json.loads(files[0].read_text(encoding="utf-8"))
        by_base = {
            name: [outcome(setting, found, num_heads) for setting, found in shared(job, clusters, base)]
            for name, base in BASES.items()
        }
        own = [one for one in by_base[method] if not one["setting"].get("block_means")]
        every = [one for of in by_base.values() for one in of]
    else:
        own, every = (
            [outcome(one, found, num_heads) for one, found in zip(among, judged(job, among), strict=True)]
            for among in settings(method)
        )
    return {"method": method, "own": own, "every": every}


def main(
    model: Annotated[Path, typer.Argument(help="As the calibration's.")],
    method: Annotated[str, typer.Option(help=", ".join(METHODS))],
    work: Annotated[Path, typer.Option(help="The calibration's folder, captures kept.")],
    text: Annotated[Path | None, typer.Option(help="As the calibration's.")] = None,
    tokens: Annotated[int, typer.Option(help="As the calibration's.")] = 32768,
    count: Annotated[int, typer.Option(help="As the calibration's.")] = 3,
) -> None:
    with failures():
        if method not in METHODS:
            raise ConfigurationError(f"--method: {not_one_of(method, METHODS)}")
        job = job_of(model, work / "none.yaml", text=text, tokens=tokens, count=count, work=work)
        write_json(work / FILE, measure(job, method))


if __name__ == "__main__":
    typer.run(main)

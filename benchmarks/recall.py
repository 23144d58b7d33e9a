"""What each method keeps of a trained model's attention: recall and density at its paper's defaults, and curves.

    python -m benchmarks.recall MODEL [--lengths 16384,32768] [--device cuda] [--text FOLDER] [--curves JSON]

MODEL is a folder in Hugging Face's format. Its queries, keys and values are captured on text that is given, by default
the Python sources of the installed vLLM; methods then select as a server would, in chunks of 8,192 (vLLM's default),
and are held against exact attention. SharePrefill's clusters come from the tokens that follow the longest prompt in the
text. ``--curves`` writes all figures as JSON; ``benchmarks.recall_figures`` makes tables and pictures of them.
"""

import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import recall_figures
from vllm_sparse_backend.bench.report import Report
from vllm_sparse_backend.calibrate.share_prefill import Clusters
from vllm_sparse_backend.evaluate.capture import Capture, capture, default_text, read_tokens, text_files
from vllm_sparse_backend.evaluate.clusters import head_clusters, plan_of
from vllm_sparse_backend.evaluate.quality import Asked, Measured, measure_plans
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of
from vllm_sparse_kernels.select import METHODS

SWEEPS: dict[str, list[dict[str, Any]]] = {
    "a_shape": [{"local_tokens": n} for n in (256, 1024, 2048, 8192, 16384)],
    "anchor_attention": [{"theta": x} for x in (4.0, 6.0, 8.0, 10.0, 14.0, 16.0)],
    "block_sparse": [{"top_blocks": n} for n in (8, 16, 32, 64, 160, 256)],
    "dense": [],
    "flex_vertical_slash": [{"gamma": x} for x in (0.5, 0.7, 0.8, 0.95, 0.98)],
    "sale": [{"tau": x} for x in (0.064, 0.032, 0.016, 0.008, 0.002, 0.001)],
    "share_prefill": [{"gamma": x} for x in (0.5, 0.7, 0.8, 0.95, 0.98)],
    "sparge_attn": [{"kept_mass": x} for x in (0.3, 0.5, 0.7, 0.8, 0.95, 0.98)],
    "vertical_slash": [{"vertical_tokens": 1000 * n // 16, "slash_tokens": 6096 * n // 16} for n in (1, 2, 4, 8, 24)],
}
"""Each method's main knob, beside the default."""

CLUSTER_TOKENS = 8192


def evaluate(
    captured: Capture, methods: list[str], clusters: Clusters | None, chunk_tokens: int, device: str, sweep: bool
) -> dict[str, Any]:
    """One prompt's figures, as the JSON of the curves has them."""
    settings = [(name, params) for name in methods for params in ([{}, *SWEEPS.get(name, [])] if sweep else [{}])]
    with tempfile.TemporaryDirectory() as folder:
        asked, ran, left_out = [], [], {}
        for name, params in settings:
            try:
                asked.append(
                    Asked(plan_of(name, params, captured.shape, clusters, Path(folder)), with_output=not params)
                )
                ran.append((name, params))
            except ConfigurationError as error:
                left_out[name] = str(error)
        measured = measure_plans(captured, asked, chunk_tokens, device)
    return {
        "model": captured.model,
        "num_tokens": captured.num_tokens,
        "chunk_tokens": chunk_tokens,
        "prompt_sha256": captured.prompt_sha256,
        "layers": measured.layers,
        "layers_left_out": captured.left_out,
        "methods_left_out": left_out,
        "clusters": clusters,
        "bounds": {str(n): dict(zip(("density", "recall"), bound.curve())) for n, bound in measured.bounds.items()},
        "settings": _figures(ran, measured),
    }


def _figures(ran: list[tuple[str, dict[str, Any]]], measured: Measured) -> list[dict[str, Any]]:
    figures = []
    for (name, params), kept in zip(ran, measured.kept, strict=True):
        row: dict[str, Any] = {"method": name, "params": params}
        row |= {"recall": kept.mean_recall, "density": kept.mean_density}
        if not params:
            row |= {"recall_of_heads": _rounded(kept.recall), "density_of_heads": _rounded(kept.density)}
            row |= {"output_error": kept.mean_error, "output_error_of_layers": _rounded([kept.output_error])[0]}
        figures.append(row)
    return figures


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(x, 4) for x in row] for row in rows]


def add_figures(figures: dict[str, Any], report: Report) -> None:
    """Rows of the results file, at the papers' defaults."""
    for row in figures["settings"]:
        if not row["params"]:
            what = f"{row['method']}, {recall_figures.length_name(figures)}, {figures['model']}"
            report.add_figure(f"{what}: recall at the paper's defaults", row["recall"], "share", "higher")
            report.add_figure(f"{what}: density at the paper's defaults", row["density"], "share", "lower")
            report.add_figure(f"{what}: relative error of the output", row["output_error"], "relative", "lower")


def merge(path: Path, figures: dict[str, Any]) -> None:
    """Put one prompt's figures into the JSON, in the place of those of an equal run."""
    prompts = json.loads(path.read_text()) if path.exists() else []
    same = [figures[key] for key in ("model", "num_tokens", "chunk_tokens")]
    prompts = [old for old in prompts if [old[key] for key in ("model", "num_tokens", "chunk_tokens")] != same]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*prompts, figures]) + "\n")


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model in Hugging Face's format.")],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "16384,32768",
    device: Annotated[str, typer.Option(help="cuda, or cpu (references select; slow).")] = (
        "cuda" if torch.cuda.is_available() else "cpu"
    ),
    methods: Annotated[str, typer.Option(help="Methods to measure.")] = ",".join(METHODS),
    text: Annotated[
        Path | None, typer.Option(help="Text file, or folder of *.py; vLLM's sources unless given.")
    ] = None,
    begin_token: Annotated[bool, typer.Option(help="Begin prompts with the tokenizer's begin token.")] = True,
    chunk: Annotated[int, typer.Option(help="Tokens of a step, as --max-num-batched-tokens; 0: all at once.")] = 8192,
    sweep: Annotated[bool, typer.Option(help="Measure the curves, not the defaults alone.")] = True,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps captures for the next run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
    curves: Annotated[Path | None, typer.Option(help="JSON of all figures, for benchmarks.recall_figures.")] = None,
) -> None:
    names = split(methods)
    if unknown := [name for name in names if name not in METHODS]:
        raise ConfigurationError(f"--methods: {not_one_of(unknown[0], METHODS)}")
    sizes = sorted(int(n) for n in split(lengths))
    chunk_option = "" if chunk == 8192 else f" --chunk {chunk}"
    command = f"python -m benchmarks.recall {shlex.quote(model.name)} --lengths {lengths}{chunk_option}"
    name_of_device = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    report = Report("recall", name_of_device, results_path=out, command=command)
    files = text_files(text or default_text())
    with tempfile.TemporaryDirectory() as aside:
        folder = cache or Path(aside)
        clusters = None
        if "share_prefill" in names:
            length = min(CLUSTER_TOKENS, sizes[-1])
            prompt = read_tokens(model, files, length, begin_token, skip=sizes[-1])
            clusters = head_clusters(capture(model, prompt, folder / "clusters", device), device)
        for length in sizes:
            began = time.monotonic()
            captured = capture(model, read_tokens(model, files, length, begin_token), folder / str(length), device)
            figures = evaluate(captured, names, clusters, chunk or length, device, sweep)
            add_figures(figures, report)
            recall_figures.show(figures)
            print(f"{length} tokens: {time.monotonic() - began:.0f} s")
            if curves is not None:
                merge(curves, figures)


if __name__ == "__main__":
    typer.run(main)

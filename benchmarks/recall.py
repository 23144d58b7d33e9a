# SPDX-License-Identifier: Apache-2.0
"""What each method keeps of a trained model's attention: recall and density at its paper's defaults, and curves.

    python -m benchmarks.recall MODEL [--lengths 16384,32768] [--device cuda] [--text FOLDER] [--curves JSON]

MODEL is a folder in Hugging Face's format. Its queries, keys and values are captured on text that is given, by default
the Python sources of the installed vLLM; methods then select as a server would, in chunks of 8,192 (vLLM's default),
and are held against exact attention. SharePrefill's clusters come from the tokens that follow the longest prompt in the
text. ``--curves`` writes all figures as JSON; ``benchmarks.recall_figures`` makes tables and pictures of them. What
measures is that of `sparse-prefill eval attention`, which takes captures as they are, and single queries too.
"""

import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import recall_figures
from benchmarks.attention import Figures, Setting, add_figures, measure, swept
from vllm_sparse_backend.cli.common import split
from vllm_sparse_backend.measure.report import Report
from vllm_sparse_backend.profiling.capture import capture, default_text, read_tokens, text_files
from vllm_sparse_backend.profiling.clusters import head_clusters
from vllm_sparse_backend.settings.errors import ConfigurationError, not_one_of
from vllm_sparse_kernels.methods import METHODS

CLUSTER_TOKENS = 8192


def merge(path: Path, figures: Figures) -> None:
    """Put one prompt's figures into the JSON, in the place of those of an equal run."""
    prompts = json.loads(path.read_text()) if path.exists() else []
    same = [figures[key] for key in ("model", "num_tokens", "chunk_tokens")]
    prompts = [old for old in prompts if [old[key] for key in ("model", "num_tokens", "chunk_tokens")] != same]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*prompts, figures]) + "\n")


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
            settings = [Setting(name) for name in names]
            figures = measure(captured, swept(settings) if sweep else settings, clusters, chunk or length, device)
            add_figures(figures, report)
            recall_figures.show(figures)
            print(f"{length} tokens: {time.monotonic() - began:.0f} s")
            if curves is not None:
                merge(curves, figures)


if __name__ == "__main__":
    typer.run(main)

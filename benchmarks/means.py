# SPDX-License-Identifier: Apache-2.0
"""What means in place of dropped blocks do to a layer's output, at the same index: docs/results/quality.json.

    python -m benchmarks.means MODEL [--length 3072] [--text FOLDER] [--results docs/results/quality.json]

Each method selects twice the same on captured queries and keys; once its heads attend to means of what is dropped as
well. Of each layer, ‖O − Õ‖₂ / ‖O‖₂ with means over that without; the figure is the mean of the layers where this is
less than 1. A profile can leave means out of the others. A mean counts as one key: of 64 dropped ones, one more.
"""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer

from benchmarks.kept import Asked, measure_plans
from benchmarks.tables import markdown_table
from vllm_sparse_backend.measure.report import FIELDS, merge_figures
from vllm_sparse_backend.profiling.capture import Capture, capture, default_text, read_tokens, text_files
from vllm_sparse_backend.settings.config import SparsePrefillConfig
from vllm_sparse_backend.settings.plan import Plan

MOST = 0.8
SETTINGS: dict[str, dict[str, Any]] = {
    "vertical_slash": {"vertical_tokens": 64, "slash_tokens": 128},
    "sparge_attn": {"kept_mass": 0.6, "min_similarity": -1.0},
    "sale": {"tau": 0.1},
}
"""So sparse that much is dropped of a short prompt too."""


def ratios(captured: Capture, method: str, params: dict[str, Any], device: str) -> tuple[list[float], list[float]]:
    """Of each layer: the error with means over that without, and the density."""
    plans = [
        Plan.build(SparsePrefillConfig(method=method, params=params | more), captured.shape)
        for more in ({}, {"block_means": True})
    ]
    without, with_means = measure_plans(
        captured, [Asked(plan, with_output=True) for plan in plans], captured.num_tokens, device, bounds=()
    ).kept
    assert without.density == with_means.density, "means change nothing of what is selected"
    errors = zip(with_means.output_error, without.output_error, strict=True)
    return [one / other for one, other in errors], [fmean(heads) for heads in without.density]


def main(
    model: Annotated[Path, typer.Argument(help="Folder in Hugging Face's format.")],
    length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 3072,
    text: Annotated[Path | None, typer.Option(help="A text file, or folder of *.py; else vLLM's sources.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu, where references select and attend.")] = (
        "cuda" if torch.cuda.is_available() else "cpu"
    ),
    results: Annotated[Path | None, typer.Option(help="Results file to write into.")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as aside:
        prompt = read_tokens(model, text_files(text or default_text()), length)
        captured = capture(model, prompt, Path(aside) / "captured", device)
        found = {name: ratios(captured, name, params, device) for name, params in SETTINGS.items()}
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    command = f"python -m benchmarks.means {model.name} --length {length}"
    rows, figures = [], {}
    for method, (of_layers, densities) in found.items():
        helped = [ratio for ratio in of_layers if ratio < 1]
        label = " ".join([method, *(f"{key}={value:g}" for key, value in SETTINGS[method].items())])
        figure = f"means of dropped blocks, {label}, {length:,} tokens, {captured.model}: output error ÷ without"
        value = float(f"{fmean(helped or of_layers):.4g}")
        figures[figure] = dict(zip(FIELDS, (figure, value, "ratio", MOST, "lower", name, command), strict=True))
        cells = [f"{min(densities):.2f} to {max(densities):.2f}", *(f"{ratio:.2f}" for ratio in of_layers)]
        rows.append([label, *cells, f"{value:.2f} of {len(helped)}"])
    layers = [f"layer {layer}" for layer in range(len(rows[0]) - 3)]
    print(markdown_table(["method", "density", *layers, "where it helps"], rows))
    if results is not None:
        merge_figures(results, figures, keep_bars=False)


if __name__ == "__main__":
    typer.run(main)

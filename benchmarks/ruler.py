# SPDX-License-Identifier: Apache-2.0
"""RULER by lm-evaluation-harness on stock and on our server: samples beforehand, and the ratio of both scores.

    python -m benchmarks.ruler samples MODEL TASKS [--lengths 16384,32768,65536] [--each 100]
    lm_eval run --include_path TASKS --tasks ruler_vt-16384,… --log_samples --output_path STOCK …    # then OURS
    python -m benchmarks.ruler compare STOCK OURS --model NAME [--results docs/results/evidence.jsonl --device CARD]

`samples` calls the harness's own generators and writes TASKS/NAME-LENGTH.jsonl and a task NAME-LENGTH of the harness
that reads it, so that both servers get the same prompts. The harness itself would make 500 samples of each length, also
with --limit. `samples` needs lm-eval 0.4.13 with its extra `ruler`, and these six tasks need no download.
"""

import importlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from benchmarks.figures import FigureReport
from benchmarks.options import show
from vllm_sparse_backend.evaluation.answer_tables import with_error
from vllm_sparse_backend.evaluation.report import BenchError

HARNESS = "lm_eval.tasks.ruler"
TASKS = {
    "ruler_vt": ("vt", "vt_utils", "get_vt_dataset", "sys_vartrack_w_noise_random"),
    "ruler_fwe": ("fwe", "fwe_utils", "fwe_download", "sys_kwext"),
    "ruler_cwe": ("cwe", "cwe_utils", "get_cw_dataset", "sys_word_pair_random"),
    "niah_single_1": ("niah_single_1", "niah_utils", "niah_single_1", "generate_samples"),
    "niah_multikey_2": ("niah_multikey_2", "niah_utils", "niah_multikey_2", "generate_samples"),
    "niah_multikey_3": ("niah_multikey_3", "niah_utils", "niah_multikey_3", "generate_samples"),
}
"""Each task's YAML, module, function that makes the data set, and the generator that it calls with a sample count."""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


def with_count(generate: Callable[..., list[dict[str, Any]]], count: int) -> Callable[..., list[dict[str, Any]]]:
    """Wrap a generator so that it makes ``count`` samples where the harness asks for 500."""

    def wrapped(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return generate(*args, **kwargs | {"num_samples": min(kwargs.get("num_samples", 500), count)})

    return wrapped


@app.command()
def samples(
    model: Annotated[Path, typer.Argument(help="Folder with the tokenizer.")],
    out: Path,
    tasks: str = ",".join(TASKS),
    lengths: str = "16384,32768,65536",
    each: Annotated[int, typer.Option(help="Samples of each task and length.")] = 100,
    seed: int = 0,
) -> None:
    """Write samples and tasks of the harness."""
    import numpy as np
    from transformers import AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    # The harness sends no bos token to completions, so its text stands in front of the prompt.
    begin = AutoTokenizer.from_pretrained(model).bos_token or ""
    for task in tasks.split(","):
        yaml, module_name, make, generator = TASKS[task]
        module = importlib.import_module(f"{HARNESS}.{module_name}")
        folder = Path(str(module.__file__)).parent
        generate = getattr(module, generator)
        for length in lengths.split(","):
            random.seed(seed)
            np.random.seed(seed)
            setattr(module, generator, with_count(generate, each))
            docs = getattr(module, make)(tokenizer=str(model), max_seq_lengths=[int(length)])["test"]
            setattr(module, generator, generate)
            if not all(doc["outputs"] for doc in docs):
                raise BenchError(f"{task}, {length} tokens: too short for the harness's example; use a longer length")
            path = out.absolute() / f"{task}-{length}.jsonl"
            path.write_text("".join(json.dumps(doc | {"input": begin + doc["input"]}) + "\n" for doc in docs))
            path.with_suffix(".yaml").write_text(
                f"include: {folder / yaml}.yaml\ntask: {path.stem}\ncustom_dataset: null\n"
                f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path}}}}}\n"
            )


def scores(folder: Path) -> Iterator[tuple[str, str, list[float]]]:
    """Yield task, length and the score of each sample, from the newest samples that the harness logged."""
    logged = {path.name.partition("_20")[0]: path for path in sorted(folder.rglob("samples_*.jsonl"))}
    if not logged:
        raise BenchError(f"{folder}: no samples_*.jsonl; run lm_eval with --log_samples and --output_path {folder}")
    for name, path in sorted(logged.items()):
        task, _, length = name.removeprefix("samples_").rpartition("-")
        docs = sorted(map(json.loads, path.read_text().splitlines()), key=lambda doc: doc["doc_id"])
        yield task, length, [doc[length] for doc in docs]


def difference(ours: list[float], stock: list[float], factor: float = 1.0) -> tuple[float, float]:
    """Return mean(ours - factor · stock) on the same samples, and its standard error."""
    differences = [mine - factor * theirs for mine, theirs in zip(ours, stock, strict=True)]
    return fmean(differences), stdev(differences) / len(differences) ** 0.5


@app.command()
def compare(
    stock: Annotated[Path, typer.Argument(help="Output folder of lm_eval on the stock server.")],
    ours: Annotated[Path, typer.Argument(help="Output folder of lm_eval on our server.")],
    model: Annotated[str, typer.Option(help="Name of the model in the figures.")],
    results: Annotated[Path | None, typer.Option(help="List of figures to add these to.")] = None,
    device: str = "unknown",
    command: str = "python -m benchmarks.ruler",
) -> None:
    """Print both scores, their difference and their ratio. A ratio needs a score of stock of at least 0.5."""
    report = FigureReport("ruler", device, None, results, command)
    base = {(task, length): values for task, length, values in scores(stock)}
    rows = []
    for task, length, values in scores(ours):
        of_stock = base[task, length]
        score, our_score = fmean(of_stock), fmean(values)
        name = f"RULER, {model}, {task}, {int(length):,} tokens"
        report.add_figure(f"{name}: stock's score", score, "share", "higher")
        report.add_figure(f"{name}: our score", our_score, "share", "higher")
        change, change_error = difference(values, of_stock)
        report.add_figure(f"{name}: our score - stock's, standard error", change_error, "share", "lower")
        row = {
            "task": task, "tokens": int(length), "samples": len(values), "stock": f"{score:.3f}",
            "ours": f"{our_score:.3f}", "ours - stock": with_error(change, change_error, "+.3f"), "ours ÷ stock": "",
        }  # fmt: skip
        if score >= 0.5:
            ratio = our_score / score
            error = difference(values, of_stock, ratio)[1] / score  # from the differences on the same samples
            report.add_figure(f"{name}: our score ÷ stock's", ratio, "ratio", "higher", round(0.98 - 2 * error, 4))
            report.add_figure(f"{name}: our score ÷ stock's, standard error", error, "ratio", "lower")
            row["ours ÷ stock"] = with_error(ratio, error, ".3f")
        rows.append(row)
    show("", rows)


if __name__ == "__main__":
    app()

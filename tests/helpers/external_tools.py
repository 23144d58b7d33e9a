# SPDX-License-Identifier: Apache-2.0
"""Programs not written in Python, next to the interpreter or on the path. A test is skipped with a reason if its
program is missing."""

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
    """Return the program's path."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"{name} is not installed; it comes with {WHERE[name]}")
    return path


def check(name: str, *args: object, env: dict[str, str] | None = None) -> None:
    """Run a program that must report no errors."""
    command = [find(name), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"

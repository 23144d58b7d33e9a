# SPDX-License-Identifier: Apache-2.0
"""The package with a method that docs/adding_a_method.md shows."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests/plugin_method"


def install(folder: Path) -> dict[str, str]:
    """Install the package into a separate folder, and return variables with which Python finds it."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(PACKAGE)], check=True, capture_output=True)
    paths = [str(ROOT), str(ROOT / "kernels"), str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths)}

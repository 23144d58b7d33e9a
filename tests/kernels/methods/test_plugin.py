# SPDX-License-Identifier: Apache-2.0
"""Methods of other packages: the example of docs/adding_a_method.md, installed and used, and refused packages."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tests.helpers.example_package import PACKAGE, ROOT, install
from vllm_sparse_kernels.methods import METHODS, registry
from vllm_sparse_kernels.methods.registry import GROUP, PluginError, Registry

DOCUMENT = ROOT / "docs/adding_a_method.md"
SPEC = METHODS["dense"]
TWO = (replace(SPEC, name="one"), replace(SPEC, name="two"))

USE = """
import json
from pathlib import Path
from vllm_sparse_backend.calibration.loop import independent_methods
from vllm_sparse_backend.config.settings import SparsePrefillConfig
from vllm_sparse_backend.config.model_shape import ModelShape
from vllm_sparse_backend.config.profile import ON
from vllm_sparse_backend.config.plan import Plan
from vllm_sparse_kernels.methods import METHODS, name_of

shape = ModelShape(architecture="LlamaForCausalLM", num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
config = SparsePrefillConfig(method="strided", params={"stride_tokens": 512})
(group,) = Plan.by_level(config, shape)[ON].layer(0).groups
print(json.dumps({
    "listed": "strided" in METHODS,
    "plan": [name_of(group.method), group.method.stride_tokens, list(group.heads)],
    "calibrated": "strided" in independent_methods(),
}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with the document's package installed in a separate folder."""
    return os.environ | install(tmp_path_factory.mktemp("installed"))


@pytest.mark.full
def test_an_installed_method_is_one_like_any_other(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", USE], env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {
        "listed": True,
        "plan": ["strided", 512, [0, 1, 2, 3]],
        "calibrated": True,
    }


@pytest.mark.full
def test_the_tests_of_all_methods_test_it(environment: dict[str, str]) -> None:
    tests = str(ROOT / "tests/kernels/methods/test_all_methods.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "strided", tests]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^10 passed", done.stdout, re.MULTILINE)


def test_the_document_shows_the_packages_files() -> None:
    file = re.compile(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    shown = dict(file.findall(DOCUMENT.read_text()))
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml") and "build" not in path.parts]
    assert shown == {str(path.relative_to(PACKAGE)): path.read_text() for path in files}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """A registry with only ``dense``, and an entry point that loads the given value."""

    def registry_of(loaded: Any) -> Registry:
        def load(self: EntryPoint) -> Any:
            if isinstance(loaded, Exception):
                raise loaded
            return loaded

        monkeypatch.setattr(EntryPoint, "load", load)
        point = EntryPoint("theirs", "their.module:SPEC", GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == GROUP else [])
        return Registry((SPEC,))

    return registry_of


@pytest.mark.parametrize(("loaded", "names"), [(TWO[0], ["dense", "one"]), (TWO, ["dense", "one", "two"])])
def test_an_entry_point_gives_one_method_or_several(installed: Callable[..., Registry], loaded: Any, names: list[str]):
    assert list(installed(loaded)) == names


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (SPEC, "the method's name 'dense' is taken; expected a name other than dense"),
        ((TWO[0], TWO[0]), "the method's name 'one' is taken; expected a name other than dense, one"),
        (ImportError("no module named their"), "ImportError: no module named their"),
        (SPEC.parameters, "expected a MethodSpec or a tuple of them"),
        ((), "given (), expected a MethodSpec or a tuple of them"),
    ],
)
def test_a_package_that_gives_no_method_is_named(installed: Callable[..., Registry], loaded: Any, reason: str) -> None:
    with pytest.raises(PluginError, match=re.escape(reason)) as error:
        list(installed(loaded))
    assert "entry point theirs = their.module:SPEC of the group vllm_sparse_backend.methods" in str(error.value)

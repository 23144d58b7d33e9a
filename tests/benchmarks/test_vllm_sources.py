# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.vllm_sources` on the installed vLLM, for this package and for a package that needs more."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.vllm_sources import check
from vllm_sparse_backend.serving.hooks import EVERY, HOOKS, Hook, ReadClass

SPEC = importlib.util.find_spec("vllm")
ASKING_MORE = """\
from vllm.config import VllmConfig, NoSuchConfig


class SparsePrefillImpl(compat.DenseImpl):
    def forward(self, layer, query, output=None): ...

"""
REQUEST = "vllm.v1.request"


@pytest.fixture
def tree() -> Path:
    if SPEC is None or SPEC.origin is None:
        pytest.skip("needs vLLM")
    return Path(SPEC.origin).parents[1]


def test_the_installed_vllm_has_all_that_is_used(tree: Path) -> None:
    result = check(tree)
    assert result.problems == ()
    assert result.num_hooks == len(HOOKS)
    assert min(result.num_names, result.num_methods, result.num_hooks) >= 10


def test_what_is_not_there_is_named(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "serving/worker").mkdir(parents=True)
    (tmp_path / "serving/worker/impl.py").write_text(ASKING_MORE)
    hooks = [
        Hook(EVERY, REQUEST, owner, function, expects, lambda original: original, "a hook")
        for owner, function, expects in (("Request", "leave", ()), ("NoRequest", "__init__", ()),
                                         ("Request", "__init__", ("request_id", "moon")))
    ]  # fmt: skip
    result = check(tree, tmp_path, hooks, [ReadClass(EVERY, REQUEST, "Request", ("__init__", "moons"))])
    forward = (
        "serving/worker/impl.py: SparsePrefillImpl.forward does not take key, value, kv_cache, attn_metadata, output"
    )
    assert result.problems[0] == "serving/worker/impl.py: vllm.config has no NoSuchConfig"
    assert all(problem.startswith(forward) for problem in result.problems[1:3])
    assert result.problems[3:] == (
        f"there is no {REQUEST}.Request.leave", f"there is no {REQUEST}.NoRequest.__init__",
        f"{REQUEST}.Request.__init__ has no moon", f"{REQUEST}.Request has no moons",
    )  # fmt: skip
    nothing = check(tmp_path).problems
    assert any(
        "vllm/v1/attention/backends/cpu_attn.py has no class CPUAttentionBackendImpl" in problem for problem in nothing
    )


def test_the_document_has_every_hook() -> None:
    text = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()
    for hook in HOOKS:
        name = ".".join(part for part in (hook.module, hook.owner, hook.function) if part)
        assert f"`{name}`" in text

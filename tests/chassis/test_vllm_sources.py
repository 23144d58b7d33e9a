# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.vllm_sources`: what it finds in the vLLM that is installed, and in trees that lack something."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.vllm_sources import BUILT, Checked, check
from vllm_sparse_backend.serving.hooks import EVERY, HOOKS, Hook, Part

OURS = """\
from vllm.config import VllmConfig
from vllm.v1 import kept


class SparsePrefillImpl(compat.DelegateImpl):
    def forward(self, layer, query, output=None): ...


def part(common):
    return CommonAttentionMetadata(num_reqs=1, seq_lens=common)
"""
THEIRS = """\
class AttentionImpl:
    def forward(self, layer, query, output=None): ...


class CommonAttentionMetadata:
    num_reqs: int
    seq_lens: object
"""


def test_the_installed_vllm_has_all_that_is_used() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    found = check(Path(spec.origin).parents[1])
    assert found.problems == ()
    assert found.num_hooks == len(HOOKS)
    assert min(found.num_names, found.num_methods, found.num_hooks, found.num_fields) >= 10


def made_and_checked(folder: Path, **changes: tuple[str, str]) -> Checked:
    """A tree and a package that fit each other, but for texts that are replaced in files of the tree."""
    tree, package = folder / "tree", folder / "package"
    derived = {
        "flash_attn": [f"FlashAttention{part}" for part in ("Backend", "Impl", "MetadataBuilder")],
        "cpu_attn": [f"CPUAttention{part}" for part in ("Backend", "BackendImpl", "MetadataBuilder")],
    }
    texts = {
        "vllm/config/__init__.py": "from vllm.config.vllm import VllmConfig\n",
        "vllm/v1/kept.py": "def salted(): ...\nclass Runner:\n    rows: int\n    def step(self, batch): ...\n",
        BUILT["CommonAttentionMetadata"]: THEIRS,
        **{
            f"vllm/v1/attention/backends/{file}.py": "".join(f"class {name}: ...\n" for name in names)
            for file, names in derived.items()
        },
    }
    for path, text in texts.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text.replace(*changes.get(Path(path).stem, ("", ""))))
    (package / "serving").mkdir(parents=True)
    (package / "serving/impl.py").write_text(OURS)
    hooks = [
        Hook(EVERY, "vllm.v1.kept", "", "salted", (), lambda original: original, "a function"),
        Hook(EVERY, "vllm.v1.kept", "Runner", "step", ("batch",), lambda original: original, "a method"),
    ]
    return check(tree, package, hooks, [Part(EVERY, "vllm.v1.kept", "Runner", ("step", "rows"))])


def test_a_tree_that_fits(tmp_path: Path) -> None:
    found = made_and_checked(tmp_path)
    assert (found.num_names, found.num_hooks, found.num_fields, found.problems) == (2, 2, 2, ())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"__init__": ("import VllmConfig", "import Config")}, "serving/impl.py: vllm.config has no VllmConfig"),
        ({"backend": ("num_reqs", "num_rows")}, "serving/impl.py: CommonAttentionMetadata has no field num_reqs"),
        (
            {"backend": ("query, output=None", "query, scale, output=None")},
            "serving/impl.py: SparsePrefillImpl.forward does not take scale, output of FlashAttentionImpl's",
        ),
        ({"kept": ("def salted", "def other")}, "there is no vllm.v1.kept.salted"),
        ({"kept": ("batch", "lot")}, "vllm.v1.kept.Runner.step has no batch"),
        ({"kept": ("rows:", "lines:")}, "vllm.v1.kept.Runner has no rows"),
        ({"kept": ("class Runner", "class Other")}, "there is no vllm.v1.kept.Runner.step"),
        (
            {"cpu_attn": ("CPUAttentionBackendImpl", "Other")},
            "vllm/v1/attention/backends/cpu_attn.py has no class CPUAttentionBackendImpl",
        ),
    ],
    ids=["name", "field", "parameter", "hook", "hook's parameter", "part", "hook's class", "class"],
)
def test_a_tree_that_lacks_something(tmp_path: Path, changes: dict[str, tuple[str, str]], problem: str) -> None:
    assert any(problem in found for found in made_and_checked(tmp_path, **changes).problems)


def test_the_document_has_every_hook() -> None:
    text = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()
    for hook in HOOKS:
        name = ".".join(part for part in (hook.module, hook.owner, hook.function) if part)
        assert f"`{name}`" in text

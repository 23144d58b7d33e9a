"""`sparse-prefill check-profile` and `import-minference`, from the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_sparse_backend.cli import app

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 64,
}
PATTERNS = [
    {"0": ["vertical_and_slash", 100, 800, 0.9], "1": ["stream_llm", 128, 512, 0.8]}
    | {head: ["vertical_and_slash", 1000, 6096, 0.9] for head in ("2", "3")},
    {head: ["block_sparse", 1000, 1024, 0.7] for head in "0123"},
]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def patterns(tmp_path: Path) -> Path:
    path = tmp_path / "best_pattern.json"
    path.write_text(json.dumps(PATTERNS))
    return path


def test_a_bundled_profile_by_name(model: Path) -> None:
    alone, fitted = run("check-profile", "minference"), run("check-profile", "minference", model)
    method = "vertical_slash(vertical_tokens=1000, slash_tokens=6096,"
    assert (alone.exit_code, fitted.exit_code) == (0, 0)
    assert f"every head: {method}" in alone.output
    assert f"8 of 8 heads: {method}" in fitted.output


def test_import_then_check(model: Path, patterns: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    imported = run("import-minference", patterns, model, out)
    assert imported.exit_code == 0, imported.output
    checked = run("check-profile", out, model)
    assert checked.exit_code == 0, checked.output
    assert checked.output.splitlines() == imported.output.splitlines()[:-1]
    for line in (
        "4 of 8 heads: block_sparse(top_blocks=100, per_query_block=True)",
        "3 of 8 heads: vertical_slash(last_queries=64, forced_verticals=30, forced_slashes=100, segment_tokens=None, "
        "settings=2)",
        "1 of 8 heads: a_shape(sink_tokens=128, local_tokens=512)",
    ):
        assert line in checked.output


def test_heads_that_share_are_one_line(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    heads = "{0-1: {method: share_prefill, cluster: 2}, 2: {method: a_shape}, 3: {method: share_prefill, cluster: 5}}"
    path.write_text(f"format: 1\nmodel: any\ndefault: {{method: share_prefill}}\nlayers:\n  1: {{heads: {heads}}}\n")
    thresholds = "max_sparsity=0.3, max_distance=0.2, gamma=0.9, gamma_per_tile=False, true_mass=False"
    shared = f"share_prefill({thresholds}, clusters=2, clustered_heads=3)"
    lines = run("check-profile", path, model).output.splitlines()[1:]
    assert lines == [f"7 of 8 heads: {shared}", "1 of 8 heads: a_shape(sink_tokens=1024, local_tokens=4096)"]
    assert "every head: share_prefill(max_sparsity=0.3," in run("check-profile", path).output


def test_sharing_without_clusters_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("format: 1\nmodel: any\ndefault: {method: share_prefill}\n")
    result = run("check-profile", path, model)
    assert result.exit_code == 1
    assert result.output.startswith(f"{path}: share_prefill: no two heads can share")


def test_dense_layers_are_told_apart(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("format: 1\nmodel: any\ndense_layers: [1]\ndefault: {method: a_shape}\n")
    lines = run("check-profile", path, model).output
    assert "4 of 8 heads: a_shape" in lines
    assert "4 of 8 heads: in dense_layers" in lines


def test_a_profile_of_another_model(model: Path, patterns: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    run("import-minference", patterns, model, out)
    (model / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 5}))
    result = run("check-profile", out, model)
    assert result.exit_code == 1
    assert "2 layers" in result.output
    assert "5 layers" in result.output


def test_import_never_overwrites(model: Path, patterns: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    out.write_text("mine")
    result = run("import-minference", patterns, model, out)
    assert result.exit_code == 1
    assert result.output.strip() == f"{out}: cannot be written: File exists"
    assert out.read_text() == "mine"


def test_what_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("format: 1\nmodel: any\ndefault: {method: a_shape, sink: 3}\n")
    for path, says in ((tmp_path / "p.yaml", "sink"), (tmp_path / "none.yaml", "none.yaml")):
        result = run("check-profile", path)
        assert result.exit_code == 1
        assert says in result.output

# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.cards`: rows for compiled, refused and failed kernels, without a compiler."""

import json
from pathlib import Path
from typing import Any

import pytest
import triton

from benchmarks import cards
from vllm_sparse_kernels.cards import CARDS
from vllm_sparse_kernels.methods import METHODS

USAGE = {
    "shared_bytes": 90 << 10, "registers": 100, "registers_per_program": 25600, "stack_bytes": 0, "variants": 1,
    "errors": [],
}  # fmt: skip


def values(path: Path) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text())}


def compiled(target: int, head_dim: int, method: str) -> dict[str, Any]:
    """A kernel for each method: top_p's is too large at head dim 256, sale is refused, dense does not compile."""
    if method == "dense":
        raise RuntimeError("ended with 1: no compiler")
    large = {"shared_bytes": 100 << 10} if method == "top_p" and head_dim == 256 else {}
    return {method: {} if method == "sale" else {"attend_kernel": USAGE | large}}


def test_rows_of_failures_refusals_and_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cards, "compiled", compiled)
    out = tmp_path / "cards.json"
    about = "all methods, sm_89, head dim"
    stale = {"name": f"{about} 64, bf16: measured long ago", "value": 7}
    others = {"name": "all methods, sm_89, head dim 640, bf16: other", "value": 8}
    out.write_text(json.dumps([stale, others]))
    assert cards.main(["--target", "89", "--jobs", "2", "--out", str(out)]) == 1
    rows = values(out)
    what = "kernels that need more shared memory or registers than the GPU has, or do not compile"
    assert rows[f"{about} 64, bf16: {what}"] == 1  # dense
    assert rows[f"{about} 256, bf16: {what}"] == 2  # and top_p
    assert rows[f"{about} 256, bf16: kernels compiled"] == len(METHODS) - 2
    assert rows[f"{about} 256, bf16: methods refused, whose selection needs more shared memory"] == 1
    assert rows[f"{about} 512, bf16: refused, 101376 bytes of shared memory cannot hold a block of keys"] == len(
        METHODS
    )
    assert stale["name"] not in rows
    devices = {row["device"] for row in json.loads(out.read_text()) if "device" in row}
    assert devices == {f"none: compiled by Triton {triton.__version__}"}  # results depend on its release
    assert rows[others["name"]] == 8
    printed = capsys.readouterr().out
    assert "top_p: attend_kernel: 102400 shared_bytes, the card has 101376" in printed
    assert "dense: all kernels: ended with 1: no compiler" in printed
    assert "  sale: refused" in printed
    assert "4 GPUs × head dims, 1 refused; 4 kernels failed" in printed


def test_nothing_failed_where_all_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "compiled", lambda target, head_dim, method: {method: {"attend_kernel": USAGE}})
    assert cards.main(["--jobs", "1"]) == 0
    assert len(CARDS) > 1

# SPDX-License-Identifier: Apache-2.0
"""Types of jitted code work in every supported Triton."""

import pytest


def test_aggregates_are_built_where_triton_writes_no_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 and 3.7 have no public decorator, and their private decorator leaves the constructor to the class."""
    names = pytest.importorskip("vllm_sparse_kernels.gluon_compat")
    monkeypatch.delattr(names.gluon, "aggregate", raising=False)

    class Sizes:
        NUM: names.gl.constexpr
        STEP: names.gl.constexpr

    made = names.aggregate(Sizes)
    sizes = made(3, names.gl.constexpr(128))
    assert (sizes.NUM.value, sizes.STEP.value) == (3, 128)
    with pytest.raises(ValueError, match="argument 2 is shorter than argument 1"):
        made(3)

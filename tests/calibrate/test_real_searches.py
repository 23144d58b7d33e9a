"""Searches on a layer of real queries, keys and values, through the references: four heads of known kinds."""

from dataclasses import dataclass

import pytest
import torch

from vllm_sparse_backend.calibrate import anchor_attention, flex_vertical_slash, minference, sale, sparge_attn
from vllm_sparse_backend.calibrate.costs import EstimatedCosts
from vllm_sparse_backend.calibrate.judge import CapturedLayer, RememberingJudge, Served
from vllm_sparse_backend.calibrate.ladders import LADDERS
from vllm_sparse_backend.calibrate.measure import Bound
from vllm_sparse_backend.evaluate.capture import LayerTensors
from vllm_sparse_kernels.select.anchor_attention import AnchorAttention
from vllm_sparse_kernels.select.dense import Dense
from vllm_sparse_kernels.select.flex_vertical_slash import FlexVerticalSlash
from vllm_sparse_kernels.select.minference import AShape, BlockSparse
from vllm_sparse_kernels.select.sale import Sale
from vllm_sparse_kernels.select.sparge_attn import SpargeAttn
from vllm_sparse_kernels.select.vertical_slash import VerticalSlash

NUM_TOKENS = 900
HEADS = ("sink", "local", "diffuse", "retrieving")
BOUND = Bound(0.08, 0.3)


@dataclass(frozen=True)
class Prompt:
    """As much of a capture as a judge reads."""

    tensors: LayerTensors
    num_tokens: int = NUM_TOKENS

    @property
    def scales(self):
        return {0: 1.0}

    def read(self, layer, device):
        return self.tensors


def prompt(seed: int) -> Prompt:
    """``HEADS``, with kv heads of two each: keys are random, queries look for theirs."""
    generator = torch.Generator().manual_seed(seed)
    k, v, noise = (torch.randn(NUM_TOKENS, n, 64, generator=generator) for n in (2, 2, 4))
    k, noise = k / 8, noise / 8
    positions = torch.arange(NUM_TOKENS)
    far = (positions * 0.37).long()
    slow = torch.stack((torch.cos(positions / 60), torch.sin(positions / 60)), 1)
    k[:, 0, :2] += slow  # what is near is alike
    local = noise[:, 1] * 0.1
    local[:, :2] += slow * 40
    q = torch.stack((16 * k[:1, 0].expand(NUM_TOKENS, -1), local, 0.2 * noise[:, 2], 16 * k[far, 1]), 1)
    return Prompt(LayerTensors(q, k, v))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    def read():
        return CapturedLayer([prompt(0), prompt(1)], 0, Served(chunk_tokens=512), torch.device("cpu"), None)

    costs = EstimatedCosts(NUM_TOKENS * (NUM_TOKENS + 1) // 2, len(HEADS), 64)
    return RememberingJudge(0, len(HEADS), costs, tmp_path_factory.mktemp("judged") / "layer.json", read)


SEARCHES = {
    AnchorAttention: lambda judge: anchor_attention.search(
        judge, BOUND, AnchorAttention(step_tiles=1, sample_tokens=1, whole_blocks=True)
    ),
    FlexVerticalSlash: lambda judge: flex_vertical_slash.search(judge, BOUND, flex_vertical_slash.SPREAD),
    Sale: lambda judge: sale.search(judge, BOUND, first_tau=0.256, least_sparsity=0.1),
    SpargeAttn: lambda judge: sparge_attn.search(judge, BOUND, thetas=(0.0, 0.25)),
    (AShape, VerticalSlash, BlockSparse): lambda judge: minference.search(
        judge, BOUND, [(AShape(64, 128), VerticalSlash(30, 128), BlockSparse(2)), (AShape(64, 512), BlockSparse(4))]
    ),
}


@pytest.mark.parametrize("kind", SEARCHES)
def test_what_a_search_returns_holds_the_bound(judge, kind):
    found = SEARCHES[kind](judge)
    together = judge.judge(found)
    for name, method, seen in zip(HEADS, found, together, strict=True):
        assert isinstance(method, (Dense, *(kind if isinstance(kind, tuple) else (kind,)))), name
        assert BOUND.holds(seen), name
    by_head = dict(zip(HEADS, together, strict=True))
    print({n: (m, round(s.density, 3), round(s.error, 3)) for n, m, s in zip(HEADS, found, together)})
    assert by_head["sink"].density < 0.8
    assert isinstance(found[HEADS.index("diffuse")], Dense)


@pytest.mark.parametrize("name", LADDERS)
def test_ladders_go_from_the_sparsest_to_what_loses_least(judge, name):
    ends = [judge.judge([method] * len(HEADS)) for method in (LADDERS[name][0], LADDERS[name][-1])]
    for sparse, lossless in zip(*ends, strict=True):
        print(name, sparse.density, lossless.density, sparse.error, lossless.error)
        assert sparse.density <= lossless.density
        assert sparse.error >= lossless.error - 1e-6

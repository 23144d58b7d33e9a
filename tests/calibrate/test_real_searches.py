# SPDX-License-Identifier: Apache-2.0
"""Searches on a layer of real queries, keys and values, through the references: four heads of known kinds."""

from dataclasses import dataclass

import pytest
import torch

from vllm_sparse_backend.profiling import anchor_attention, flex_vertical_slash, minference, sale, sparge_attn
from vllm_sparse_backend.profiling.capture import LayerTensors
from vllm_sparse_backend.profiling.costs import EstimatedCosts
from vllm_sparse_backend.profiling.judge import CapturedLayer, RememberingJudge, Served
from vllm_sparse_backend.profiling.ladders import LADDERS
from vllm_sparse_backend.profiling.measure import Bound
from vllm_sparse_kernels.methods import name_of
from vllm_sparse_kernels.methods.anchor_attention.method import AnchorAttention
from vllm_sparse_kernels.methods.dense.method import Dense
from vllm_sparse_kernels.methods.minference.a_shape import AShape
from vllm_sparse_kernels.methods.minference.block_sparse import BlockSparse
from vllm_sparse_kernels.methods.minference.vertical_slash import VerticalSlash

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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads would wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    def read():
        return CapturedLayer([prompt(0), prompt(1)], 0, Served(chunk_tokens=512), torch.device("cpu"), None)

    costs = EstimatedCosts(NUM_TOKENS * (NUM_TOKENS + 1) // 2, len(HEADS), 64)
    return RememberingJudge(0, len(HEADS), costs, tmp_path_factory.mktemp("judged") / "layer.json", read)


MINFERENCE = (AShape(64, 128), VerticalSlash(30, 128), BlockSparse(2)), (AShape(64, 384), BlockSparse(4))
SAMPLED = AnchorAttention(step_tiles=1, sample_tokens=1, whole_blocks=True)

SEARCHES = {
    "anchor_attention": lambda judge: anchor_attention.search(judge, BOUND, SAMPLED),
    "flex_vertical_slash": lambda judge: flex_vertical_slash.search(judge, BOUND, flex_vertical_slash.SPREAD),
    "minference": lambda judge: minference.search(judge, BOUND, MINFERENCE),
    "sale": lambda judge: sale.search(judge, BOUND, first_tau=0.256),
    "sparge_attn": lambda judge: sparge_attn.search(judge, BOUND, thetas=(0.0,), skipping=True),
}
PATTERNS = {"a_shape", "block_sparse", "vertical_slash"}


@pytest.mark.parametrize("name", SEARCHES)
def test_what_a_search_returns_holds_the_bound(judge, name):
    found = SEARCHES[name](judge)
    together = judge.judge(found)
    assert {name_of(method) for method in found} <= (PATTERNS if name == "minference" else {name}) | {"dense"}
    assert all(BOUND.holds(seen) for seen in together)
    assert together[HEADS.index("sink")].density < 0.8
    diffuse = HEADS.index("diffuse")
    assert together[diffuse].density > 0.9
    assert isinstance(found[diffuse], Dense) or name == "sale"  # which asks for no sparsity


@pytest.mark.parametrize("name", LADDERS)
def test_ladders_go_from_the_sparsest_to_what_loses_least(judge, name):
    ends = [judge.judge([method] * len(HEADS)) for method in (LADDERS[name][0], LADDERS[name][-1])]
    for sparse, lossless in zip(*ends, strict=True):
        assert sparse.density <= lossless.density
        assert sparse.error >= lossless.error - 1e-6

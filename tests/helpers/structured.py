# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values with the structure that trained attention has, made without a model.

Random normal data is dense: no method can leave anything out of it. Here the scaled score of query i and key j is made
of parts, in natural units, whose strengths differ from head to head (``KINDS``):

* sinks: the first keys, which every query attends to;
* a band: features rotate with the position, as in rotary embedding, so the score of a pair falls as the logarithm of
  its distance, and its probability as a power;
* slashes: the same with a shift, so that keys at fixed distances stand out;
* heavy keys: short runs of keys that carry one of ``TOPICS`` directions. A head's queries look for one topic, and
  for another after a few thousand tokens; one query in ``LONE_QUERIES`` looks for its own topic;
* noise in keys and queries, and a separate temperature for each query;
* a mean that all keys share, with a few large channels: it does not affect the softmax, but it affects quantisation.

Values have a common mean, a part that stays constant for 32 tokens, and noise. Values of the sinks are small. As in a
model, nearby kept values therefore compensate partly for omitted values, and errors are gradual.

This is not a model. Heads are independent except for shared keys, layers do not depend on each other, and tokens have
no meaning. Times and densities can be compared on such data, and errors of two methods roughly, but not the effect of
an error on answers. Strengths are set so that the densities at which single keys can hold 95 % of the mass are
distributed as in the layers of a trained model: most heads below 0.08, many below 0.01, a few near 0.5.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tests.helpers.batches import shuffled_cache, write_row
from vllm_sparse_kernels.engine_trial import Batch
from vllm_sparse_kernels.rows import Rows


class Kind(NamedTuple):
    """Strength of each part in a kind of head: scores in natural units, and a standard deviation for noise."""

    sink: float
    band: float
    slash: float
    heavy: float
    noise: float


KINDS = {
    "local": Kind(sink=12.0, band=18.0, slash=0.0, heavy=0.0, noise=0.4),
    "slash": Kind(sink=12.0, band=10.0, slash=16.0, heavy=0.0, noise=0.5),
    "heavy": Kind(sink=12.0, band=8.0, slash=0.0, heavy=12.5, noise=0.6),
    "sink": Kind(sink=15.5, band=9.0, slash=0.0, heavy=8.0, noise=0.6),
    "mixed": Kind(sink=10.0, band=10.0, slash=10.0, heavy=10.5, noise=0.6),
    "spread": Kind(sink=3.0, band=3.0, slash=0.0, heavy=2.0, noise=1.2),
}
SEQUENCE = (
    "local", "slash", "heavy", "sink", "mixed", "heavy", "slash", "local",
    "sink", "heavy", "slash", "mixed", "heavy", "sink", "local", "spread",
)  # fmt: skip
"""Kinds of a layer's heads in turn: heads that share a key head differ."""

TOPICS = 32
RUN_TOKENS = 4
HEAVY_SHARE = 1 / 32
"""The share of keys that carry a topic."""
TOPIC_TOKENS = (2048, 4096)
"""Bounds of the number of tokens for which a head looks for the same topic."""
LONE_QUERIES = 64
NUM_SINKS = 4
SINK_NORM, HEAVY_NORM, KEY_NOISE, MEAN_NORM = 12.0, 12.0, 0.7, 10.0
VALUE_TOKENS = 32
SLOWEST_TURN_TOKENS = 1 << 17


@dataclass(frozen=True)
class Structured:
    """A row of a layer: ``query_len`` new tokens after ``context_len`` cached tokens."""

    q: torch.Tensor  # [query_len, num_heads, head_dim]
    k: torch.Tensor  # [context_len + query_len, num_kv_heads, head_dim]
    v: torch.Tensor  # [context_len + query_len, num_kv_heads, head_dim]
    context_len: int
    kinds: tuple[str, ...]
    """The kind of each query head."""

    @property
    def scale(self) -> float:
        """Return the factor of q·k."""
        return float(self.q.shape[2] ** -0.5)


def structured(
    query_len: int,
    context_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Structured:
    """Return the same data for the same arguments and kind of device; 4 divides head_dim, which is at least 32."""
    device, seq_len = torch.device(device), context_len + query_len
    made = _Maker(head_dim, torch.Generator(device).manual_seed(seed), device)
    kinds = tuple(SEQUENCE[head % len(SEQUENCE)] for head in range(num_heads))
    q = torch.empty(query_len, num_heads, head_dim, dtype=dtype, device=device)
    k = torch.empty(seq_len, num_kv_heads, head_dim, dtype=dtype, device=device)
    v = torch.empty_like(k)
    group = num_heads // num_kv_heads
    for kv_head in range(num_kv_heads):
        topics = made.topics()
        k[:, kv_head], v[:, kv_head] = made.keys(seq_len, topics), made.values(seq_len)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q[:, head] = made.queries(context_len, query_len, KINDS[kinds[head]], topics)
    return Structured(q, k, v, context_len, kinds)


class _Maker:
    """Half of a head's channels turn with the position, one is for sinks, and the others hold content."""

    def __init__(self, head_dim: int, generator: torch.Generator, device: torch.device) -> None:
        self.generator, self.device, self.head_dim = generator, device, head_dim
        self.num_turning = head_dim // 2
        self.content = slice(self.num_turning + 1, head_dim)
        steps = torch.linspace(0, 1, self.num_turning // 2, device=device)
        self.frequencies = SLOWEST_TURN_TOKENS**-steps

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=self.generator, device=self.device)

    def topics(self) -> torch.Tensor:
        """Return unit vectors [TOPICS, content channels]."""
        size = self.content.stop - self.content.start
        return torch.nn.functional.normalize(self.normal(TOPICS, size), dim=1)

    def turned(self, positions: torch.Tensor) -> torch.Tensor:
        """Return features [n, num_turning] whose products depend only on the distance: Σ cos(frequency · distance)."""
        angles = (positions.double()[:, None] * self.frequencies.double()).float()
        return torch.cat((angles.cos(), angles.sin()), 1)

    def keys(self, seq_len: int, topics: torch.Tensor) -> torch.Tensor:
        """Return the keys of a kv head: [seq_len, head_dim]."""
        k = KEY_NOISE * self.normal(seq_len, self.head_dim)
        k[:, : self.num_turning] *= 0.2
        k[:, : self.num_turning] += self.turned(torch.arange(seq_len, device=self.device))
        k[:NUM_SINKS, self.num_turning] += SINK_NORM
        starts = self.uniform(-(-seq_len // RUN_TOKENS)) < HEAVY_SHARE
        heavy = starts.repeat_interleave(RUN_TOKENS)[:seq_len]
        of_run = self.integers(0, TOPICS, len(starts)).repeat_interleave(RUN_TOKENS)[:seq_len]
        k[:, self.content] += heavy[:, None] * HEAVY_NORM * topics[of_run]
        mean = self.normal(self.head_dim) ** 3  # a few channels stand out
        return k + MEAN_NORM * mean / mean.norm()

    def values(self, seq_len: int) -> torch.Tensor:
        """Return the values of a kv head: [seq_len, head_dim]."""
        lasting = self.normal(-(-seq_len // VALUE_TOKENS), self.head_dim)
        v = 0.6 * lasting.repeat_interleave(VALUE_TOKENS, 0)[:seq_len] + 0.6 * self.normal(seq_len, self.head_dim)
        v += 0.5 * self.normal(self.head_dim)
        v[:NUM_SINKS] *= 0.1
        return v

    def queries(self, context_len: int, query_len: int, kind: Kind, topics: torch.Tensor) -> torch.Tensor:
        """Return the queries of a query head: [query_len, head_dim]. Each part is as strong as its contribution to the
        score."""
        positions = context_len + torch.arange(query_len, device=self.device)
        unit = self.head_dim**0.5
        q = self.normal(query_len, self.head_dim) * kind.noise / (KEY_NOISE * 0.5**0.5)
        q[:, : self.num_turning] *= 0.2
        shift, narrow = (1 << 12) ** float(self.uniform(1)), 0.8 + 0.4 * float(self.uniform(1))
        per_feature = unit / len(self.frequencies)
        q[:, : self.num_turning] += narrow * kind.band * per_feature * self.turned(positions)
        q[:, : self.num_turning] += narrow * kind.slash * per_feature * self.turned(positions - 64 - round(shift))
        q[:, self.num_turning] += kind.sink * unit / SINK_NORM
        q[:, self.content] += kind.heavy * unit / HEAVY_NORM * topics[self._looked_for(positions)]
        return q * torch.exp(0.1 * self.normal(query_len, 1))

    def _looked_for(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the topic that each query looks for."""
        first_tokens = self.integers(*TOPIC_TOKENS, int(positions[-1]) // TOPIC_TOKENS[0] + 1).cumsum(0)
        of_span = self.integers(0, TOPICS, len(first_tokens) + 1)
        topics = of_span[torch.searchsorted(first_tokens, positions, right=True)]
        lone = self.uniform(len(positions)) < 1 / LONE_QUERIES
        return torch.where(lone, self.integers(0, TOPICS, len(positions)), topics)


def paged_batch(data: Structured, page_size: int, layout: str = "NHD", seed: int = 0) -> Batch:
    """Return the row with its keys and values in a shuffled paged cache in vLLM's layout (``shuffled_cache``)."""
    seq_len, num_kv_heads, head_dim = data.k.shape
    generator = torch.Generator(data.k.device).manual_seed(seed)
    cache, block_table = shuffled_cache(
        [seq_len], num_kv_heads, head_dim, page_size, data.k.dtype, data.k.device, generator, layout
    )
    write_row(cache, block_table[0], data.k, data.v)
    rows = Rows((0,), (len(data.q),), (data.context_len,), block_table)
    return Batch(data.q, cache, rows, data.scale)

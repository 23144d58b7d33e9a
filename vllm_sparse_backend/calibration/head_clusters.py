# SPDX-License-Identifier: Apache-2.0
"""Clusters of heads with alike attention, for SharePrefill (arXiv:2505.19578, section 5.2 and appendices A.4 and C).

Each head's attention on one prompt, pooled to a square map, goes through an autoencoder with 64 latent values; heads
are clustered hierarchically by these, cut at a distance, and clusters of fewer than five heads are noise. What is made
of them for a profile, ``share_prefill.py`` has.

What the paper leaves open, and how it is settled here:

* Maps have the side of the one cluster file in the authors' repository, 1,936, or what a shorter prompt allows.
* Maps are divided by their largest value, as the decoder ends in a sigmoid.
* Representations are standardised, each value over all heads.
* The linkage is Ward's: cut at 40, the distance in the name of that file, other linkages of standardised
  representations would join all heads.
* Training stops when an epoch has not lowered the loss by a thousandth for 50 epochs. A GPU multiplies in bfloat16.

**Memory.** Maps take half precision, 7.5 MB a head at that side: 0.5 GB for 64 heads, 7.7 GB for the 1,024 of an 8B
model (at a side of 512 0.5 GB), on the host and, for training, on the device. Making them takes a layer's queries and
keys there and about 1 GB beside; training 1 GB for the autoencoder of that side and Adam's state, and some 5 GB for a
batch (``BATCH_PIXELS``).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vllm_sparse_backend.calibration.capture import Capture
from vllm_sparse_backend.calibration.external import require_module
from vllm_sparse_kernels.methods.share_prefill.method import NOISE

LATENT = 64
SHRINK = 16
"""Two poolings by 4: what a map's side must be a multiple of."""

SIDE = 1936
MAP_SIDE = 64
"""Where heads are told apart for a benchmark, not for a profile."""

SCORE_BYTES = 1 << 28
"""Of a layer's float32 scores that are made at a time; what comes of them takes as much three times over."""

EPOCHS, PATIENCE = 1000, 50
LEARNING_RATE = 1e-3

BATCH = 64
BATCH_PIXELS = BATCH * 512 * 512
"""Of all maps of a batch: larger maps come in smaller batches."""

DISTANCE = 10.0
"""Up to which heads are joined unless told; 40 in the name of the authors' file."""

MIN_HEADS = 5
"""Of a cluster: heads of smaller ones are noise."""

Clusters = tuple[tuple[int, ...], ...]
"""Per layer the cluster of each head, −1 for noise."""


def map_side(num_tokens: int) -> int:
    """The paper's side, or the largest that so many tokens fill."""
    return min(SIDE, num_tokens // SHRINK * SHRINK)


def attention_maps(q: torch.Tensor, k: torch.Tensor, scale: float, side: int) -> torch.Tensor:
    """Causal attention of a layer's heads, averaged over ``side`` × ``side`` blocks of equal width.

    q [num_tokens, num_heads, head_dim] and k [num_tokens, num_kv_heads, head_dim], the same tokens; those that do not
    fill a block at the end are left out. Returns [num_heads, side, side] float16 on the host, each map divided by its
    largest value.
    """
    width = len(q) // side
    if width == 0:
        raise ValueError(f"attention_maps: given {len(q)} tokens, expected at least side = {side}")
    group = q.shape[1] // k.shape[1]
    maps = [_group_maps(heads, k[:, i], scale, side, width) for i, heads in enumerate(q.split(group, 1))]
    return torch.cat(maps)


def _group_maps(q: torch.Tensor, k: torch.Tensor, scale: float, side: int, width: int) -> torch.Tensor:
    """The heads q [num_tokens, group, head_dim] of one kv head."""
    num_tokens, group = side * width, q.shape[1]
    queries, keys = q[:num_tokens].transpose(0, 1).float() * scale, k[:num_tokens].float()
    blocks = max(1, SCORE_BYTES // (4 * group * num_tokens * width))  # rows of the maps at a time
    maps = queries.new_zeros(group, side, side)
    for first in range(0, side, blocks):
        last = min(first + blocks, side)
        scores = queries[:, first * width : last * width] @ keys[: last * width].T
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(first * width + 1)
        weights = scores.masked_fill_(future, -torch.inf).softmax(-1)
        maps[:, first:last, :last] = weights.view(group, last - first, width, last, width).mean((2, 4))
    return (maps / maps.amax((1, 2), keepdim=True)).half().cpu()


def autoencoder(side: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Encoder and decoder of table 3 of the paper, for maps of any side that divides by 16."""
    if side % SHRINK:
        raise ValueError(f"autoencoder: given maps of side {side}, expected a multiple of {SHRINK}")
    small = side // SHRINK
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(32 * small * small, LATENT),
    )  # fmt: skip
    decoder = nn.Sequential(
        nn.Linear(LATENT, 32 * small * small), nn.ReLU(), nn.Unflatten(1, (32, small, small)),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, stride=4), nn.Sigmoid(),
    )  # fmt: skip
    return encoder, decoder


def representations(
    maps: Sequence[torch.Tensor] | torch.Tensor, device: str | torch.device = "cpu", epochs: int = EPOCHS
) -> torch.Tensor:
    """Latent values [n, 64] of n maps [side, side], by an autoencoder trained on them. Equal for equal maps.

    Maps are brought to ``device``, where training runs; they may be of any scale and dtype.
    """
    side, device, held = maps[0].shape[-1], torch.device(device), [head_map.to(device) for head_map in maps]
    batch = max(1, min(BATCH, BATCH_PIXELS // side**2))

    def images(chosen: Iterable[int]) -> torch.Tensor:
        part = torch.stack([held[i] for i in chosen]).float().unsqueeze(1)
        return part / part.amax((1, 2, 3), keepdim=True)

    # So few channels leave little to compute for each byte of a map.
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.random.fork_rng(), torch.backends.cudnn.flags(enabled=True, deterministic=True), narrow:
        torch.manual_seed(0)
        encoder, decoder = autoencoder(side)
        model = nn.Sequential(encoder, decoder).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        best, waited = torch.tensor(torch.inf, device=device), 0
        for _ in range(epochs):
            total = torch.zeros_like(best)  # the device is waited for once an epoch
            for chosen in torch.randperm(len(maps)).split(batch):
                part = images(chosen.tolist())
                loss = nn.functional.mse_loss(model(part), part)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(chosen)
            best, waited = (total, 0) if total < best * 0.999 else (best, waited + 1)
            if waited >= PATIENCE:
                break
        with torch.no_grad():
            return torch.cat([encoder(images(part.tolist())).float() for part in torch.arange(len(maps)).split(batch)])


def ward_labels(points: torch.Tensor, distance: float) -> list[int]:
    """Labels of the clusters that Ward's linkage of points [n, d] forms up to ``distance``."""
    if len(points) < 2:
        return [0] * len(points)
    hierarchy = require_scipy()
    tree = hierarchy.linkage(points.double().cpu().numpy(), "ward")
    return list(hierarchy.fcluster(tree, distance, "distance").tolist())


def require_scipy() -> Any:
    """scipy's hierarchical clustering. Raises ConfigurationError where there is none."""
    return require_module(
        "scipy.cluster.hierarchy", "clusters need scipy (pip install 'vllm-sparse-backend[calibrate]')"
    )


def cluster_heads(
    maps: Sequence[torch.Tensor] | torch.Tensor, distance: float = DISTANCE, device: str = "cpu", epochs: int = EPOCHS
) -> Clusters:
    """Clusters of all heads from the maps [num_heads, side, side] of each layer, numbered from 0 by first member."""
    num_heads = len(maps[0])
    latent = representations([head_map for layer in maps for head_map in layer], device, epochs)
    spread = latent.std(0)
    # A latent value that is the same for all heads says nothing, and must not become noise of unit size.
    standard = (latent - latent.mean(0)) / torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
    labels = ward_labels(standard, distance)
    large = [label for label in dict.fromkeys(labels) if labels.count(label) >= MIN_HEADS]
    ids = {label: i for i, label in enumerate(large)}
    flat = [ids.get(label, NOISE) for label in labels]
    return tuple(tuple(flat[i : i + num_heads]) for i in range(0, len(flat), num_heads))


def head_clusters(captured: Capture, device: str, side: int = MAP_SIDE, distance: float = DISTANCE) -> Clusters:
    """SharePrefill's clusters from a captured prompt; heads of layers that were not captured are noise."""
    layers = sorted(captured.scales)
    maps = []
    for layer in layers:
        q, k, _ = captured.read(layer, device)
        maps.append(attention_maps(q, k, captured.scales[layer], side))
    by_layer = dict(zip(layers, cluster_heads(maps, distance, device), strict=True))
    noise = (NOISE,) * captured.shape.num_heads
    return tuple(by_layer.get(layer, noise) for layer in range(captured.shape.num_layers))

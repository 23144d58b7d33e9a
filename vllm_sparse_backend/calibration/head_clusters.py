# SPDX-License-Identifier: Apache-2.0
"""Clusters of heads with similar attention, for SharePrefill (arXiv:2505.19578, section 5.2, appendices A.4 and C).

Each head's attention on one prompt is pooled to a square map, which an autoencoder compresses to 64 latent values.
Hierarchical clustering of these values, cut at a distance, groups the heads. Clusters of fewer than five heads are
noise. ``share_prefill.py`` turns the clusters into a profile.

Choices that the paper leaves open:

* Maps have the side of the cluster file in the authors' repository, 1,936, or less for a shorter prompt.
* Maps are divided by their largest value, because the decoder ends in a sigmoid.
* Each latent value is standardised over all heads.
* The linkage is Ward's: cut at 40, the distance in the name of that file, other linkages of standardised
  representations would join all heads.
* Training stops if the loss has not dropped by a thousandth in 50 epochs. A GPU multiplies in bfloat16.

**Memory.** Maps are in half precision and take 7.5 MB for each head at that side: 0.5 GB for 64 heads, 7.7 GB for the
1,024 heads of an 8B model (0.5 GB at a side of 512). They lie on the host and, for training, on the device. Making them
needs a layer's queries and keys on the device, and about 1 GB more. Training needs 1 GB for the autoencoder of that
side with Adam's state, and about 5 GB for a batch (``BATCH_PIXELS``).
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
"""A map's side is a multiple of this: the encoder pools twice by 4."""

SIDE = 1936
MAP_SIDE = 64
"""Side of maps in benchmarks; profiles use larger ones."""

SCORE_BYTES = 1 << 28
"""Bytes of float32 scores that are computed at a time. Intermediate results take about three times as much."""

EPOCHS, PATIENCE = 1000, 50
LEARNING_RATE = 1e-3

BATCH = 64
BATCH_PIXELS = BATCH * 512 * 512
"""Pixels of all maps in a batch, so larger maps come in smaller batches."""

DISTANCE = 10.0
"""Default linkage distance up to which heads are joined; the authors' file name says 40."""

MIN_HEADS = 5
"""Minimum number of heads in a cluster. Heads of smaller clusters are noise."""

Clusters = tuple[tuple[int, ...], ...]
"""For each layer, the cluster of each head; −1 for noise."""


def map_side(num_tokens: int) -> int:
    """Return the side of attention maps for a prompt.

    Args:
        num_tokens: Tokens of the prompt.

    Returns:
        The paper's side, or the largest multiple of 16 that the prompt fills.
    """
    return min(SIDE, num_tokens // SHRINK * SHRINK)


def attention_maps(q: torch.Tensor, k: torch.Tensor, scale: float, side: int) -> torch.Tensor:
    """Average the causal attention of a layer's heads over ``side`` × ``side`` blocks of equal width.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k: [num_tokens, num_kv_heads, head_dim], of the same tokens. Last tokens that do not fill a block are left out.
        scale: What multiplies q·k.
        side: Blocks in each direction.

    Returns:
        [num_heads, side, side] float16 on the host, each map divided by its largest value.

    Raises:
        ValueError: The prompt has fewer tokens than ``side``.
    """
    width = len(q) // side
    if width == 0:
        raise ValueError(f"attention_maps: given {len(q)} tokens, expected at least side = {side}")
    group = q.shape[1] // k.shape[1]
    maps = [_group_maps(heads, k[:, i], scale, side, width) for i, heads in enumerate(q.split(group, 1))]
    return torch.cat(maps)


def _group_maps(q: torch.Tensor, k: torch.Tensor, scale: float, side: int, width: int) -> torch.Tensor:
    """Return the maps of the heads q [num_tokens, group, head_dim] of one kv head."""
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
    """Build the encoder and decoder of the paper's table 3.

    Args:
        side: Side of the maps, a multiple of 16.

    Returns:
        Encoder [n, 1, side, side] → [n, 64], and decoder of the reverse.

    Raises:
        ValueError: ``side`` is not a multiple of 16.
    """
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
    """Train an autoencoder on maps, and return their latent values. The result is deterministic.

    Args:
        maps: n maps [side, side] of any scale and dtype, which are moved to ``device``.
        device: Where training runs.
        epochs: Maximum number of epochs.

    Returns:
        [n, 64] float32 on ``device``.
    """
    side, device, held = maps[0].shape[-1], torch.device(device), [head_map.to(device) for head_map in maps]
    batch = max(1, min(BATCH, BATCH_PIXELS // side**2))

    def images(chosen: Iterable[int]) -> torch.Tensor:
        part = torch.stack([held[i] for i in chosen]).float().unsqueeze(1)
        return part / part.amax((1, 2, 3), keepdim=True)

    # With so few channels, there is little to compute for each byte of a map.
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.random.fork_rng(), torch.backends.cudnn.flags(enabled=True, deterministic=True), narrow:
        torch.manual_seed(0)
        encoder, decoder = autoencoder(side)
        model = nn.Sequential(encoder, decoder).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        best, waited = torch.tensor(torch.inf, device=device), 0
        for _ in range(epochs):
            total = torch.zeros_like(best)  # waits for the device only once per epoch
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
    """Cluster points with Ward's linkage.

    Args:
        points: [n, d].
        distance: Linkage distance up to which clusters are joined.

    Returns:
        The label of each point.
    """
    if len(points) < 2:
        return [0] * len(points)
    hierarchy = require_scipy()
    tree = hierarchy.linkage(points.double().cpu().numpy(), "ward")
    return list(hierarchy.fcluster(tree, distance, "distance").tolist())


def require_scipy() -> Any:
    """Import scipy's hierarchical clustering.

    Returns:
        The module ``scipy.cluster.hierarchy``. Without scipy, ConfigurationError is raised.
    """
    return require_module(
        "scipy.cluster.hierarchy", "clusters need scipy (pip install 'vllm-sparse-backend[calibrate]')"
    )


def cluster_heads(
    maps: Sequence[torch.Tensor] | torch.Tensor, distance: float = DISTANCE, device: str = "cpu", epochs: int = EPOCHS
) -> Clusters:
    """Cluster all heads of a model by their attention maps.

    Args:
        maps: For each layer, [num_heads, side, side].
        distance: Linkage distance up to which heads are joined.
        device: Where the autoencoder is trained.
        epochs: Maximum number of training epochs.

    Returns:
        For each layer, the cluster of each head, numbered from 0 by first member; −1 for noise.
    """
    num_heads = len(maps[0])
    latent = representations([head_map for layer in maps for head_map in layer], device, epochs)
    spread = latent.std(0)
    # A latent value that is the same for all heads carries no information. Scaled to unit variance, it would be noise.
    standard = (latent - latent.mean(0)) / torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
    labels = ward_labels(standard, distance)
    large = [label for label in dict.fromkeys(labels) if labels.count(label) >= MIN_HEADS]
    ids = {label: i for i, label in enumerate(large)}
    flat = [ids.get(label, NOISE) for label in labels]
    return tuple(tuple(flat[i : i + num_heads]) for i in range(0, len(flat), num_heads))


def head_clusters(captured: Capture, device: str, side: int = MAP_SIDE, distance: float = DISTANCE) -> Clusters:
    """Compute SharePrefill's clusters from a captured prompt.

    Args:
        captured: The prompt's capture.
        device: Where maps are made and the autoencoder is trained.
        side: Side of the attention maps.
        distance: Linkage distance up to which heads are joined.

    Returns:
        For each layer, the cluster of each head; heads of layers that were not captured are noise.
    """
    layers = sorted(captured.scales)
    maps = []
    for layer in layers:
        q, k, _ = captured.read(layer, device)
        maps.append(attention_maps(q, k, captured.scales[layer], side))
    by_layer = dict(zip(layers, cluster_heads(maps, distance, device), strict=True))
    noise = (NOISE,) * captured.shape.num_heads
    return tuple(by_layer.get(layer, noise) for layer in range(captured.shape.num_layers))

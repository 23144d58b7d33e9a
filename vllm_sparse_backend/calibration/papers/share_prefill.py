# SPDX-License-Identifier: Apache-2.0
"""SharePrefill's clusters of heads (arXiv:2505.19578, section 5.2, appendices A.4 and C).

Each head's attention on one prompt is pooled to a square map, which an autoencoder compresses to 64 latent values.
Hierarchical clustering of these values, cut at a distance, groups the heads. Clusters of fewer than five heads are
noise. All heads have the paper's γ, δ and τ. Under tensor parallelism, heads share only within a rank.

Choices that the paper leaves open:

* On a GPU, maps have the side 1,936, or the largest multiple of 16 that a shorter prompt fills. The paper does not
  state the side; it follows from its table 3, whose encoder ends in 468,512 = 32 · 121² values after pooling twice by
  4. On a CPU, maps have a side of at most ``CPU_SIDE``: training time is proportional to the number of pixels.
* Maps are divided by their largest value, because the decoder ends in a sigmoid.
* Representations are standardised, each value over all heads.
* The linkage is Ward's, and the distance is the 10 of appendix A.4. The only cluster file in the authors'
  repository has 40 in its name: at 40, other linkages of standardised representations would join all heads.
* Training stops early ("early stopping" is all that appendix A.4 states) when the last ``PATIENCE`` epochs have lowered
  the loss by too little: on a GPU by less than a thousandth of the best loss, on a CPU by less than a hundredth of the
  first. Small maps hardly ever meet the first rule, because their loss keeps falling by constant factors towards 0.
* A GPU multiplies in bfloat16.

**Memory.** Maps are in half precision: at a side of 1,936, they take 7.5 MB for each head, 0.5 GB for 64 heads, and
7.7 GB for the 1,024 heads of an 8B model (0.5 GB at a side of 512), on the host and, for training, on the device.
Computing them takes a layer's queries and keys on the device, and about 1 GB more. At that side, training takes 1 GB
for the autoencoder and Adam's state, and about 5 GB for a batch (``BATCH_PIXELS``).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_sparse_backend.calibration.external import require_module
from vllm_sparse_backend.calibration.loop import Job
from vllm_sparse_backend.config.errors import ConfigurationError, refusal
from vllm_sparse_backend.progress import Progress
from vllm_sparse_kernels.methods.share_prefill.method import NOISE, SharePrefill

LATENT = 64
SHRINK = 16
"""A map's side is a multiple of this: the encoder pools twice by 4."""

SIDE, CPU_SIDE = 1936, 64
"""Largest sides of maps: on a GPU as in the paper, and on a CPU."""

SCORE_BYTES = 1 << 28
"""Bytes of float32 scores that are computed at a time. Intermediate results take about three times that memory."""

EPOCHS = 1000
LEARNING_RATE = 1e-3

PATIENCE = 50
"""Epochs that together must lower the loss by enough; otherwise training stops."""

LEAST_DROP_OF_BEST = 0.001
"""Smallest drop on a GPU, as a share of the best loss before."""

LEAST_DROP_OF_FIRST = 0.01
"""Smallest drop on a CPU, as a share of the first epoch's loss."""

BATCH = 64
BATCH_PIXELS = BATCH * 512 * 512
"""Pixels of all maps in a batch, so larger maps come in smaller batches."""

DISTANCE = 10.0
"""Linkage distance up to which heads are joined; the authors' file name says 40."""

MIN_HEADS = 5
"""Minimum number of heads in a cluster. Heads of smaller clusters are noise."""


def map_side(num_tokens: int, device: torch.device) -> int:
    """Return the side of attention maps for a prompt."""
    if num_tokens < SHRINK:
        expected = f"at least {SHRINK} tokens, by which share_prefill's autoencoder shrinks attention maps"
        raise refusal("prompts", f"{num_tokens} tokens", expected)
    largest = CPU_SIDE if device.type == "cpu" else SIDE
    return min(largest, num_tokens // SHRINK * SHRINK)


def attention_maps(q: torch.Tensor, k: torch.Tensor, scale: float, side: int) -> torch.Tensor:
    """Average the causal attention of a layer's heads over ``side`` × ``side`` blocks of equal width."""
    group = q.shape[1] // k.shape[1]
    return torch.cat([_group_maps(heads, k[:, i], scale, side) for i, heads in enumerate(q.split(group, 1))])


def _group_maps(q: torch.Tensor, k: torch.Tensor, scale: float, side: int) -> torch.Tensor:
    """Return the maps of the heads q [num_tokens, group, head_dim] of one kv head."""
    width, group = len(q) // side, q.shape[1]
    num_tokens = side * width
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
    """Build the encoder and decoder of the paper's table 3."""
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


def has_converged(losses: Sequence[float], device_type: str) -> bool:
    """Return whether the last epochs have lowered the loss by too little to go on."""
    before, latest = losses[:-PATIENCE], losses[-PATIENCE:]
    if not before:
        return False
    best = min(before)
    least_drop = LEAST_DROP_OF_FIRST * losses[0] if device_type == "cpu" else LEAST_DROP_OF_BEST * best
    return not best - min(latest) > least_drop


def representations(maps: torch.Tensor, device: torch.device, progress: Progress) -> torch.Tensor:
    """Train an autoencoder on maps [num_heads, side, side], and return their latent values. This is deterministic."""
    side, on_device = maps.shape[-1], maps.to(device)
    batch = max(1, min(BATCH, BATCH_PIXELS // side**2))
    # With so few channels, there is little to compute for each byte of a map.
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with torch.random.fork_rng(), torch.backends.cudnn.flags(enabled=True, deterministic=True), narrow:
        torch.manual_seed(0)
        encoder, decoder = autoencoder(side)
        model = nn.Sequential(encoder, decoder).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        losses: list[float] = []
        progress.begin(f"autoencoder of {len(maps)} maps of {side} × {side}, epochs at most", EPOCHS)
        for epoch in range(1, EPOCHS + 1):
            total = torch.zeros((), device=device)
            for chosen in torch.randperm(len(maps)).to(device).split(batch):
                part = on_device[chosen].float().unsqueeze(1)
                loss = nn.functional.mse_loss(model(part), part)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(chosen)
            progress.step()
            losses.append(float(total) / len(maps))  # the only wait for the device in an epoch
            if has_converged(losses, device.type):
                progress.print(f"autoencoder: converged after {epoch} epochs")
                break
        with torch.no_grad():
            return torch.cat([encoder(part.float().unsqueeze(1)).float() for part in on_device.split(batch)])


def ward_labels(points: torch.Tensor, distance: float) -> list[int]:
    """Cluster at least two points with Ward's linkage."""
    labels = require_scipy().fclusterdata(points.double().cpu().numpy(), distance, "distance", method="ward")
    return labels.tolist()


def require_scipy() -> Any:
    """Import scipy's hierarchical clustering."""
    return require_module(
        "scipy.cluster.hierarchy", "clusters need scipy (pip install 'vllm-sparse-backend[calibrate]')"
    )


def cluster_heads(maps: torch.Tensor, device: torch.device, progress: Progress) -> list[list[int]]:
    """Return the cluster of each layer's heads from their maps [num_layers, num_heads, side, side]; −1 for noise."""
    latent = representations(maps.flatten(0, 1), device, progress)
    spread = latent.std(0)
    # A latent value that is the same for all heads carries no information. Scaled to unit variance, it would be noise.
    standard = (latent - latent.mean(0)) / torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
    labels = ward_labels(standard, DISTANCE)
    large = [label for label, num_heads in Counter(labels).items() if num_heads >= MIN_HEADS]
    clusters = [large.index(label) if label in large else NOISE for label in labels]
    return torch.tensor(clusters).view(maps.shape[:2]).tolist()


def shared_heads(job: Job) -> list[list[SharePrefill]]:
    """Cluster the heads of a model on the first prompt, and return the method of each layer and head."""
    (captured,) = job.capture(job.prompts[:1])
    side, layers, num_heads = map_side(captured.num_tokens, job.device), sorted(captured.scales), job.shape.num_heads
    maps = torch.empty(len(layers), num_heads, side, side, dtype=torch.float16)
    job.progress.begin("attention maps of layers", len(layers))
    for i, layer in enumerate(layers):
        q, k, _ = captured.read(layer, job.device)
        maps[i] = attention_maps(q, k, captured.scales[layer], side)
        job.progress.step()
    methods = [[SharePrefill()] * num_heads for _ in range(job.shape.num_layers)]
    for layer, clusters in zip(layers, cluster_heads(maps, job.device, job.progress), strict=True):
        methods[layer] = [SharePrefill(cluster=cluster) for cluster in clusters]
    if all(method.cluster == NOISE for heads in methods for method in heads):
        raise ConfigurationError(
            f"--method share_prefill: given a model without clusters, expected at least {MIN_HEADS} heads with similar "
            "attention; use --method flex_vertical_slash"
        )
    return methods

"""Clusters of heads with alike attention, for SharePrefill (arXiv:2505.19578, section 5.2 and appendices A.4 and C).

Each head's attention on one prompt, pooled to a square map, goes through an autoencoder with 64 latent values; heads
are clustered hierarchically by these, cut at a distance, and clusters of fewer than five heads are noise.

What the paper leaves open, and how it is settled here:

* Maps are divided by their largest value, as the decoder ends in a sigmoid.
* Representations are standardised, each value over all heads.
* The linkage is Ward's: cut at 40, the distance in the name of the one cluster file in the authors' repository, other
  linkages of standardised representations would join all heads.
* Training stops when an epoch has not lowered the loss by a thousandth for 50 epochs.
"""

from collections.abc import Sequence

import torch
from torch import nn

from vllm_sparse_backend.settings.methods import parameters_of
from vllm_sparse_backend.settings.model_shape import ModelShape
from vllm_sparse_backend.settings.profile import Profile
from vllm_sparse_backend.settings.ranges import format_ranges
from vllm_sparse_kernels.select.share_prefill import NOISE, SharePrefill

LATENT = 64
SHRINK = 16
"""Two poolings by 4: what a map's side must be a multiple of."""

Clusters = tuple[tuple[int, ...], ...]
"""Per layer the cluster of each head, −1 for noise."""


def attention_map(q: torch.Tensor, k: torch.Tensor, scale: float, side: int) -> torch.Tensor:
    """Causal attention of one head, averaged over ``side`` × ``side`` blocks of equal width: [side, side] float32.

    q and k are [num_tokens, head_dim], the same tokens; those that do not fill a block at the end are left out.
    """
    width = len(q) // side
    if width == 0:
        raise ValueError(f"attention_map: given {len(q)} tokens, expected at least side = {side}")
    q, k = q[: side * width].float(), k[: side * width].float()
    rows = []
    for i in range(side):
        end = (i + 1) * width
        scores = (q[i * width : end] @ k[:end].T) * scale
        weights = scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(i * width + 1), -torch.inf)
        blocks = weights.softmax(-1).mean(0).view(-1, width).mean(1)
        rows.append(nn.functional.pad(blocks, (0, side - i - 1)))
    return torch.stack(rows)


class MapAutoencoder(nn.Module):
    """Table 3 of the paper, for maps of any side that divides by 16."""

    def __init__(self, side: int) -> None:
        super().__init__()
        if side % SHRINK:
            raise ValueError(f"MapAutoencoder: given maps of side {side}, expected a multiple of {SHRINK}")
        small = side // SHRINK
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
            nn.Flatten(), nn.Linear(32 * small * small, LATENT),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 32 * small * small), nn.ReLU(), nn.Unflatten(1, (32, small, small)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=4), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(maps))


def representations(
    maps: torch.Tensor,
    epochs: int = 1000,
    learning_rate: float = 1e-3,
    patience: int = 50,
    batch: int = 64,
    seed: int = 0,
) -> torch.Tensor:
    """Latent values [n, 64] of maps [n, side, side], by an autoencoder trained on them. Equal for equal seeds."""
    images = (maps / maps.amax((1, 2), keepdim=True)).float().unsqueeze(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MapAutoencoder(maps.shape[-1]).to(maps.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        best, waited = float("inf"), 0
        for _ in range(epochs):
            total = 0.0
            for chosen in torch.randperm(len(images)).split(batch):
                part = images[chosen.to(images.device)]
                loss = nn.functional.mse_loss(model(part), part)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(chosen)
            best, waited = (total, 0) if total < best * 0.999 else (best, waited + 1)
            if waited >= patience:
                break
    with torch.no_grad():
        return torch.cat([model.encoder(part) for part in images.split(batch)])


def ward_labels(points: torch.Tensor, distance: float) -> list[int]:
    """Labels of the clusters that Ward's linkage of points [n, d] forms up to ``distance``, by first member."""
    squared = torch.cdist(points.double(), points.double()).square()
    squared.fill_diagonal_(torch.inf)
    sizes = torch.ones(len(points), dtype=torch.float64, device=points.device)
    members: list[list[int]] = [[i] for i in range(len(points))]
    for _ in range(len(points) - 1):
        a, b = sorted(divmod(int(squared.argmin()), len(points)))
        closest = float(squared[a, b])
        if closest > distance**2:
            break
        # Lance and Williams: how far the union is from every other cluster.
        joined = (sizes[a] + sizes) * squared[a] + (sizes[b] + sizes) * squared[b] - sizes * closest
        joined /= sizes[a] + sizes[b] + sizes
        joined[[a, b]] = torch.inf
        squared[a], squared[:, a] = joined, joined
        squared[b], squared[:, b] = torch.inf, torch.inf
        sizes[a] += sizes[b]
        members[a] += members[b]
        members[b] = []
    clusters = sorted(sorted(m) for m in members if m)
    label = {point: i for i, cluster in enumerate(clusters) for point in cluster}
    return [label[i] for i in range(len(points))]


def cluster_heads(maps: torch.Tensor, distance: float = 10.0, min_heads: int = 5, **training: int | float) -> Clusters:
    """Clusters of all heads from their maps [num_layers, num_heads, side, side], numbered from 0 by first member.

    ``training`` goes to ``representations``.
    """
    num_heads = maps.shape[1]
    latent = representations(maps.flatten(0, 1), **training)  # type: ignore[arg-type]
    spread = latent.std(0)
    # A latent value that is the same for all heads says nothing, and must not become noise of unit size.
    standard = (latent - latent.mean(0)) / torch.where(spread > 1e-6 * spread.max(), spread, torch.inf)
    labels = ward_labels(standard, distance)
    large = [label for label in dict.fromkeys(labels) if labels.count(label) >= min_heads]
    ids = {label: i for i, label in enumerate(large)}
    flat = [ids.get(label, NOISE) for label in labels]
    return tuple(tuple(flat[i : i + num_heads]) for i in range(0, len(flat), num_heads))


def profile_of(clusters: Clusters, shape: ModelShape, thresholds: SharePrefill | None = None) -> Profile:
    """A profile of SharePrefill with these clusters: noise is the default, other heads are named with theirs."""
    common = parameters_of(thresholds or SharePrefill())
    del common["cluster"]
    layers = {str(i): {"heads": _by_cluster(heads, common)} for i, heads in enumerate(clusters) if set(heads) - {NOISE}}
    return Profile.model_validate({"format": 1, "model": shape, "default": common, "layers": layers})


def _by_cluster(heads: Sequence[int], common: dict[str, object]) -> dict[str, object]:
    """The heads of each cluster of a layer, as a profile writes them."""
    return {
        format_ranges(head for head, c in enumerate(heads) if c == cluster): common | {"cluster": cluster}
        for cluster in sorted(set(heads) - {NOISE})
    }

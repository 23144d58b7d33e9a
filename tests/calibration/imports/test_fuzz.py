# SPDX-License-Identifier: Apache-2.0
"""Damaged files: each loads or is refused with its name; none crashes or hangs."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.foreign_files import clusters, patterns, save
from tests.helpers.profile_cases import LEVELS
from vllm_sparse_backend.calibration.imports import import_profile
from vllm_sparse_backend.config.errors import ConfigurationError
from vllm_sparse_backend.config.profile import Profile, load_profile, parse_profile

FILES = 100

NUMBERS = [-1, 0, 1, 7, 1 << 40, 0.5, -0.5, 1e300, float("nan"), float("inf")]
TEXTS = ["", "any", "0-3", "9-1", "dense", "\x00", "é" * 300]
VALUES = [None, True, *NUMBERS, *TEXTS, [], [1, 1], [[]], {}, {"method": "dense"}, {"a": {"b": []}}]

pytestmark = pytest.mark.full


def loads(load: Callable[[], Profile], source: str) -> bool:
    """Return whether the file loads. A loaded profile can be written and read again; an error is a line with the
    place."""
    try:
        profile = load()
    except ConfigurationError as error:
        message = str(error)
        assert message.startswith(f"{source}: ")
        assert len(message.splitlines()) == 1
        return False
    again = profile.to_yaml()
    assert parse_profile(again, "").to_yaml() == again
    return True


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    for key in keys:
        yield data, key
        yield from places(data[key])


def change(data: Any, source: random.Random) -> None:
    """Change a value in the container."""
    holder, key = source.choice(list(places(data)))
    kind = source.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        holder[source.choice(["x", "method", "0-9", "heads", "1e3", 3, "12"])] = holder.pop(key)
    elif kind == 1:
        del holder[key]
    elif kind == 2 and type(holder[key]) in (int, float):
        holder[key] = holder[key] * source.choice((-1, 2, 1000, 0.37))
    else:
        holder[key] = source.choice(VALUES)


def levels() -> Any:
    """Return the profile's levels. Profiles are saved as JSON, which is also YAML."""
    return json.loads(json.dumps(yaml.safe_load(LEVELS)))


@pytest.mark.parametrize("make", [levels, patterns, clusters])
def test_damaged_files(make: Callable[[], Any], model: Path) -> None:
    source, path = random.Random(1), model.parent / "given.yaml"
    refused = 0
    for _ in range(FILES):
        change(content := make(), source)
        save(content, path)
        refused += not loads(lambda: load_profile(path) if make is levels else import_profile(path, model), str(path))
    assert FILES / 10 < refused < FILES

# SPDX-License-Identifier: Apache-2.0
"""A YAML reader for users' files: it executes nothing, refuses duplicate keys, and reads 1e-3 as a number."""

import errno
import os
import re
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import yaml

from vllm_sparse_backend.config.errors import ConfigurationError

MAX_BYTES = 4 << 20
"""About ten times the largest useful file: a profile with separate parameters for each head of 80 layers."""

MAX_DEPTH = 32
"""Maximum depth. Deeper nesting could overflow the stack, so it is refused before the values are built."""
TOO_DEEP = f"nested deeper than {MAX_DEPTH}"

# YAML 1.1 reads 1e-3, which has no point, as a text. YAML 1.2 and users read it as a number.
_FLOAT = ("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"), list("-+0123456789"))

# libyaml's parser is ten times as fast, but PyYAML may be built without it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                problem = f"key {key!r} is given twice" if isinstance(key, Hashable) else "found unhashable key"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def file_at(path: str) -> Path | None:
    """Find the file at a path."""
    try:
        file = Path(path).expanduser()
        return file if file.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def why_no_file(path: str) -> str:
    """Explain why ``file_at`` finds no file at a path."""
    try:
        file = Path(path).expanduser()
        exists = os.path.lexists(file)
    except (OSError, RuntimeError, ValueError):
        exists = False
    return f"{path} is {kind_of_file(file)}, expected a file" if exists else "no such file"


def kind_of_file(path: Path) -> str:
    """Name the kind of an existing path."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        broken = {errno.ELOOP: "a loop of links", errno.ENOENT: "a link to nothing"}
        return broken.get(error.errno or 0, f"not readable ({error.strerror})")
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


# Errors name the kind of a file's content and never quote it, because a user may name any file of the machine.
_KINDS = {str: "a text", list: "a list", type(None): "nothing"}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Readers fold line breaks, including Unicode's, into blanks unless they are escaped in double quotes.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)  # quotes a text that looks like such a number
_Dumper.add_representer(str, _represent_text)


def read_text(path: Path) -> str:
    """Read a text file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"{path}: given more than {MAX_BYTES} bytes, expected at most {MAX_BYTES}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 at byte {error.start}") from None


def parse(text: str, source: str) -> dict[Any, Any]:
    """Parse a YAML text that contains a mapping."""
    try:
        _refuse_depth(text)
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        # libyaml's scanner also limits the depth. It reads ahead, so it may fail before `_refuse_depth` does.
        problem = TOO_DEEP if "nesting depth" in str(error.problem) else error.problem or error.context
        raise ConfigurationError(f"{source}: {place}{problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError comes from an invalid date or number
        raise ConfigurationError(f"{source}: not YAML: {error}") from None
    if not isinstance(data, dict):
        kind = _KINDS.get(type(data), "a value")
        raise ConfigurationError(f"{source}: given {kind}, expected a mapping of fields to values")
    return data


def dump(data: dict[str, Any]) -> str:
    """Format a mapping as YAML."""
    innermost_inline: Any = None  # PyYAML accepts None here, but its type stubs do not
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=innermost_inline
    )


def _refuse_depth(text: str) -> None:
    """Raise ``MarkedYAMLError`` for deep nesting, and for aliases, which could expand a small file to a huge value."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias or depth > MAX_DEPTH:
            problem = "aliases (*name) are not supported, expected the value itself" if is_alias else TOO_DEEP
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=cast(Any, event.start_mark))

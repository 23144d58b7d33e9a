# SPDX-License-Identifier: Apache-2.0
"""YAML for files that people write: nothing is executed, a key given twice is an error, and 1e-3 is a number."""

import errno
import os
import re
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import yaml

from vllm_sparse_backend.settings.errors import ConfigurationError

MAX_BYTES = 4 << 20
"""Some ten times the largest file that makes sense: each head of 80 layers with parameters of its own."""

MAX_DEPTH = 32  # deeper nesting is refused before it is built, as it could only overflow the stack
TOO_DEEP = f"nested deeper than {MAX_DEPTH}"

# YAML 1.1 takes 1e-3 for a text, as it lacks the point; YAML 1.2 and people take it for a number.
_FLOAT = ("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"), list("-+0123456789"))

# libyaml's parser is ten times as fast, where PyYAML was built with it.
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
    """The file that a path names; None where there is none, or no way to it: a name that is too long, a folder that
    may not be searched, a home of nobody's."""
    try:
        file = Path(path).expanduser()
        return file if file.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def why_no_file(path: str) -> str:
    """Why ``file_at`` has nothing for this path: "no such file", or what is there instead."""
    try:
        file = Path(path).expanduser()
        exists = os.path.lexists(file)
    except (OSError, RuntimeError, ValueError):
        exists = False
    return f"{path} is {kind_of_file(file)}, expected a file" if exists else "no such file"


def kind_of_file(path: Path) -> str:
    """What an existing path is: "a folder", "a fifo", "a loop of links", and so on."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        broken = {errno.ELOOP: "a loop of links", errno.ENOENT: "a link to nothing"}
        return broken.get(error.errno or 0, f"not to be opened ({error.strerror})")
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


_KINDS = {str: "a text", list: "a list", type(None): "nothing"}  # content is not shown: any file may have been named


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A reader folds line breaks, Unicode's among them, to blanks unless they stand as escapes in double quotes.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)  # so that a text that looks like such a number is written in quotes
_Dumper.add_representer(str, _represent_text)


def read_text(path: Path) -> str:
    """The text of a file of at most ``MAX_BYTES``. Raises ``ConfigurationError`` where there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"{path}: given more than {MAX_BYTES} bytes, expected at most that")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 at byte {error.start}") from None


def parse(text: str, source: str) -> dict[Any, Any]:
    """The mapping that a YAML text holds. Raises ``ConfigurationError`` naming ``source`` and the line."""
    try:
        _refuse_depth(text)
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        # libyaml's scanner has a bound on depth too; as it reads ahead, it may reach that before we reach ours.
        problem = TOO_DEEP if "nesting depth" in str(error.problem) else error.problem or error.context
        raise ConfigurationError(f"{source}: {place}{problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: a date or number that is none
        raise ConfigurationError(f"{source}: not YAML: {error}") from None
    if not isinstance(data, dict):
        given = _KINDS.get(type(data), "a value")
        raise ConfigurationError(f"{source}: given {given}, expected a mapping of fields to values")
    return data


def dump(data: dict[str, Any]) -> str:
    """Mappings and lists of nothing but plain values stand on one line, or as many as they fill."""
    flow: Any = None
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=flow)


def _refuse_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        alias = isinstance(event, yaml.AliasEvent)  # it can make a small file into a huge value
        if alias or depth > MAX_DEPTH:
            problem, mark = "aliases (*name) are not taken" if alias else TOO_DEEP, cast(Any, event.start_mark)
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)

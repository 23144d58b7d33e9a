# SPDX-License-Identifier: Apache-2.0
"""A YAML reader for users' files: JSON's kinds of values only, no tags, aliases or duplicate keys."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml

from vllm_sparse_backend.config.errors import ConfigurationError

MAX_DEPTH = 32
"""Maximum depth. Deeper nesting could overflow the stack, so it is refused before the values are built."""

# libyaml's parser is ten times as fast, but PyYAML may be built without it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# As in YAML 1.2: 1e-3 is a number, and 1:30 (sexagesimal in YAML 1.1), 0b1 and dates are texts.
_NUMBERS = (
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9_]*)"),
    ("tag:yaml.org,2002:float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"),
    ("tag:yaml.org,2002:float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
)


class _Loader(_SafeLoader):
    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":bool"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = dict(super().construct_mapping(node, deep))  # refuses keys that are not hashable
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            keys.add(key)
        return mapping


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern in _NUMBERS:
    for _class in (_Loader, _Dumper):  # the dumper quotes texts that look like numbers
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))


def parse(text: str, source: str) -> dict[Any, Any]:
    """Parse a YAML text that contains a mapping. Errors never quote its content: users may name any file."""
    try:
        _refuse_unsupported(text)
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigurationError(f"{source}: {place}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError comes from an integer of thousands of digits
        raise ConfigurationError(f"{source}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigurationError(f"{source}: given no mapping, expected a mapping of fields to values")
    return data


def dump(data: dict[str, Any]) -> str:
    """Format a mapping as YAML."""
    # A flow style of None writes the innermost mappings inline.
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=None)


def _refuse_unsupported(text: str) -> None:
    """Raise ``MarkedYAMLError`` for deep nesting, tags, and aliases, which could expand a small file hugely."""
    depth = 0
    events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        problem = None
        if depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH}"
        elif isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not supported, expected the value itself"
        elif getattr(event, "tag", None) is not None:
            problem = f"tags ({event.tag}) are not supported, expected the value itself"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

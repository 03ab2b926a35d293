"""Reads YAML as `yaml.safe_load` does, but refuses a mapping in which a key stands twice."""

from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping in which a key stands twice; YAML's own loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping as a dictionary.

        Raises:
            yaml.constructor.ConstructorError: A key stands twice.
        """
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"key {key.value!r} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

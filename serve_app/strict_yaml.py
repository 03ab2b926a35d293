"""Reads YAML as `yaml.safe_load` does, but refuses duplicate keys in a mapping."""

from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys in a mapping; PyYAML's own loader silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping as a dictionary.

        Raises:
            yaml.constructor.ConstructorError: A key appears twice.
        """
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"key {key.value!r} appears twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

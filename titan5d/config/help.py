"""`--help`: every key with its type, default and docstring, made from the schema itself."""

from __future__ import annotations

import inspect
from textwrap import fill
from typing import Any

from pydantic import TypeAdapter

from titan5d.config.schema import Config


def config_help(section: str | None = None) -> str:
    """All sections, or one (`training`, `quantize.linear.float8`)."""
    schema = TypeAdapter(Config).json_schema()
    lines: list[str] = []
    _walk(schema, schema, "", lines, section or "")
    if not lines:
        known = ", ".join(schema["properties"])
        return f"no section called {section}; there are: {known}"
    return "\n".join(lines)


def _walk(schema: dict[str, Any], root: dict[str, Any], prefix: str, lines: list[str], wanted: str) -> None:
    show = prefix.startswith(wanted)
    title = schema.get("description", "")
    if show and prefix:
        lines += ["", f"[{prefix.rstrip('.')}]  {inspect.cleandoc(title)}"]
    below = []
    for name, entry in schema.get("properties", {}).items():
        target = root["$defs"].get(entry["$ref"].rpartition("/")[2]) if "$ref" in entry else None
        if target is not None:
            below.append((name, target))
        elif show:
            default = entry.get("default")
            lines.append(f"  --{prefix}{name}  <{_kind(entry)}>  (default: {default})")
            words = " ".join(entry.get("description", "").split())
            lines.append(fill(words, 110, initial_indent="      ", subsequent_indent="      "))
    for name, target in below:
        _walk(target, root, f"{prefix}{name}.", lines, wanted)


def _kind(entry: dict[str, Any]) -> str:
    if "anyOf" in entry:
        return " | ".join(_kind(one) for one in entry["anyOf"] if one.get("type") != "null")
    if "enum" in entry:
        return "|".join(str(one) for one in entry["enum"])
    if "const" in entry:
        return str(entry["const"])
    if entry.get("type") == "array":
        return f"list of {_kind(entry.get('items', {}))}"
    return str(entry.get("type", "value"))

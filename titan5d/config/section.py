"""The base of every config section: how pydantic checks it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict


class Section:
    """Strict types, no unknown keys, and the docstring under a field is its description."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True
    )

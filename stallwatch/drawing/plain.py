"""JSON that every browser reads: what is not a finite number is null there, since a server may tell anything."""

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(content: Any) -> str:
    """The text; `content` is made of mappings, lists, tuples, texts, numbers, booleans and None."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content

"""The two shapes that Envoy's configuration is made of: documents and typed extensions.

Owns no setting; only spares the other modules the type names' long prefix.
"""

from typing import Any

Document = dict[str, Any]


def extension(name: str, kind: str, **config: Any) -> Document:
    """Return a named extension.  kind: message name below `envoy.`, as `extensions.filters.http.router.v3.Router`."""
    return {"name": name, "typed_config": typed(kind, **config)}


def typed(kind: str, **config: Any) -> Document:
    """Return a message that carries its own type."""
    return {"@type": f"type.googleapis.com/envoy.{kind}", **config}


def seconds(value: float) -> str:
    """Return a duration as Envoy's JSON wants it."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"

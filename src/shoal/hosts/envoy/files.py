"""Configuration files in the run directory: written beside and renamed, so Envoy never sees half a file.

Owns names and atomicity.  Each kind has a directory of its own, which Envoy watches for renames.
"""

import os
from pathlib import Path

import msgspec
import xxhash

from shoal.hosts.envoy.typed import Document


def source(run_dir: str, kind: str, name: str = "") -> Document:
    """Return the config source that reads `kind` (the file of one resource, when named) and watches its directory."""
    directory = f"{run_dir}/{kind}"
    return {
        "resource_api_version": "V3",
        "path_config_source": {"path": f"{directory}/{name or kind}.json", "watched_directory": {"path": directory}},
    }


def write_resources(run_dir: str, kind: str, resources: list[Document], name: str = "") -> str:
    """Write the discovery response of `kind`; returns its version, a digest of what it says."""
    version = xxhash.xxh64_hexdigest(msgspec.json.encode(resources))
    write_document(Path(run_dir) / kind / f"{name or kind}.json", {"version_info": version, "resources": resources})
    return version


def write_document(path: Path, document: Document) -> bool:
    """Write `document` as JSON, readable by the owner only; returns whether it differs from what was there."""
    content = msgspec.json.format(msgspec.json.encode(document), indent=1)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if path.read_bytes() == content:
            return False
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)
    os.replace(fresh, path)
    return True

"""The first lines of `shoal up`: what is open, to whom, and where to look.

Owns their wording.
"""

from shoal.hosts.supervisor.parts import Parts


def what_is_open(parts: Parts) -> list[tuple[str, dict[str, object]]]:
    """Return (message, fields) of each line, in order."""
    options, pool = parts.options, parts.configuration.config.pool
    found: list[tuple[str, dict[str, object]]] = [
        (
            "open to clients",
            {
                "address": f"{parts.ground.host}:{parts.ground.port}",
                "auth": f"keys of {pool.auth.keys_file}" if pool.auth.keys_file else "off",
                "tls": "on" if parts.plane.is_tls else "off",
            },
        )
    ]
    if parts.ground.metrics_port:
        found.append(("open to this machine", {"metrics": f"http://127.0.0.1:{parts.ground.metrics_port}/metrics"}))
    found.append(("open to this user", {"admin": str(parts.run_dir)}))
    found.append(
        (
            "starting",
            {
                "engines": options.engines,
                "backends": len(options.backends) + len(pool.backends),
                "backends_file": options.backends_file,
                "workers": options.workers,
                "data_plane": parts.ground.data_plane,
                "config": parts.configuration.source,
            },
        )
    )
    return found

"""Which routers are compared, in which version, and with which flags.

Flags are those under which each routes by prefix, with its quietest log; all else is left at its defaults.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Where a router runs.  directory: an empty one of its own."""

    port: int
    metrics_port: int
    directory: Path


class Peer(NamedTuple):
    """A router.  package, version: on the package index, "" for a program of the system.  flags: as its row shows them.

    program: name of its executable.  own: verbs and flags that say where it listens.
    """

    name: str
    program: str
    flags: tuple[str, ...]
    package: str = ""
    version: str = ""
    verbs: tuple[str, ...] = ()

    def words(self, program: str, place: Place, addresses: Sequence[str]) -> list[str]:
        """Return its command line in front of `addresses`."""
        if self is NGINX:
            return _nginx_words(program, place, addresses)
        urls = [f"http://{address}" for address in addresses]
        where = ["--host", "127.0.0.1", "--port", str(place.port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]
        return [program, *self.verbs, *where, *metrics, *self.flags, "--worker-urls", *urls]


_CACHE_AWARE = ("--policy", "cache_aware", "--worker-startup-check-interval", "1")

NGINX = Peer("nginx", "nginx", ("round robin", "1 process", "keepalive"))
"""The floor: it looks at nothing and keeps nothing."""

PEERS = (
    Peer("smg", "smg", (*_CACHE_AWARE, "--log-level", "warn"), "smg", "1.13.0", ("launch",)),
    Peer("vllm-router", "vllm-router", (*_CACHE_AWARE, "--log-level", "warning"), "vllm-router", "0.1.17"),
    Peer(
        "sglang-router",
        "sglang-router",
        (*_CACHE_AWARE, "--log-level", "warn"),
        "sglang-router",
        "0.3.2",
        ("launch",),
    ),
)


_NGINX = """\
{user}daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  keepalive_requests 1000000000;
  upstream all {{
{servers}
    keepalive 256;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://all;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def _nginx_words(program: str, place: Place, addresses: Sequence[str]) -> list[str]:
    """Write its configuration and return its command line.

    A body that fits the buffer is not written to disk, and answers are passed on as they come.  It is one process: a
    worker would outlive a master that is killed.
    """
    servers = "\n".join(f"    server {address};" for address in addresses)
    user = "user root;\n" if os.geteuid() == 0 else ""
    path = place.directory / "nginx.conf"
    path.write_text(_NGINX.format(user=user, directory=place.directory, servers=servers, port=place.port))
    return [program, "-c", str(path), "-p", str(place.directory)]

"""The ext_proc host: Envoy asks once per request, the router answers, bytes stay in Envoy.

`exchange` is one request's conversation, `replies` its messages, `service` the gRPC side, `worker` the process.  No
policy lives here.
"""

from shoal.hosts.extproc.exchange import Exchange, Picker
from shoal.hosts.extproc.service import serve

__all__ = ["Exchange", "Picker", "serve"]

"""The ext_proc host: Envoy asks once per request, the router answers, bytes stay in Envoy.

`exchange` is one request's conversation, `requests` and `replies` its messages, `lean` (on `http2`) the server for our
own Envoy, `service` the one for other gateways, `streams` what both share, `worker` the process.  No policy lives here.
"""

from shoal.hosts.extproc.exchange import Exchange
from shoal.hosts.picker import Picker

__all__ = ["Exchange", "Picker"]

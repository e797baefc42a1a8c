"""The direct data plane: clients' and engines' sockets in the worker itself, without an Envoy.

The router machine is the same as behind Envoy, asked through `hosts.picker`.  `clients` reads requests, `relay` takes
each to an engine and back, `splice` passes bodies on as they come, `pools` keeps connections; `heads`, `answerheads`
and `chunks` are the grammar, `plane` is the whole of it, `worker` the process.

    python -m shoal.hosts.direct --listen HOST:PORT --admin SOCKET --picker-id N --workers COUNT
        [--config FILE] [--backends FILE] [--held] [--seed N] [--log-format text|json] [--log-level LEVEL]

--listen: opened with SO_REUSEPORT, so that workers share one port; or `fd:N`, a listening socket that the worker
inherits.  Whoever keeps that socket open over a worker's replacement loses no connection that waits in its queue.
--held: accept nothing before POST /serve, so that a worker meets no client before it knows the fleet.
TLS, limits, retries and keys come from --config as behind Envoy (`kind: Pool`); certificate files are read again
when they change.  --backends: engines' own keys and TLS, as `hosts.backends` writes them; read again when it changes,
so it only has to be written before an endpoint is told of.

The admin socket has the pages of every worker (`hosts.workerpages`): the fleet comes as POST /events.  Besides:
    POST /serve              begin to accept (with --held)
    POST /drain?linger_s=S   accept no more, end each connection with its next answer or after S (2) seconds unused,
                             then exit
    GET /connections         open client connections and requests at engines
"""

from shoal.hosts.direct.settings import DirectClocks, DirectSettings, settings_of

__all__ = ["DirectClocks", "DirectSettings", "settings_of"]

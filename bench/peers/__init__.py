"""Other routers in front of the same cheap backends, measured beside ours: `make bench PEERS=1`.

Those that the Python package index has are installed in virtual environments of their own under `.bench-peers/`; nginx
is used where it is on the PATH.  A router that does not start, or does not answer every request with 200, has failed:
its row says why, and nothing is said to be ahead of it.
"""

from bench.peers.catalog import NGINX, PEERS, Peer
from bench.peers.front import Failed, Front, running
from bench.peers.rounds import Row, survey

__all__ = ["NGINX", "PEERS", "Failed", "Front", "Peer", "Row", "running", "survey"]

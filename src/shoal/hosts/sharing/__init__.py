"""Pickers of one pool tell each other what they book, over ZMQ: each publishes, each hears all others.

What belongs here: sockets, messages with their order and gaps, silence, and the state that a picker which begins asks
of another.  What a booking of a peer means is `routing.peers`'.  With one picker nothing of this runs, and ZMQ is not
even loaded.
"""

from shoal.hosts.sharing.picture import PeerPicture
from shoal.hosts.sharing.secret import Secret, new_secret, read_secret
from shoal.hosts.sharing.sharing import Places, Sharing

__all__ = ["PeerPicture", "Places", "Secret", "Sharing", "new_secret", "read_secret"]

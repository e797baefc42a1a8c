"""The exact token ids of a request, as its engine will see them, for keys that match what engines say of their caches.

Here are the ways to them: a model's own files (`local`), an engine over HTTP (`remote`), the embedded engine's own
tokeniser (`embedded`), and the service that runs them off the event loop (`service`).  Hashing is `prefix`'s; how long
a request waits is the router's to say.
"""

from shoal.hosts.tokens.service import Tokenizers
from shoal.hosts.tokens.settings import Backend, TokenSettings

__all__ = ["Backend", "TokenSettings", "Tokenizers"]

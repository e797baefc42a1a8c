"""The exact token ids of a request, as its engine will see them, for keys that match what engines say of their caches.

Here are the ways to them: a model's own files (`local`), an engine over HTTP (`remote`), the embedded engine's own
tokeniser (`embedded`), and the service that runs them off the event loop (`service`).  Hashing is `prefix`'s; how long
a request waits is the router's to say.  The libraries for tokenizer files are loaded where such files are configured.
"""

from shoal.hosts.tokens.engines import EngineList
from shoal.hosts.tokens.settings import Backend, TokenSettings, settings_of

__all__ = ["Backend", "EngineList", "TokenSettings", "settings_of"]

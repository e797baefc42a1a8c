"""The embedded engine live: a vLLM-compatible HTTP server around the engine model.

What belongs here: HTTP, the pseudo tokeniser, answer text, the shapes of each API, metrics and fault injection.
How an engine batches, caches and spends time is `shoal.engine`.
"""

from shoal.hosts.engine.config import EngineServerConfig
from shoal.hosts.engine.faults import Faults
from shoal.hosts.engine.server import EngineServer

__all__ = ["EngineServer", "EngineServerConfig", "Faults"]

"""The model of an inference engine as one pure machine.

What belongs here: the paged KV cache with prefix reuse, continuous batching with chunked prefill and
preemption, a host tier below the GPU, the time a step takes, and the named profiles of hardware and model.  Live it is
driven by `hosts/engine` in real time; nothing here knows HTTP, text, or a clock.  What a cache tells of itself is in
`changes`, an operator's knobs are in `events`.
"""

from shoal.engine.aggregate import AggregateEngine
from shoal.engine.commands import Emit, Finish, Refuse
from shoal.engine.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.events import Aborted, Event, PaceChanged, Submitted, Ticked
from shoal.engine.hashing import hash_blocks
from shoal.engine.profiles import PROFILES, Profile, find_profile

__all__ = [
    "PROFILES",
    "Aborted",
    "AggregateEngine",
    "Emit",
    "Engine",
    "EngineConfig",
    "Event",
    "Finish",
    "PaceChanged",
    "Profile",
    "Refuse",
    "Submitted",
    "Ticked",
    "find_profile",
    "hash_blocks",
]

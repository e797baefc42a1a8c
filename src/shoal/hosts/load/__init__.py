"""The load generator: sends a workload to an OpenAI-compatible endpoint and measures what comes back.

Closed loop (so many chats in flight) or open loop (chats begin at given times).  It is cheap on purpose, for it
shares the machine with what it measures, and it reports its own loop lag so that a run it spoilt is seen as void.
What is sent comes from `workload`; what is a good result is the caller's business.
"""

from shoal.hosts.load.answer import Answer
from shoal.hosts.load.client import Client
from shoal.hosts.load.lag import LAG_LIMIT_S, LoopLag
from shoal.hosts.load.report import LoadReport, Sample, summarise
from shoal.hosts.load.runner import run_load
from shoal.hosts.load.stage import Stage, StageFailed, engine_lag_of

__all__ = [
    "LAG_LIMIT_S",
    "Answer",
    "Client",
    "LoadReport",
    "LoopLag",
    "Sample",
    "Stage",
    "StageFailed",
    "engine_lag_of",
    "run_load",
    "summarise",
]

"""The twin: the very router and the model of the engine in virtual time.

Here belongs the loop of events in time, the cluster of routers and engines that it drives, what is asked of them, and
what came of it.  Decisions are `routing`'s and its rooms', step times are `engine`'s; nothing here reads a clock.
"""

from shoal.simulation.cluster import Cluster, ClusterConfig
from shoal.simulation.experiment import Experiment, read_experiment, run_experiment
from shoal.simulation.loop import Loop
from shoal.simulation.nodes import NodeConfig
from shoal.simulation.prompts import Prompt
from shoal.simulation.results import Result, Run, Sample
from shoal.simulation.sessions import Fork, Session, Turn
from shoal.simulation.timeline import Timeline

__all__ = [
    "Cluster",
    "ClusterConfig",
    "Experiment",
    "Fork",
    "Loop",
    "NodeConfig",
    "Prompt",
    "Result",
    "Run",
    "Sample",
    "Session",
    "Timeline",
    "Turn",
    "read_experiment",
    "run_experiment",
]

"""Who goes next when not everybody can: bands, fairness between tenants, order within one, limits, saturation, budgets.

Pure figures and queues: what is an endpoint, a client or a clock is not known here.  `routing.admission` puts a
request in and sends it when there is room.
"""

from shoal.flow.bands import BandPolicy, Lane
from shoal.flow.budgets import Allowance, Budgets, Reservation
from shoal.flow.ceilings import UsageLimit
from shoal.flow.detectors import Detector, FewDetector, Loads
from shoal.flow.fairness import Fairness
from shoal.flow.ordering import Ordering
from shoal.flow.queue import Queue, QueuePolicy
from shoal.flow.tickets import Ticket

__all__ = [
    "Allowance",
    "BandPolicy",
    "Budgets",
    "Detector",
    "Fairness",
    "FewDetector",
    "Lane",
    "Loads",
    "Ordering",
    "Queue",
    "QueuePolicy",
    "Reservation",
    "Ticket",
    "UsageLimit",
]

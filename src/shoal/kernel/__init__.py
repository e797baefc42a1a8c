"""The ground every room stands on: machines, named chance, and the error tree.

No domain word lives here: nothing in this room knows what a request or an endpoint is.
"""

from shoal.kernel.chance import Chance
from shoal.kernel.errors import UNREADABLE, ClockWentBack, ConfigError, InvalidInput, ShoalError
from shoal.kernel.machine import Machine

__all__ = ["UNREADABLE", "Chance", "ClockWentBack", "ConfigError", "InvalidInput", "Machine", "ShoalError"]

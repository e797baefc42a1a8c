"""Online prediction of time to first token and time per output token, per endpoint.

Pure figures: curves that are learned record by record, how wrong they were lately, and what earlier turns left in a
cache.  What an endpoint, a request or a column is, is not known here; `routing.forecasts` brings both together.
"""

from shoal.latency.curve import Curve
from shoal.latency.errors import Errors
from shoal.latency.features import TPOT, TTFT, UNITS, Figure
from shoal.latency.scale import Scale
from shoal.latency.turns import Turn, Turns

__all__ = ["TPOT", "TTFT", "UNITS", "Curve", "Errors", "Figure", "Scale", "Turn", "Turns"]

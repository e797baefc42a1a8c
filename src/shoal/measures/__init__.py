"""Metrics as a fold over what the router was told and what it commanded.

The same fold counts live traffic and simulations.  Rendering is here too; serving the page is a host's.
"""

from shoal.measures.families import Counter, Family, Gauge, Histogram, Sample, render
from shoal.measures.fold import Fold

__all__ = ["Counter", "Family", "Fold", "Gauge", "Histogram", "Sample", "render"]

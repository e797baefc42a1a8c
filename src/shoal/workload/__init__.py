"""Synthetic traffic: who says what to the pool, and when.

Pure generators over a given random stream: the same stream gives the same bytes.  Sending the traffic and
measuring the answers is `hosts.load`; judging two runs is the benchmark's.
"""

from shoal.workload.arrivals import poisson_arrivals
from shoal.workload.chat import Chat, Plan, chat_body
from shoal.workload.shapes import hot, multi_turn, unique, zipf
from shoal.workload.text import text

__all__ = ["Chat", "Plan", "chat_body", "hot", "multi_turn", "poisson_arrivals", "text", "unique", "zipf"]

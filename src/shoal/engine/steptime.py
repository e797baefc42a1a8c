"""How long one step of an engine takes, and the sums it depends on.

A roofline: a step is bound by compute or by memory bandwidth, whichever is longer, plus a fixed overhead
and a small cost a sequence (Williams et al. 2009).  Owns no schedule.
"""

import math
from typing import NamedTuple

import numpy as np

from shoal.engine.profiles import Profile


class StepTime:
    """The step-time formula of one profile, with its coefficients divided out once.

    speculation: tokens that a decode step yields for each sequence on average, at least 1; steps of decoding alone are
    as much faster, so that what follows from counting tokens stays as it is.
    """

    __slots__ = (
        "_experts_s",
        "_missed_ratio",
        "_overhead_s",
        "_s_per_kv_token",
        "_s_per_pair",
        "_s_per_sequence",
        "_s_per_token",
        "_speculation",
        "_weights_s",
    )

    def __init__(self, profile: Profile, speculation: float = 1.0) -> None:
        flops_per_s = profile.peak_flops_per_s * profile.flops_ratio
        bytes_per_s = profile.peak_bytes_per_s * profile.bytes_ratio
        self._s_per_token = profile.flops_per_token / flops_per_s
        self._s_per_pair = profile.flops_per_pair / flops_per_s
        self._weights_s = profile.weight_bytes / bytes_per_s
        self._experts_s = profile.expert_bytes / bytes_per_s
        self._missed_ratio = 1.0 - profile.expert_ratio
        self._speculation = speculation
        self._s_per_kv_token = profile.kv_bytes_per_token / bytes_per_s
        self._overhead_s = profile.overhead_s
        self._s_per_sequence = profile.sequence_s

    def seconds(self, *, sequences: int, tokens: int, context_tokens: int, pairs: float) -> float:
        """Return the seconds of a step.

        sequences: in the step.  tokens: new ones computed, prefill and decode together.  context_tokens: sum of the
        tokens already in the KV cache that the sequences look at.  pairs: sum over new tokens of their context.
        """
        compute_s = tokens * self._s_per_token + pairs * self._s_per_pair
        bandwidth_s = self._read_s(tokens) + context_tokens * self._s_per_kv_token
        seconds = max(compute_s, bandwidth_s) + self._overhead_s + sequences * self._s_per_sequence
        return seconds / self._speculation if tokens == sequences else seconds

    def _read_s(self, tokens: int) -> float:
        """Return the seconds of reading the weights that `tokens` tokens need.

        Of the routed experts these are the ones that a token goes to, as if each chose at random.
        """
        if not self._experts_s:
            return self._weights_s
        return self._weights_s + self._experts_s * (1.0 - self._missed_ratio**tokens)

    def ends(
        self, start: float, steps: int, slow_factor: float, *, sequences: int, context_tokens: int, pairs: float
    ) -> list[float]:
        """Return when each of `steps` decode steps ends that follow each other from `start` on.

        context_tokens, pairs: of the first one; each step has `sequences` more of both.  The same floats as adding
        `slow_factor` times `seconds` step by step.
        """
        further = np.arange(steps) * sequences
        compute_s = sequences * self._s_per_token + (pairs + further) * self._s_per_pair
        bandwidth_s = self._read_s(sequences) + (context_tokens + further) * self._s_per_kv_token
        seconds = np.maximum(compute_s, bandwidth_s) + self._overhead_s + sequences * self._s_per_sequence
        seconds /= self._speculation
        seconds *= slow_factor
        seconds[0] += start
        ends: list[float] = np.add.accumulate(seconds).tolist()
        return ends

    def pace(self, *, sequences: int, context_tokens: int) -> "Pace":
        """Return how decode steps that follow each other get longer; context_tokens: of the first one."""
        fixed_s = self._overhead_s + sequences * self._s_per_sequence
        weights_s, pairs = self._read_s(sequences), context_tokens + sequences / 2
        first_s = max(
            sequences * self._s_per_token + pairs * self._s_per_pair,
            weights_s + context_tokens * self._s_per_kv_token,
        )
        second_s = max(
            sequences * self._s_per_token + (pairs + sequences) * self._s_per_pair,
            weights_s + (context_tokens + sequences) * self._s_per_kv_token,
        )
        return Pace((first_s + fixed_s) / self._speculation, (second_s - first_s) / self._speculation)


class Pace(NamedTuple):
    """Steps of which the first takes `first_s`, and each `growth_s` more than the one before it.

    So do decode steps of one batch, but where the bound changes from one to the other on the way.
    """

    first_s: float
    growth_s: float

    def total_s(self, steps: int) -> float:
        """Return the seconds of the first `steps`."""
        return steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_within(self, seconds: float) -> float:
        """Return how many of the first steps fit `seconds`, as a real number."""
        steps = seconds / self.first_s
        if self.growth_s * steps < 1e-6 * self.first_s:
            return steps
        middle = self.first_s - self.growth_s / 2
        return (math.sqrt(middle * middle + 2 * self.growth_s * seconds) - middle) / self.growth_s

"""Whether what the exact index promises is what the engines report: a silent difference costs every hit.

Owns the alarm per endpoint and its words.  It looks only at requests that were placed by exact keys and served by the
endpoint that was chosen; the estimate learns from reports by itself.
"""

from enum import StrEnum

import msgspec

ALARM_AFTER = 20
"""Requests in a row that must say the same: one may be a chance of eviction, twenty are a setting."""

QUIET_AFTER = 1000
"""The same where the engine does not report cached tokens, so that prompts without a common beginning look alike."""


class Disagreement(StrEnum):
    """What does not agree.

    TOKENS_DIFFER: the engine counts other tokens in the prompts than were counted here.  NEVER_FOUND: the engine finds
    prompts in its cache that were not found in its events.  NEVER_KEPT: what its events promise is not in its cache.
    NEVER_SEEN: no prompt was found in its events, and the engine does not report what it found itself.
    """

    TOKENS_DIFFER = "tokens-differ"
    NEVER_FOUND = "never-found"
    NEVER_KEPT = "never-kept"
    NEVER_SEEN = "never-seen"


class Alarm(msgspec.Struct, frozen=True):
    """A disagreement that has lasted.  requests: that said so in a row."""

    endpoint_id: str
    what: Disagreement
    requests: int


_WORDS = {
    Disagreement.TOKENS_DIFFER: (
        "{endpoint} counts other prompt tokens than the picker does ({requests} requests in a row): its tokenizer or "
        "chat template differs from the one that token-producer uses, so no prompt will be found in its cache"
    ),
    Disagreement.NEVER_FOUND: (
        "KV events of {endpoint} are applied, but no prompt is found in them although the engine reports cached tokens "
        "({requests} requests in a row): compare its tokenizer, chat template, adapters and block size"
    ),
    Disagreement.NEVER_KEPT: (
        "KV events of {endpoint} promise blocks that the engine does not find in its cache ({requests} requests in a "
        "row): events of another engine may arrive under its name"
    ),
    Disagreement.NEVER_SEEN: (
        "KV events of {endpoint} are applied, but none of the last {requests} prompts was found in them: if prompts "
        "share their beginnings, compare tokenizer, chat template and block size; have the engine report cached tokens "
        "to know"
    ),
}


class _Counts:
    """Requests in a row that said so."""

    __slots__ = ("differ", "unfound", "unkept", "unseen")

    def __init__(self) -> None:
        self.differ = self.unfound = self.unkept = self.unseen = 0


class Agreement:
    """What was promised of each endpoint against what came."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def observe(
        self,
        endpoint_id: str,
        *,
        counted_tokens: int,
        prompt_tokens: int | None,
        predicted_tokens: int,
        cached_tokens: int | None,
        block_tokens: int,
    ) -> None:
        """Take one request.

        counted_tokens, predicted_tokens: of the prompt and of what its cache was believed to hold of it, as the picker
        knew them.  prompt_tokens, cached_tokens: as the engine reports them, None where it does not.
        """
        counts = self._counts.get(endpoint_id)
        if counts is None:
            counts = self._counts[endpoint_id] = _Counts()
        if prompt_tokens is not None:
            counts.differ = counts.differ + 1 if prompt_tokens != counted_tokens else 0
        if predicted_tokens >= block_tokens:
            counts.unseen = 0
        if cached_tokens is None:
            counts.unseen += predicted_tokens < block_tokens
            return
        counts.unseen = 0
        is_found, is_kept = predicted_tokens >= block_tokens, cached_tokens >= block_tokens
        if is_found and is_kept:
            counts.unfound = counts.unkept = 0
        elif is_kept:
            counts.unfound += 1
        elif predicted_tokens >= 2 * block_tokens:
            # An engine computes the last block of a prompt anew, so that of one block nothing may be left.
            counts.unkept += 1

    def forget(self, endpoint_id: str) -> None:
        """The endpoint left, or its events begin anew."""
        self._counts.pop(endpoint_id, None)

    def alarms(self) -> list[Alarm]:
        """Disagreements that last, by endpoint; the first of each endpoint explains the others."""
        found = []
        for endpoint_id, counts in sorted(self._counts.items()):
            for what, count, limit in (
                (Disagreement.TOKENS_DIFFER, counts.differ, ALARM_AFTER),
                (Disagreement.NEVER_FOUND, counts.unfound, ALARM_AFTER),
                (Disagreement.NEVER_KEPT, counts.unkept, ALARM_AFTER),
                (Disagreement.NEVER_SEEN, counts.unseen, QUIET_AFTER),
            ):
                if count >= limit:
                    found.append(Alarm(endpoint_id, what, count))
                    break
        return found

    def warnings(self) -> list[str]:
        """The alarms in words, for the operator."""
        return [
            _WORDS[alarm.what].format(endpoint=alarm.endpoint_id, requests=alarm.requests) for alarm in self.alarms()
        ]

"""What the twin models and what it does not, as every report says it.

Owns the sentences; docs/twin.md has the same ones, and a test compares them.
"""

MODELLED = (
    "Every decision of the router: the code that runs live, with its configuration and plugins.",
    "Paged KV caches with prefix reuse and eviction, of prompts and of answers that come back in later prompts, tiers "
    "below them, continuous batching, chunked prefill and preemption.",
    "The time of each step, by a roofline of model and accelerator.",
    "Delays of network, with jitter where it is given, metrics, records, KV events and gossip between pickers.",
    "Retries before the first byte; engines that die, come back, slow down, join and leave; answers that a dead one "
    "had begun are cut.",
    "Prefill and decode on different engines: two routers place a request, one over the engines that "
    "decode, then one over those that prefill; KV that is missing goes over the slower of both links, one "
    "transfer after the other at either end, and decoding begins when it is there.",
)

NOT_MODELLED = (
    "Tokenising, parsing, and the CPU of the picker itself.",
    "Clients' networks.",
    "Interference inside an engine beyond the step time.",
    "Reuse of answers in traces that name the blocks of prompts only (mooncake, claude-code): there an answer that "
    "comes back in a prompt is computed.",
    "That a prefilling engine keeps blocks until they were fetched, that a decoding one holds room for them meanwhile, "
    "and that transfer and compute overlap.",
    "What a prompt says: prompts are lengths and what they share, and answers have the lengths of the workload.",
)

AGGREGATE = (
    "Engines of mode aggregate keep the clock of steps and the prefix cache, and hold the room of answers as a sum "
    "instead of block by block; --every-step says how far their figures are from those of the others."
)
"""Said of experiments that have such engines."""

CAUTION = (
    "The step-time coefficients are published peaks and round shares of them. Compare policies with each other, not a "
    "figure with a measured one, unless the coefficients were fitted to your engines. No policy sees how long an "
    "answer will be."
)

REFERENCE = (
    "The clairvoyant reference is no policy, and nobody can deploy it: an offline search placed all requests again and "
    "again, with the lengths of all answers and all that sessions will send known beforehand. It is the best of what "
    "that search found and of all policies here. Regret is by how much a policy's cost is above the reference's, where "
    "the cost is the mean of TTFT p50 and p95, each over the lowest of any policy. A longer search may find more."
)
"""Said where there is one."""

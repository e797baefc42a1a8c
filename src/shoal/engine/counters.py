"""What an engine has counted since its start; hosts turn it into metrics."""


class Counters:
    """Running totals, in tokens unless the name says otherwise.

    prefix_queries, prefix_hits: prompt tokens looked up in and found in the prefix cache, once a request, at its
    first admission.  external_queries, external_hits: the same for the host tier, asked for what the first lacks.
    prompt: tokens of prompts whose prefill is done, the cached ones included.  cached: those of `prompt` that came from
    the cache.  loaded: those of `cached` that came from the host tier.  generation: tokens handed out.  preemptions:
    requests thrown back to the queue.  steps, busy_s: steps done and their model seconds.
    """

    __slots__ = (
        "busy_s",
        "cached",
        "external_hits",
        "external_queries",
        "generation",
        "loaded",
        "preemptions",
        "prefix_hits",
        "prefix_queries",
        "prompt",
        "steps",
    )

    def __init__(self) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_queries = 0
        self.external_hits = 0
        self.prompt = 0
        self.cached = 0
        self.loaded = 0
        self.generation = 0
        self.preemptions = 0
        self.steps = 0
        self.busy_s = 0.0

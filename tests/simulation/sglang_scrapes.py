"""Metrics pages of an engine that schedules and counts as SGLang does: prefill first and in steps of its own."""

import numpy as np

from shoal.engine import Profile
from shoal.engine.steptime import StepTime

EVERY_S = 60.0
_BUDGET_TOKENS = 8_192
_REQUEST_S = 0.004


class _Counts:
    """What such an engine has counted."""

    def __init__(self) -> None:
        self.requests = self.prompt = self.output = self.cached = 0
        self.first_s = self.queue_s = self.prefill_s = self.e2e_s = 0.0
        self.prefills = self.decodes = 0

    def page(self, running: int) -> bytes:
        """Return them as the engine's page has them, series of streams and of others apart."""
        rank = 'engine_type="unified",model_name="m",tp_rank="0"'
        lines = {
            "prompt_tokens_total": [('is_streaming="true"', self.prompt), ('is_streaming="false"', 0)],
            "generation_tokens_total": [('is_streaming="true"', self.output)],
            "cached_tokens_total": [('cache_source="device"', self.cached)],
            "num_running_reqs": [(rank, running)],
            "cuda_graph_passes_total": [
                (f'{rank},mode="prefill_none"', self.prefills), (f'{rank},mode="decode_full"', self.decodes)
            ],
        }  # fmt: skip
        sums = {
            "time_to_first_token_seconds": [('is_streaming="true"', self.first_s)],
            "e2e_request_latency_seconds": [('is_streaming="true"', self.e2e_s)],
            "queue_time_seconds": [(rank, self.queue_s)],
            "per_stage_req_latency_seconds": [
                (f'{rank},stage="request_process"', 9.0), (f'{rank},stage="prefill_forward"', self.prefill_s)
            ],
        }  # fmt: skip
        text = [
            f"# TYPE sglang:{name} counter\n"
            + "".join(f"sglang:{name}{{{labels}}} {value}\n" for labels, value in series)
            for name, series in lines.items()
        ]
        text += [
            f"# TYPE sglang:{name} histogram\n"
            + "".join(
                f"sglang:{name}_sum{{{labels}}} {value}\nsglang:{name}_count{{{labels}}} {self.requests}\n"
                for labels, value in series
            )
            for name, series in sums.items()
        ]
        return "".join(text).encode()


def sglang_scrapes(profile: Profile, seed: int, *, count: int = 10) -> list[tuple[float, bytes]]:
    """Return when pages were scraped, and the pages, of prompts that come from quiet to busy."""
    rng = np.random.default_rng(seed)
    time, counts = StepTime(profile), _Counts()
    now, comes_at = 0.0, float(rng.exponential(1.0))
    waiting: list[tuple[float, int, int]] = []
    running: list[list[float]] = []
    pages = [(0.0, counts.page(0))]
    while len(pages) < count:
        while comes_at <= now:
            waiting.append((comes_at, int(rng.integers(200, 4_000)), 2 + int(rng.exponential(200))))
            comes_at += float(rng.exponential(1 / (1 + 0.8 * np.sin(comes_at / 80))))
        if waiting:
            batch: list[tuple[float, int, int]] = []
            tokens = 0
            while waiting and (not batch or tokens + waiting[0][1] <= _BUDGET_TOKENS):
                batch.append(waiting.pop(0))
                tokens += batch[-1][1]
            pairs = sum(prompt * prompt / 2 for _, prompt, _ in batch)
            spent = time.seconds(sequences=len(batch), tokens=tokens, context_tokens=0, pairs=pairs)
            counts.prefills += 1
            for at, prompt, output in batch:
                counts.queue_s += now - at
                counts.prefill_s += spent
                counts.first_s += now + spent - at + _REQUEST_S
                running.append([at, prompt, output, prompt + 1])
        elif running:
            context = int(sum(each[3] for each in running))
            size = len(running)
            spent = time.seconds(sequences=size, tokens=size, context_tokens=context, pairs=float(context))
            counts.decodes += 1
            for each in running:
                each[3] += 1
                if each[3] >= each[1] + each[2]:
                    counts.requests += 1
                    counts.prompt += int(each[1])
                    counts.output += int(each[2])
                    counts.e2e_s += now + spent - each[0] + _REQUEST_S
            running = [each for each in running if each[3] < each[1] + each[2]]
        else:
            spent = comes_at - now
        now += spent
        while len(pages) < count and now >= pages[-1][0] + EVERY_S:
            pages.append((pages[-1][0] + EVERY_S, counts.page(len(running))))
    return pages

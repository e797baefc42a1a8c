"""The demo's traffic has the size that makes its point, and its table says what was measured."""

import io

from rich.console import Console

from shoal.cli.demo import Show, doubt, table, traffic
from shoal.engine import PROFILES
from shoal.hosts.load import Sample, summarise


def test_the_working_set_is_three_caches_of_an_engine_and_fits_four() -> None:
    plan = traffic(1, chats=32, turns=8)
    systems = {chat.system for chat in plan.chats}
    prompts = sum(len(system) for system in systems)
    histories = sum(len("".join(chat.says)) + 4 * sum(chat.reply_tokens) for chat in plan.chats)
    cache_tokens = PROFILES["tiny"].num_blocks * PROFILES["tiny"].block_size
    working_set_tokens = (prompts + histories) / 4
    assert all(len(system) == 4 * 4_096 for system in systems)
    assert 2.6 < working_set_tokens / cache_tokens < 3.4
    assert plan.concurrency == 32


def test_the_table_compares_both_runs() -> None:
    def show(title: str, ttft_s: float, cached: int) -> Show:
        samples = [
            Sample(
                at_s=0.0, ttft_s=ttft_s, duration_s=1.0, prompt_tokens=100, cached_tokens=cached, completion_tokens=50
            ),
            Sample(at_s=0.0, error="cut"),
        ]
        return Show(title, "m", summarise("demo", samples, duration_s=10 * ttft_s, served={"a": 3, "b": 1}))

    out = io.StringIO()
    Console(file=out, width=100).print(table([show("round-robin", 0.4, 10), show("cache-aware", 0.1, 80)]))
    text = out.getvalue()
    for word in ("400 ms", "100 ms", "4.0 x", "10%", "80%", "1.50", "errors"):
        assert word in text


def test_figures_of_a_busy_machine_are_called_approximate_once() -> None:
    def show(lag_p99_s: float) -> Show:
        return Show("x", "m", summarise("demo", [], duration_s=1.0, lag_p99_s=lag_p99_s))

    assert doubt([show(0.001), show(0.002)]) == ""
    expected = "figures are approximate: this machine was busy (loop lag p99 40 ms)"
    assert doubt([show(0.04), show(0.02)]) == expected

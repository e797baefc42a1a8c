"""Metric families of several workers become one page."""

from shoal.hosts.supervisor.merging import Family, WorkerCounts, merge, text


def counter(value: float, **labels: str) -> Family:
    return Family(name="shoal_requests", help="Requests.", type="counter", samples=[("_total", labels, value)])


def gauge(value: float | None, rule: str) -> Family:
    return Family(name="shoal_depth", type="gauge", merge=rule, samples=[("", {}, value)])


def only(families: list[Family]) -> float | None:
    assert len(families) == 1
    assert len(families[0].samples) == 1
    return families[0].samples[0][2]


def test_counters_of_workers_add_up_per_label_set() -> None:
    merged = merge([[counter(2, model="a")], [counter(3, model="a"), counter(5, model="b")]])
    assert {sample[1]["model"]: sample[2] for sample in merged[0].samples} == {"a": 5, "b": 5}


def test_label_order_does_not_split_a_series() -> None:
    one = Family(name="x", type="counter", samples=[("_total", {"a": "1", "b": "2"}, 1.0)])
    two = Family(name="x", type="counter", samples=[("_total", {"b": "2", "a": "1"}, 1.0)])
    assert only(merge([[one], [two]])) == 2


def test_gauges_follow_their_declared_rule() -> None:
    assert only(merge([[gauge(2, "sum")], [gauge(3, "sum")]])) == 5
    assert only(merge([[gauge(2, "max")], [gauge(3, "max")], [gauge(1, "max")]])) == 3
    assert only(merge([[gauge(2, "last")], [gauge(1, "last")]])) == 1


def test_an_unknown_gauge_takes_nothing_from_a_known_one() -> None:
    for rule in ("sum", "max", "last"):
        assert only(merge([[gauge(4, rule)], [gauge(None, rule)]])) == 4
        assert only(merge([[gauge(None, rule)], [gauge(4, rule)]])) == 4


def test_histograms_are_summed_bucket_by_bucket() -> None:
    def histogram(counts: tuple[float, float]) -> Family:
        samples: list[tuple[str, dict[str, str], float | None]] = [
            ("_bucket", {"le": "1"}, counts[0]),
            ("_bucket", {"le": "+Inf"}, counts[1]),
            ("_sum", {}, counts[1] * 2),
            ("_count", {}, counts[1]),
        ]
        return Family(name="shoal_ttft_seconds", type="histogram", samples=samples)

    page = text(merge([[histogram((1, 3))], [histogram((2, 2))]]))
    assert 'shoal_ttft_seconds_bucket{le="1"} 3\n' in page
    assert 'shoal_ttft_seconds_bucket{le="+Inf"} 5\n' in page
    assert "shoal_ttft_seconds_sum 10\n" in page
    assert "# TYPE shoal_ttft_seconds histogram\n" in page


def test_the_text_escapes_labels_and_names_counters_as_prometheus_does() -> None:
    page = text([counter(1, model='a"b\\c\nd')])
    assert "# TYPE shoal_requests_total counter\n" in page
    assert 'shoal_requests_total{model="a\\"b\\\\c\\nd"} 1\n' in page


def test_a_worker_that_died_leaves_its_counters_in_the_sum_and_not_its_gauges() -> None:
    counts = WorkerCounts()
    counts.saw("0.1", [counter(10), gauge(7, "sum")])
    counts.saw("1.1", [counter(5), gauge(1, "sum")])
    counts.lost("0.1")
    counts.saw("0.2", [counter(1), gauge(2, "sum")])
    merged = {family.name: family for family in counts.merged()}
    assert merged["shoal_requests"].samples[0][2] == 16
    assert merged["shoal_depth"].samples[0][2] == 3


def test_counters_never_fall_over_any_number_of_restarts() -> None:
    counts = WorkerCounts()
    seen = []
    for restart in range(5):
        for value in (1, 4):
            counts.saw(f"0.{restart}", [counter(value)])
            seen.append(only(counts.merged()))
        counts.lost(f"0.{restart}")
        seen.append(only(counts.merged()))
    assert seen == [1, 4, 4, 5, 8, 8, 9, 12, 12, 13, 16, 16, 17, 20, 20]


def test_a_silent_worker_counts_with_what_it_last_said_but_its_gauges_are_not_believed() -> None:
    counts = WorkerCounts()
    counts.saw("0.1", [counter(10), gauge(7, "sum")])
    merged = {family.name: family for family in counts.merged(frozenset({"0.1"}))}
    assert merged["shoal_requests"].samples[0][2] == 10
    assert "shoal_depth" not in merged

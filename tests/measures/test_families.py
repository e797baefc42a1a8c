from prometheus_client.parser import text_string_to_metric_families

from shoal.measures import Counter, Gauge, Histogram, render
from shoal.measures.families import MAX_LABEL_SETS


def test_the_page_is_what_prometheus_reads() -> None:
    counter = Counter("shoal_things", "Things.", ("kind",))
    counter.add(('a "quoted"\nname',), 2)
    gauge = Gauge("shoal_level", "Level.")
    gauge.set(float("nan"))
    histogram = Histogram("shoal_wait_seconds", "Wait.", (0.1, 1.0), ("kind",))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value, ("x",))
    page = render([counter.family(), gauge.family(), histogram.family()])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (sample,) = families["shoal_things"].samples
    assert (sample.labels, sample.value) == ({"kind": 'a "quoted"\nname'}, 2.0)
    assert families["shoal_level"].samples[0].value != families["shoal_level"].samples[0].value
    buckets = {s.labels["le"]: s.value for s in families["shoal_wait_seconds"].samples if s.name.endswith("_bucket")}
    assert buckets == {"0.1": 2.0, "1.0": 3.0, "+Inf": 4.0}
    assert next(s.value for s in families["shoal_wait_seconds"].samples if s.name.endswith("_sum")) == 7.65


def test_label_values_that_clients_invent_end_in_one_other() -> None:
    counter = Counter("shoal_things", "Things.", ("kind",))
    histogram = Histogram("shoal_wait", "Wait.", (1.0,), ("kind",))
    for number in range(MAX_LABEL_SETS + 500):
        counter.add((f"k{number}",))
        histogram.observe(0.5, (f"k{number}",))
    samples = counter.family().samples
    assert len(samples) == MAX_LABEL_SETS + 1
    assert next(s.value for s in samples if s.labels["kind"] == "other") == 500
    assert len(histogram.family().samples) <= (MAX_LABEL_SETS + 1) * 4


def test_a_counter_without_labels_is_there_at_zero() -> None:
    assert "shoal_things_total 0" in render([Counter("shoal_things", "Things.").family()])

"""What is said of endpoints whose load is not known."""

from shoal.hosts.fleet import EndpointReport
from shoal.hosts.supervisor.loads import load_warnings
from shoal.pool import EndpointState


def report(name: str, problem: str = "") -> EndpointReport:
    return EndpointReport(id=name, url=f"http://{name}", state=EndpointState.READY, engine="vllm", load_problem=problem)


def test_endpoints_with_one_problem_share_a_line_and_the_others_have_none() -> None:
    reports = [report("a", "HTTP 404"), report("b"), report("c", "HTTP 500"), report("d", "HTTP 404")]
    assert load_warnings(reports) == [
        "the load of http://a, http://d is not known: /metrics: HTTP 404",
        "the load of http://c is not known: /metrics: HTTP 500",
    ]


def test_of_many_the_first_are_named() -> None:
    (line,) = load_warnings([report(f"e{number}", "HTTP 404") for number in range(1000)])
    assert "http://e4 and 995 more" in line
    assert "http://e5" not in line

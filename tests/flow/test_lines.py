"""Tickets in order, against a list that is sorted each time."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.flow import Ticket
from shoal.flow.lines import Ascending

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("prune"), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_first_of_those_that_are_there_comes_first(steps: list[tuple[str, int]]) -> None:
    order, model = Ascending(), list[tuple[float, int, Ticket]]()
    for number, (what, value) in enumerate(steps):
        if what == "push":
            ticket = Ticket(str(number), number=number)
            order.push(float(value), ticket)
            model.append((float(value), number, ticket))
        elif what == "leave" and model:
            model.pop(value % len(model))[2].left = number
        elif what == "pop" and model:
            assert order.first() is not None
            order.pop()
            model.remove(min(model))
        elif what == "prune":
            order.prune()
            assert len(order) == len(model)
        first = order.first()
        assert (None if first is None else first[:2]) == min((entry[:2] for entry in model), default=None)
        assert {ticket.number for ticket in order} == {number for _, number, _ in model}

from shoal.latency import Turn, Turns
from shoal.latency.turns import MAX_TURNS

TURN = Turn("e0", prompt_tokens=1000, engine_tokens=900, output_tokens=100)


def test_a_prompt_with_room_for_the_answer_follows_up() -> None:
    assert TURN.is_followed_by(1200)
    assert not TURN.is_followed_by(1050)
    assert TURN.held_tokens(1.0) == 1000
    assert TURN.held_tokens(0.0) == 900


def test_how_much_of_an_answer_came_back_is_seen_from_the_cached_tokens() -> None:
    assert TURN.kept_ratio(1000) == 1.0
    assert TURN.kept_ratio(950) == 0.5
    assert TURN.kept_ratio(100) == 0.0


def test_without_a_session_an_end_that_many_prompts_share_tells_nothing() -> None:
    turns = Turns()
    turns.note("", 7, TURN, is_follow_up=False)
    assert turns.find("", 7) == TURN
    turns.note("", 7, TURN, is_follow_up=False)
    assert turns.find("", 7) is None


def test_sessions_that_share_an_end_are_told_apart() -> None:
    turns = Turns()
    turns.note("a", 7, TURN, is_follow_up=False)
    turns.note("b", 7, TURN._replace(endpoint_id="e1"), is_follow_up=False)
    found = turns.find("a", 7)
    assert found is not None
    assert found.endpoint_id == "e0"


def test_a_follow_up_that_ends_within_the_same_span_replaces_its_turn() -> None:
    turns = Turns()
    turns.note("", 7, TURN, is_follow_up=False)
    later = TURN._replace(prompt_tokens=1100)
    turns.note("", 7, later, is_follow_up=True)
    assert turns.find("", 7) == later


def test_the_table_is_bounded() -> None:
    turns = Turns()
    for number in range(MAX_TURNS + 10):
        turns.note("", number, TURN, is_follow_up=False)
    assert len(turns) == MAX_TURNS
    assert turns.find("", 0) is None

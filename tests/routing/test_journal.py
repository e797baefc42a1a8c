import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from shoal.kernel import InvalidInput
from shoal.routing import Ticked
from shoal.routing.events import PeerLeft, PeerSynced, PeerTaught, PeerTold
from shoal.routing.journal import MAGIC, Opening, Step, encode, frames, read, replay
from shoal.routing.news import PeerBooked, PeerReleased
from tests.routing.script import Pool, blocks_of


def recorded(requests: int = 60) -> tuple[Opening, list[Step]]:
    """The journal of a pool that served some requests, lost one and was reloaded."""
    steps: list[Step] = []
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {gpt: m}\n"

    class Recording(Pool):
        def feed(self, event: object) -> list[object]:  # type: ignore[override]
            commands = super().feed(event)
            steps.append(Step(self.now, event, commands))  # type: ignore[arg-type]
            return commands  # type: ignore[return-value]

    pool = Recording(config=config, seed=9)
    for number in range(requests):
        sent = pool.send(f"p{number % 7}", 640 + 64 * (number % 5), model="gpt" if number % 3 else "m")
        if number % 4:
            sent.finish(prompt_tokens=700, cached_tokens=100, completion_tokens=9, response_bytes=2000)
        if number % 5 == 0:
            booked = PeerBooked(number, f"e{number % 4}", 640, 256, blocks_of(f"p{number % 7}", 640))
            pool.feed(PeerTold("x", (booked, PeerReleased(max(0, number - 10)))))
        pool.now += 0.25
    pool.feed(PeerSynced("x", (PeerBooked(3, "e1", 64, 256),), 0, 30))
    pool.feed(taught())
    pool.feed(PeerLeft("x"))
    pool.now += 60
    pool.feed(Ticked())
    return Opening(9, config, False), steps


def taught() -> PeerTaught:
    """What another router that served the same prompts hands over."""
    other = Pool(seed=3)
    for number in range(20):
        other.send(f"p{number % 7}", 640).finish(prompt_tokens=700, cached_tokens=100)
    head, _ = other.router.teach("x")
    return structs.replace(head, rows=other.router.teach_rows("x", 0, head.clock)[0].rows)


def written(opening: Opening, steps: list[Step]) -> bytes:
    return MAGIC + encode(opening) + b"".join(encode(step) for step in steps)


def test_a_replayed_journal_gives_every_command_again() -> None:
    opening, steps = read(written(*recorded()))
    count, difference = replay(opening, steps)
    assert difference is None
    assert count > 150


def test_a_replay_names_the_first_step_that_differs() -> None:
    opening, steps = recorded()
    spoiled = next(number for number, step in enumerate(steps) if step.commands and number > 50)
    steps[spoiled] = Step(steps[spoiled].now, steps[spoiled].event, [])
    count, difference = replay(opening, steps)
    assert count == spoiled
    assert difference is not None
    assert difference.number == spoiled + 1
    assert (difference.recorded, len(difference.replayed)) == ([], 1)


def test_another_seed_is_seen_as_a_difference() -> None:
    opening, steps = recorded(200)
    _, difference = replay(Opening(opening.seed + 1, opening.config_text, opening.shares_pool), steps)
    assert difference is not None


@given(st.integers(0, 20_000))
def test_a_journal_cut_off_anywhere_reads_up_to_the_cut(length: int) -> None:
    data = written(*recorded(5))
    whole = list(frames(data))
    kept = list(frames(data[: len(MAGIC) + length]))
    assert kept == whole[: len(kept)]


@given(st.binary(max_size=400))
def test_bytes_that_are_no_journal_are_refused_and_never_crash(garbage: bytes) -> None:
    with pytest.raises(InvalidInput):
        read(garbage)
    try:
        opening, steps = read(MAGIC + garbage)
        replay(opening, steps)
    except InvalidInput:
        pass


def test_a_frame_that_claims_too_much_is_refused() -> None:
    with pytest.raises(InvalidInput, match="limit"):
        list(frames(MAGIC + b"\xff\xff\xff\xff"))


def test_a_frame_that_is_nested_too_deep_cannot_be_read() -> None:
    frame = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(InvalidInput, match="opening cannot be read"):
        read(MAGIC + len(frame).to_bytes(4, "little") + frame)
    _, steps = read(MAGIC + encode(Opening(1, "", False)) + len(frame).to_bytes(4, "little") + frame)
    with pytest.raises(InvalidInput, match="step 1"):
        list(steps)

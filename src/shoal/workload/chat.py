"""The plan of a workload: chats, each a list of turns that are sent one after the other.

A plan holds what the users say; the replies are the pool's, so a turn's body is made by `chat_body` when the
replies before it are known.  A workload of single requests is a plan of chats with one turn.
"""

from collections.abc import Sequence

import msgspec


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation.

    system: shared opening text, "" for none.  says: what the user says, one per turn.
    reply_tokens: length of the reply that each turn asks for (`max_tokens`), as many as `says`.
    think_s: seconds between the last reply and each turn (a person reading, an agent's tool at work); () for none.
    """

    id: str
    system: str = ""
    says: tuple[str, ...]
    reply_tokens: tuple[int, ...]
    think_s: tuple[float, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A workload.  chats: in the order in which they start.  concurrency: chats in flight in a closed loop."""

    name: str
    chats: tuple[Chat, ...]
    concurrency: int

    @property
    def requests(self) -> int:
        """How many requests the whole plan sends."""
        return sum(len(chat.says) for chat in self.chats)


def chat_body(chat: Chat, replies: Sequence[str], *, model: str, stream: bool = True) -> bytes:
    """Return the OpenAI chat body of the turn that follows `replies` (their count is the turn's index)."""
    turn = len(replies)
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    for said, reply in zip(chat.says, replies, strict=False):
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": chat.says[turn]})
    body: dict[str, object] = {"model": model, "messages": messages, "max_tokens": chat.reply_tokens[turn]}
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)

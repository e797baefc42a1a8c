"""Token ids of texts that begin like texts seen before: only what is new is tokenised.

A text is cut before added tokens (`<|im_start|>` and the like), where a tokenizer cuts it itself before anything else:
the pieces on both sides are normalised, split and merged each for itself, so their ids are those of the whole.  Pieces
are kept as a tree: a node stands for all text from the beginning, and is found by the digest of that text and of where
the next piece ends.  Owns the cut, the tree and its budget; keeps ids and digests, no text.
"""

import os
import re
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import xxhash
from tokenizers import AddedToken, Tokenizer

# One text at a time leaves nothing to its threads, of which there would be one per core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MIN_PIECE_CHARS = 4096
"""Shorter pieces are not kept on their own, but for the last: each costs a look-up in every text to come."""

MAX_STEPS = 32
"""Ways on that a node remembers; each costs texts that take another one a comparison, or a digest if its end fits."""

NODE_BYTES = 400
"""What a node takes beside its ids."""


class Step(NamedTuple):
    """A way from one node to the next: a piece of so many characters that ends before `marker`."""

    chars: int
    marker: str


class _Node:
    """All text up to a cut.  ids: of its last piece, little-endian uint32.  steps: the last used one first."""

    __slots__ = ("ids", "steps")

    def __init__(self, ids: bytes) -> None:
        self.ids = ids
        self.steps: list[Step] = []


class PrefixedTokenizer:
    """A tokenizer that remembers.  Safe to use from several threads.

    tokenizer: belongs to this object from now on.  budget_bytes: of what it remembers.  seed: secret, so that nobody
    can make texts whose digests collide.
    """

    def __init__(self, tokenizer: Tokenizer, budget_bytes: int, seed: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._budget_bytes = budget_bytes
        self._seed = seed
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        markers = {token.content: number for number, token in added.items() if _is_cut(token, added)}
        self._markers = markers if _are_apart(list(markers)) else {}
        self._marker_ids = frozenset(self._markers.values())
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._markers))))
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._root = _Node(b"")
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._around = self._find_around()

    @property
    def used_bytes(self) -> int:
        """What it remembers now."""
        return self._used_bytes

    def encode(self, text: str, *, has_special_tokens: bool = False) -> bytes:
        """Return the ids of `text` as little-endian uint32.

        has_special_tokens: with those that the tokenizer puts around a text.
        """
        if has_special_tokens:
            if self._around is None:
                return np.array(self._encode(text, has_special_tokens=True), "<u4").tobytes()
            before, after = self._around
            return before + self.encode(text) + after
        with self._lock:
            place, path, pieces = self._walk(text)
        tail = text[place:] if place else text
        ids = self._encode(tail)
        packed = np.array(ids, dtype="<u4").tobytes()
        cuts = self._cuts(tail, ids)
        if cuts:
            with self._lock:
                self._keep(tail, packed, cuts, path)
        pieces.append(packed)
        return b"".join(pieces)

    def _encode(self, text: str, *, has_special_tokens: bool = False) -> list[int]:
        # Unlike `encode` this one does not hold the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=has_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    # ------------------------------------------------------------------ the tree

    def _walk(self, text: str) -> tuple[int, bytes, list[bytes]]:
        """Follow what is known of the text; returns how far it goes, the node there, and the ids up to there."""
        place, key, node = 0, b"", self._root
        found: list[bytes] = []
        pieces: list[bytes] = []
        while True:
            taken = self._next(text, place, key, node)
            if taken is None:
                break
            place, key, node = taken
            found.append(key)
            pieces.append(node.ids)
        for used in reversed(found):
            # The beginning last: it must not be dropped before what hangs on it.
            self._nodes.move_to_end(used)
        return place, key, pieces

    def _next(self, text: str, place: int, key: bytes, node: _Node) -> tuple[int, bytes, _Node] | None:
        for number, step in enumerate(node.steps):
            end = place + step.chars
            if not text.startswith(step.marker, end):
                continue
            next_key = self._key(key, text[place:end], step.marker)
            following = self._nodes.get(next_key)
            if following is not None:
                if number:
                    node.steps.insert(0, node.steps.pop(number))
                return end, next_key, following
        return None

    def _key(self, key: bytes, piece: str, marker: str) -> bytes:
        return xxhash.xxh3_128_digest(b"%b%b\xff%b" % (key, marker.encode(), piece.encode()), self._seed)

    def _keep(self, tail: str, ids: bytes, cuts: list[tuple[int, int, str]], key: bytes) -> None:
        """Remember the pieces of `tail`, which follows the node `key`.  cuts: (character, place in ids, marker)."""
        node = self._nodes.get(key) if key else self._root
        from_char = from_id = 0
        made = []
        for char, place, marker in cuts:
            if node is None:
                # Another thread's texts have pushed it out.
                break
            next_key = self._key(key, tail[from_char:char], marker)
            following = self._nodes.get(next_key)
            if following is None:
                following = self._nodes[next_key] = _Node(ids[4 * from_id : 4 * place])
                self._used_bytes += NODE_BYTES + len(following.ids)
            step = Step(char - from_char, marker)
            if step in node.steps:
                node.steps.remove(step)
            node.steps.insert(0, step)
            del node.steps[MAX_STEPS:]
            made.append(next_key)
            key, node, from_char, from_id = next_key, following, char, place
        for used in reversed(made):
            self._nodes.move_to_end(used)
        while self._used_bytes > self._budget_bytes and self._nodes:
            _, dropped = self._nodes.popitem(last=False)
            self._used_bytes -= NODE_BYTES + len(dropped.ids)

    # ------------------------------------------------------------------ where to cut

    def _cuts(self, text: str, ids: list[int]) -> list[tuple[int, int, str]]:
        """Places before markers, far enough from each other, and the last one in any case."""
        known = self._marker_ids
        places = [place for place, number in enumerate(ids) if number in known]
        if not places:
            return []
        matches = list(self._pattern.finditer(text))
        if [self._markers[match[0]] for match in matches] != [ids[place] for place in places]:
            # Some stand where another token took their characters: which ones is not known here.
            return []
        cuts: list[tuple[int, int, str]] = []
        from_char = 0
        for place, match in zip(places, matches, strict=True):
            char, is_last = match.start(), match is matches[-1]
            if char and (is_last or char - from_char >= MIN_PIECE_CHARS):
                cuts.append((char, place, match[0]))
                from_char = char
        return cuts

    def _find_around(self) -> tuple[bytes, bytes] | None:
        """Return the ids that the tokenizer puts before and after a text, None when it does something else."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            end = start + len(plain)
            if full[start:end] == plain:
                return np.array(full[:start], "<u4").tobytes(), np.array(full[end:], "<u4").tobytes()
        return None


def _is_cut(token: AddedToken, added: dict[int, AddedToken]) -> bool:
    """Whether a text is always cut before this token, whatever stands around it.

    It is looked for before anything is normalised, takes no white space from before it, does not ask for the edge of a
    word, and cannot be a part of another added token.
    """
    if token.normalized or token.lstrip or token.single_word or not token.content:
        return False
    return not any(token.content in other.content and other.content != token.content for other in added.values())


def _are_apart(markers: list[str]) -> bool:
    """Whether no two markers can overlap in a text, so that all that stand in it can be found one after the other."""
    starts = {marker[:size] for marker in markers for size in range(1, len(marker))}
    return not any(marker[size:] in starts for marker in markers for size in range(1, len(marker)))

"""What a picker shows of a peer.  Values only."""

import msgspec


class PeerPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One address as this picker sees it.

    state: `silent` (nobody was heard), `catching-up`, `heard`, `lost`, or `itself`.  age_s: of the last word, None
    before the first.  gaps: messages that did not come.  skipped: that could not be read.
    """

    address: str
    name: str = ""
    run: str = ""
    state: str = "silent"
    age_s: float | None = None
    messages: int = 0
    gaps: int = 0
    skipped: int = 0
    syncs: int = 0

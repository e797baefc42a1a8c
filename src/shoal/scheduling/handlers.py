"""Profile handlers: which profiles run for a request, in which order."""

from typing import ClassVar


class SingleProfileHandler:
    """Runs the one profile of the configuration.  Added by itself when no handler is configured."""

    type: ClassVar[str] = "single-profile-handler"

# SPDX-License-Identifier: Apache-2.0
"""``Progress``, to which long runs report."""


class Progress:
    """Reports the progress of a long run. This class shows nothing; the progress bar of commands is a subclass."""

    def begin(self, what: str, steps: int) -> None:
        """Begin a stage of ``steps`` steps."""

    def step(self) -> None:
        """Count a finished step of the stage."""

    def print(self, line: str) -> None:
        """Show a line: a result, or the start of something slow."""

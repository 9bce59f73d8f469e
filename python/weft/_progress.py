"""Progress of a prompt, reported to a function, a tqdm class or a tqdm bar."""

from __future__ import annotations

from typing import Any

from ._library import refuse


class Progress:
    """Passes on how many tokens of a prompt were read.

    A function receives (tokens read, tokens in all). A class like tqdm.tqdm makes a bar, which is closed at the end. A bar is advanced and
    left open.
    """

    def __init__(self, to: Any) -> None:
        if to is not None and not callable(to) and not hasattr(to, "update"):
            raise refuse("generate", "progress", f"is a {type(to).__name__}, wanted a function, a class like tqdm.tqdm, or a bar of one")
        self._make = to if isinstance(to, type) and hasattr(to, "update") else None
        self._bar = to if self._make is None and hasattr(to, "update") else None
        self._function = to if self._make is None and self._bar is None else None
        self._done = 0

    def report(self, done: int, everything: int) -> None:
        if self._function is not None:
            self._function(done, everything)
        if self._make is not None and self._bar is None:
            self._bar = self._make(total=everything, unit="token", desc="prompt")
        elif self._bar is not None and self._done == 0:
            self._bar.total = everything
        if self._bar is not None:
            self._bar.update(done - self._done)
            self._done = done

    def close(self) -> None:
        made, self._make = self._make, None
        if made is not None and self._bar is not None:
            bar, self._bar = self._bar, None
            bar.close()

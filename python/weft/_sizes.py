"""Sizes of outputs, from the shape letters of the schema and the arrays that are given."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ._members import Member

# Numbers of the arguments that are sizes, by the end of their paths.
_NUMBERS = {"sequences.count": "N", "partials.count": "B", "chunk": "C"}


class Sizes:
    """The sizes that the letters of one call stand for."""

    def __init__(self) -> None:
        self._letters: Dict[str, int] = {}
        self._leading: Tuple[int, ...] = ()
        self._chosen: Dict[Tuple[Tuple[str, ...], ...], int] = {}  # for members with two shapes: which one the inputs have

    def bind_tensor(self, member: Member, sizes: Tuple[int, ...]) -> None:
        fitting = [index for index, letters in enumerate(member.letters) if letters[0] == "..." or len(letters) == len(sizes)]
        if len(fitting) != 1 or member.output:
            return
        letters = member.letters[fitting[0]]
        self._chosen[member.letters] = fitting[0]
        if letters[0] == "...":
            keep = len(letters) - 1
            self._leading, letters, sizes = sizes[: len(sizes) - keep], letters[1:], sizes[len(sizes) - keep :]
        for letter, size in zip(letters, sizes):
            if letter.isidentifier():
                self._letters.setdefault(letter, size)

    def bind_number(self, member: Member, value: Any) -> None:
        if member.kind == "recipe":
            self._letters.setdefault("Dk", value.k.head_dim)
            self._letters.setdefault("Dv", value.v.head_dim)
        for end, letter in _NUMBERS.items():
            if member.path == end or member.path.endswith("." + end):
                self._letters[letter] = value

    def of(self, member: Member) -> Optional[Tuple[int, ...]]:
        """The sizes of an output; None where the inputs do not determine them. Of two shapes, the one of an input with the same two."""
        index = 0 if len(member.letters) == 1 else self._chosen.get(member.letters, -1)
        if index < 0:
            return None
        letters = member.letters[index]
        leading: Tuple[int, ...] = ()
        if letters[0] == "...":
            leading, letters = self._leading, letters[1:]
        known = {"N": 1, **self._letters}  # one sequence unless the arguments say otherwise
        sizes = tuple(int(letter) if letter.isdigit() else known.get(letter, -1) for letter in letters)
        return None if min(sizes) < 0 else (*leading, *sizes)

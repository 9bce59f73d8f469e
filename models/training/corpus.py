"""Reads the training text: plain or xz-compressed UTF-8, documents separated by a line `<|endoftext|>`."""

import lzma
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"


def read_text(path):
    data = Path(path).read_bytes()
    if Path(path).suffix == ".xz":
        data = lzma.decompress(data)
    return data.decode("utf-8")


def read_documents(path):
    """The documents in order, without separators, byte order marks and surrounding blank lines."""
    parts = read_text(path).replace("\ufeff", "").split(END_OF_TEXT)
    return [text for text in (part.strip("\n") for part in parts) if text]


def paragraphs(documents):
    """The same text in pieces that end at blank lines: small enough to share between threads."""
    for text in documents:
        yield from (piece + "\n\n" for piece in text.split("\n\n"))

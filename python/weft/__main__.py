"""`python -m weft ...` is the command `weft`."""

import os
import sys

from ._library import FOLDER


def main() -> None:
    """Replaces this process by the command."""
    command = str(FOLDER / "bin" / "weft")
    os.execv(command, [command, *sys.argv[1:]])


if __name__ == "__main__":
    main()

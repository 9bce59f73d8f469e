#!/usr/bin/env python3
"""Checks the include graph against the table of rooms in DESIGN.md.

    scripts/layering.py                 every tracked and new source; exit status 1 names each include that the table does not allow
    scripts/layering.py --root FOLDER   the same for another tree

The table has one line a room: `folder`, what lives there, and what its files may include. The third column lists rooms and single
files in backticks. A file may always include its own room. "everything" allows all rooms.
"""
import argparse
import os
import re
import subprocess
import sys

SOURCES = (".h", ".cc", ".cu", ".cuh", ".c")
HEADING = "| room | what lives there | may include |"


def read_table(text):
    """Maps each room to the rooms and files that it may include; None stands for everything."""
    lines = text.splitlines()
    if HEADING not in lines:
        sys.exit(f"layering: DESIGN.md has no table that begins with '{HEADING}'")
    rooms = {}
    for line in lines[lines.index(HEADING) + 2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0])
        allowed = None if cells[2] == "everything" else set(re.findall(r"`([^`]+)`", cells[2]))
        for name in names:
            rooms[name.rstrip("/")] = allowed if allowed is None else {entry.rstrip("/") for entry in allowed}
    return rooms


def list_sources(root):
    """Source files of the tree: what git tracks or would track, or every file outside hidden and build folders where git is missing."""
    try:
        listed = subprocess.run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
                                capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        listed = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith((".", "build"))]
            listed += [os.path.relpath(os.path.join(folder, name), root) for name in names]
    return sorted(name for name in set(listed) if name.endswith(SOURCES) and os.path.isfile(os.path.join(root, name)))


def room_of(path, rooms):
    """The deepest room that holds the path, or None."""
    folder = os.path.dirname(path)
    while folder and folder not in rooms:
        folder = os.path.dirname(folder)
    return folder or None


def target_of(include, including, existing):
    """The file that an include names, relative to the root; None for headers of other projects."""
    for base in ("include/", "src/", "", os.path.dirname(including) + "/"):
        if os.path.normpath(base + include) in existing:
            return os.path.normpath(base + include)
    return None


def find_cycle(rooms):
    """A list of rooms that may include each other in a circle, or None."""
    done, path = set(), []

    def visit(room):
        if room in path:
            return path[path.index(room):] + [room]
        if room in done or rooms.get(room) is None:
            return None
        path.append(room)
        for other in sorted(entry for entry in rooms[room] if entry in rooms):
            cycle = visit(other)
            if cycle:
                return cycle
        path.pop()
        done.add(room)
        return None

    for room in sorted(rooms):
        cycle = visit(room)
        if cycle:
            return cycle
    return None


def check(root):
    with open(os.path.join(root, "DESIGN.md"), encoding="utf-8") as design:
        rooms = read_table(design.read())
    sources = list_sources(root)
    existing = set(sources)
    faults = []
    for room, allowed in rooms.items():
        for entry in allowed or ():
            if entry not in rooms and entry not in existing:
                faults.append(f"DESIGN.md: room {room} may include `{entry}`, which is neither a room nor a file")
    cycle = find_cycle(rooms)
    if cycle:
        faults.append("DESIGN.md: rooms include each other in a circle: " + " -> ".join(cycle))
    for path in sources:
        room = room_of(path, rooms)
        if room is None:
            faults.append(f"{path}: lies in no room of DESIGN.md's table")
            continue
        if rooms[room] is None:
            continue
        with open(os.path.join(root, path), encoding="utf-8") as source:
            for number, line in enumerate(source, 1):
                include = re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', line)
                target = include and target_of(include.group(1), path, existing)
                if not target or target in rooms[room] or room_of(target, rooms) in rooms[room] | {room}:
                    continue
                faults.append(f"{path}:{number}: room {room} may not include {target} (room {room_of(target, rooms)})")
    return sources, rooms, faults


def main():
    parser = argparse.ArgumentParser(description="Checks the include graph against the table of rooms in DESIGN.md.")
    parser.add_argument("--root", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    sources, rooms, faults = check(os.path.normpath(parser.parse_args().root))
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(f"layering: {len(faults)} fault(s); change the include, or the table in DESIGN.md if the rule is wrong")
    print(f"layering: {len(sources)} files in {len(rooms)} rooms include only what DESIGN.md allows")


if __name__ == "__main__":
    main()

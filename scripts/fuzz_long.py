#!/usr/bin/env python3
"""Runs every fuzz target for hours, reports executions and coverage, and minimises the committed corpus.

    scripts/fuzz_long.py [--hours H | --minutes M | --cpu-minutes C] [--targets A,B] [--keep]

The time is divided among the targets, as many of which run at once as the machine has cores. A tenth of it goes to differential calls:
the cpu backend against the reference on random legal calls (`weft check --random`). With --cpu-minutes every target uses
that much CPU time, however busy the machine is, and the differential calls run as long by the clock. At the end each target's inputs are merged into
fuzz/corpus/<target>: few inputs that cover the same edges, without inputs over 16 KiB. --keep leaves the committed corpus alone.
Minutes in the table are CPU minutes of the target.
The table goes to stdout and to build-fuzz/report.md. Exit status 1 when a target found a fault; its input then lies in build-fuzz/faults.
"""
import argparse
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
BUILD = os.path.join(ROOT, "build-fuzz")
WEFT = os.path.join(ROOT, "build", "weft")
LARGEST_INPUT = 16384  # bytes, of the committed corpus
# Some targets write their input to files; in memory that takes no time.
ENVIRONMENT = {**os.environ, "TMPDIR": "/dev/shm"} if os.path.isdir("/dev/shm") else None


def build():
    subprocess.run(["cmake", "-S", "fuzz", "-B", BUILD, "-G", "Ninja", "-DCMAKE_CXX_COMPILER=clang++-14"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD], check=True, stdout=subprocess.DEVNULL)


def targets():
    """Maps each target to its options of libFuzzer, as ctest runs it, without those about time and folders."""
    found = {}
    shown = subprocess.run(["ctest", "--test-dir", BUILD, "-N", "-V"], check=True, capture_output=True, text=True).stdout
    for line in re.findall(r"Test command: (.*)", shown):
        words = [word.strip('"') for word in line.split()]
        found[os.path.basename(words[0])] = [word for word in words[1:] if word.startswith("-") and "max_total_time" not in word]
    return found


def last_number(pattern, log):
    numbers = re.findall(pattern, log)
    return int(numbers[-1]) if numbers else 0


def cpu_seconds(process):
    """CPU time that a running process has used so far."""
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_after(running, seconds):
    """Ends libFuzzer by the signal that it takes as "stop, and report" once it has used so many CPU seconds."""
    while not os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        if cpu_seconds(running.pid) >= seconds:
            running.send_signal(signal.SIGUSR1)
            return
        time.sleep(1)


def fuzz(name, options, seconds, of_cpu):
    new, seeds = os.path.join(BUILD, "corpus", name), os.path.join(ROOT, "fuzz", "corpus", name)
    faults = os.path.join(BUILD, "faults", name)
    for folder in (new, seeds, faults):
        os.makedirs(folder, exist_ok=True)
    limit = [] if of_cpu else [f"-max_total_time={seconds}"]
    command = [os.path.join(BUILD, name), *options, *limit, f"-artifact_prefix={faults}/", new, seeds]
    with open(os.path.join(BUILD, name + ".log"), "wb") as out:
        running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=BUILD, env=ENVIRONMENT)
        if of_cpu:
            end_after(running, seconds)
        _, status, used = os.wait4(running.pid, 0)
    with open(os.path.join(BUILD, name + ".log"), encoding="utf-8", errors="replace") as text:
        log = text.read()
    if status != 0:
        print(f"fuzz_long: {name} found a fault:\n{log[-3000:]}", file=sys.stderr)
    return {"target": name, "minutes": (used.ru_utime + used.ru_stime) / 60, "failed": status != 0, "corpus": "unchanged",
            "runs": last_number(r"number_of_executed_units: (\d+)", log), "edges": last_number(r"cov: (\d+)", log),
            "features": last_number(r"ft: (\d+)", log)}


def minimise(row, options):
    """Replaces the committed corpus of a target by few inputs that cover the edges of all, and says so in its row."""
    name = row["target"]
    new, seeds = os.path.join(BUILD, "corpus", name), os.path.join(ROOT, "fuzz", "corpus", name)
    merged, small = os.path.join(BUILD, "merged", name), os.path.join(BUILD, "small", name)
    for folder in (merged, small):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    for folder in (seeds, new):  # -merge would cut longer inputs
        for one in os.listdir(folder):
            if os.path.getsize(os.path.join(folder, one)) <= LARGEST_INPUT:
                shutil.copy(os.path.join(folder, one), small)
    # Without counters only edges count, not how often they were taken: a sixth of the inputs.
    ended = subprocess.run([os.path.join(BUILD, name), "-set_cover_merge=1", "-use_counters=0", *options, merged, small], cwd=BUILD, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    found = os.listdir(merged)
    if ended.returncode != 0 or not found:
        row["corpus"] = "unchanged: the merge failed"
        return
    for one in os.listdir(seeds):
        os.remove(os.path.join(seeds, one))
    for one in found:
        shutil.copy(os.path.join(merged, one), seeds)
    row["corpus"] = f"{len(found)} inputs, {sum(os.path.getsize(os.path.join(seeds, one)) for one in found)} bytes"


def differential(seconds):
    """Random legal calls on the cpu against the reference until the time is over; returns calls and seed of a failure."""
    calls, seed, begin = 0, int(time.time()), time.monotonic()
    while time.monotonic() - begin < seconds:
        seed += 1
        ended = subprocess.run([WEFT, "check", "--backend", "cpu", "--random", "100", "--seed", str(seed)], capture_output=True, text=True)
        calls += sum(int(number) for number in re.findall(r"^passed (\d+),", ended.stdout, re.M))
        if ended.returncode != 0:
            print(f"fuzz_long: weft check --backend cpu --random 100 --seed {seed} failed:\n{ended.stdout[-3000:]}{ended.stderr}",
                  file=sys.stderr)
            return calls, seed
    return calls, None


def report(rows, last):
    """Writes build-fuzz/report.md and returns its text."""
    lines = ["| target | minutes | executions | edges | features | corpus |", "|---|---:|---:|---:|---:|---|"]
    lines += ["| {target} | {minutes:.1f} | {runs} | {edges} | {features} | {corpus} |".format(**row) for row in rows]
    text = "\n".join(lines + ["", last]).rstrip()
    with open(os.path.join(BUILD, "report.md"), "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2, help="wall-clock hours of the whole run (default 2)")
    parser.add_argument("--minutes", type=float, help="the same in minutes")
    parser.add_argument("--cpu-minutes", type=float, help="CPU minutes of every target, in place of wall-clock time of the whole run")
    parser.add_argument("--targets", help="only these targets, separated by commas")
    parser.add_argument("--keep", action="store_true", help="leave the committed corpus alone")
    flags = parser.parse_args()
    if not os.path.exists(WEFT):
        sys.exit("fuzz_long: there is no build/weft; run make build")
    build()
    chosen = targets()
    if flags.targets:
        unknown = set(flags.targets.split(",")) - set(chosen)
        if unknown:
            sys.exit(f"fuzz_long: there is no target {', '.join(sorted(unknown))}; there are {', '.join(sorted(chosen))}")
        chosen = {name: chosen[name] for name in flags.targets.split(",")}
    wall = 60 * (flags.minutes if flags.minutes else 60 * flags.hours)
    jobs = os.cpu_count() or 1
    seconds = max(1, int(0.9 * wall * min(jobs, len(chosen)) / len(chosen)))
    last_seconds = 0.1 * wall
    if flags.cpu_minutes:
        seconds = last_seconds = 60 * flags.cpu_minutes
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda item: fuzz(item[0], item[1], seconds, bool(flags.cpu_minutes)), chosen.items()))
        report(rows, "")
        if not flags.keep:
            list(pool.map(lambda row: minimise(row, chosen[row["target"]]), rows))
    report(rows, "")
    calls, failing_seed = differential(last_seconds)
    print(report(rows, f"{calls} random legal calls of the cpu backend agree with the reference" +
                 (f"; seed {failing_seed} fails." if failing_seed else ".")))
    if failing_seed or any(row["failed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

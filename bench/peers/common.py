"""What the peer scripts share: options, interleaved timing, error measures and the printed report."""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only computes references; its threads must not disturb the timing

import numpy as np

import ggml_peer
import weft_c


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def parser(description):
    """The options that every script has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--library", help="shared libweft (default: build-shared/libweft.so of this checkout)")
    options.add_argument("--ggml", help="shared ggml with its CPU backend (default: the one of the xllamacpp wheel, if installed)")
    options.add_argument("--threads", type=numbers, default=[1, 2], help="thread counts, e.g. 1,2")
    options.add_argument("--isa", default="best", choices=weft_c.ISAS, help="instruction set that Weft may use; peers take their own")
    options.add_argument("--rounds", type=int, default=5, help="how often every contender takes its turn")
    options.add_argument("--seconds", type=float, default=0.3, help="at least this long per turn, and at least one timed run")
    options.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: only the time on a processor, for one thread on a busy machine")
    options.add_argument("--l3-mib", type=float, default=l3_mib(), help="last-level cache; cold cases walk through more than 4 times it")
    options.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    options.add_argument("--json", help="also write everything to this file")
    return options


def numbers(text):
    return [int(part) for part in text.split(",")]


def l3_mib():
    sizes = [32.0]  # where the system does not say
    for size in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index3/size"):
        sizes = [float(size.read_text().strip().rstrip("K")) / 1024]
    return sizes[0]


def ggml_for(options, threads):
    """ggml with that many threads, or None where there is no library for it."""
    library = options.ggml or ggml_peer.find_library()
    return ggml_peer.Ggml(library, threads) if library else None


def settle():
    """Waits until the pools of the previous contender have stopped spinning, so that nobody pays for another's idle threads."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.0005:
            return


def race(contenders, options):
    """Seconds of every timed run of each contender, in turns.

    A contender is a list of runs of equal work on different memory; its turns walk through them. The first run of a turn wakes its
    threads and is not counted.
    """
    clock = CLOCKS[options.clock]
    times = {name: [] for name in contenders}
    position = dict.fromkeys(contenders, 0)
    for _ in range(options.rounds):
        for name, runs in contenders.items():
            settle()
            runs[position[name] - 1]()
            end = clock() + options.seconds
            while True:
                run = runs[position[name]]
                position[name] = (position[name] + 1) % len(runs)
                start = clock()
                run()
                stop = clock()
                times[name].append(stop - start)
                if stop > end:
                    break
    return times


def relative_rms(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))


class Report:
    """Rows of results; a ratio is a peer's time over that of one of ours, so more than 1 means that Weft is faster."""

    def __init__(self, options, versions, ours, contenders_as_rows=False):
        self._options, self._ours, self._as_rows = options, ours, contenders_as_rows
        versions = {"weft": weft_c.Weft(weft_c.find_library(options.library)).version} | versions
        if ggml := ggml_for(options, 1):
            versions["ggml"] = f"{ggml.version} ({' '.join(ggml.features) or 'scalar'})"
        self.document = {"machine": machine(), "versions": versions, "isa": options.isa, "load_at_start": os.getloadavg()[0],
                         "times": [], "errors": []}

    def timed(self, case, unit, per_unit, times):
        """One case: medians and minima of a race, each time divided by per_unit seconds."""
        results = {name: {"median": statistics.median(values) / per_unit, "min": min(values) / per_unit, "runs": len(values)}
                   for name, values in times.items()}
        ratios = {peer: {own: {key: results[peer][key] / results[own][key] for key in ("median", "min")}
                         for own in self._ours if own in results} for peer in results if peer not in self._ours}
        self.document["times"].append({**case, "unit": unit, "results": results, "ratios": ratios})

    def error(self, case, **measures):
        self.document["errors"].append({**case, **measures})

    def print(self):
        document = self.document
        print(f"{document['machine']}; " + ", ".join(f"{name} {version}" for name, version in document["versions"].items()))
        print(f"load average {document['load_at_start']:.1f} at the start, {os.getloadavg()[0]:.1f} now; "
              f"{self._options.clock} clock; median / minimum of interleaved runs; ratio = peer / weft\n")
        cells = _cells_as_rows if self._as_rows else _cells_as_columns
        self._table([line for row in document["times"] for line in cells(row)])
        self._table([{key: _error_text(value) for key, value in row.items()} for row in document["errors"]])
        if self._options.json:
            pathlib.Path(self._options.json).write_text(json.dumps(document, indent=1) + "\n")

    def _table(self, rows):
        heads = list(dict.fromkeys(head for row in rows for head in row))
        lines = [heads, *([row.get(head, "-") for head in heads] for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        edge, gap = ("| ", " | ") if self._options.markdown else ("", "  ")
        texts = [edge + gap.join(cell.ljust(width) for cell, width in zip(line, widths)) + edge[::-1] for line in lines]
        if self._options.markdown:
            texts.insert(1, "|" + "|".join("---" for _ in heads) + "|")
        print("\n".join(text.rstrip() for text in texts) + "\n")


def _case_cells(row):
    return {key: str(value) for key, value in row.items() if key not in ("results", "ratios")}


def _time_text(result):
    return f"{result['median']:.4g} / {result['min']:.4g}"


def _ratio_text(ratio):
    return f"{ratio['median']:.2f} / {ratio['min']:.2f}"


def _cells_as_columns(row):
    cells = _case_cells(row) | {name: _time_text(result) for name, result in row["results"].items()}
    for peer, ratios in row["ratios"].items():
        cells |= {f"{peer} ratio": _ratio_text(ratio) for ratio in ratios.values()}
    return [cells]


def _cells_as_rows(row):
    return [_case_cells(row) | {"who": name, "time": _time_text(result)} |
            {f"over {own}": _ratio_text(ratio) for own, ratio in row["ratios"].get(name, {}).items()}
            for name, result in row["results"].items()]


def _error_text(value):
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def machine():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"

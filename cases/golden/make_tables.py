"""Solve the codebooks and Hadamard bit tables that the C++ commits; writes weft_tables.json, hadamard_bits.json, lloyd_max.json.

Nothing here reads the C++ sources. Lloyd-Max levels are solved in 50-digit arithmetic (Newton on
the centroid equations). Grid tables come from an exact dynamic program over all subsets of the
grid for each step, and a search over the step: symmetric subsets up to 5 bits, all subsets at 6 bits,
where an even gap between the two middle levels is worth the symmetry. Hadamard matrices of order 12,
20 and 28 are Paley's.
"""
import json
import math
import re
from pathlib import Path

import mpmath as mp
import numpy as np

HERE = Path(__file__).resolve().parent
mp.mp.dps = 50


# ---------------------------------------------------------------- exact Lloyd-Max for N(0,1)

def lloyd_max_positive_half(bits):
    """Positive levels of the MSE-optimal 2^bits-level quantiser of N(0,1), and its distortion."""
    n = 2 ** (bits - 1)
    # Panter-Dite start: levels are quantiles of N(0,3).
    c = [mp.sqrt(3) * mp.sqrt(2) * mp.erfinv((i + mp.mpf(1) / 2) / n) for i in range(n)]
    for sweep in range(200):
        edge = [mp.mpf(0)] + [(c[i] + c[i + 1]) / 2 for i in range(n - 1)]
        pdf = [mp.npdf(e) for e in edge] + [mp.mpf(0)]
        tail = [mp.erfc(e / mp.sqrt(2)) / 2 for e in edge] + [mp.mpf(0)]
        mass = [tail[i] - tail[i + 1] for i in range(n)]
        moment = [pdf[i] - pdf[i + 1] for i in range(n)]
        if sweep < 5:                      # a few Lloyd sweeps bring Newton into its basin
            c = [moment[i] / mass[i] for i in range(n)]
            continue
        # F_i = c_i mass_i - moment_i; its Jacobian is symmetric tridiagonal.
        f = [c[i] * mass[i] - moment[i] for i in range(n)]
        off = [(c[i] - edge[i + 1]) * pdf[i + 1] / 2 for i in range(n - 1)]      # dF_i / dc_{i+1}
        diag = [mass[i] + (off[i] if i < n - 1 else 0)
                + ((edge[i] - c[i]) * pdf[i] / 2 if i > 0 else 0) for i in range(n)]
        low = [(edge[i] - c[i]) * pdf[i] / 2 for i in range(1, n)]               # dF_i / dc_{i-1}
        d, r = diag[:], f[:]
        for i in range(1, n):
            t = low[i - 1] / d[i - 1]
            d[i] -= t * off[i - 1]
            r[i] -= t * r[i - 1]
        step = [mp.mpf(0)] * n
        for i in reversed(range(n)):
            step[i] = (r[i] - (off[i] * step[i + 1] if i < n - 1 else 0)) / d[i]
        c = [c[i] - step[i] for i in range(n)]
        if max(abs(s) for s in step) < mp.mpf(10) ** -35:
            break
    else:
        raise AssertionError("Newton did not converge")
    assert all(x < y for x, y in zip(c, c[1:])) and c[0] > 0
    distortion = 1 - 2 * sum(c[i] * c[i] * mass[i] for i in range(n))
    return [float(x) for x in c], float(distortion)


# ---------------------------------------------------------------- tables on the half-integer grid

def phi(x):
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def tail(x):
    return 0.5 * math.erfc(x / math.sqrt(2))


def cell_sums(grid, step):
    """(D, sum value*moment, sum value^2*mass) of grid*step, or of ±grid*step, by its positive cells, when all of grid is positive."""
    half = grid[0] > 0
    v = [g * step for g in grid]
    edges = [0.0 if half else -math.inf] + [(a + b) / 2 for a, b in zip(v, v[1:])] + [math.inf]
    times = lambda x, p: x * p if math.isfinite(x) else 0.0
    d = num = den = 0.0
    for x, a, b in zip(v, edges, edges[1:]):
        pa, pb = phi(a), phi(b)
        mass, first = tail(a) - tail(b), pa - pb
        second = mass + times(a, pa) - times(b, pb)
        d += second - 2 * x * first + x * x * mass
        num += first * x / step
        den += mass * (x / step) ** 2
    return 2 * d if half else d, num, den


def best_step(grid, lo, hi):
    """MSE-optimal step for a fixed set of grid points inside a bracket (golden section, then Lloyd's step)."""
    ratio = (math.sqrt(5) - 1) / 2
    f = lambda s: cell_sums(grid, s)[0]
    a, b = hi - ratio * (hi - lo), lo + ratio * (hi - lo)
    fa, fb = f(a), f(b)
    while hi - lo > 1e-8 * lo:
        if fa < fb:
            hi, b, fb = b, a, fa
            a = hi - ratio * (hi - lo)
            fa = f(a)
        else:
            lo, a, fa = a, b, fb
            b = lo + ratio * (hi - lo)
            fb = f(b)
    step = (lo + hi) / 2
    for _ in range(1000):
        _, num, den = cell_sums(grid, step)
        step, old = num / den, step
        if abs(step - old) < 1e-14 * step:
            break
    return step


def best_subset(levels, step, symmetric):
    """D and n of the exact optimum over all ways to choose `levels` n of -128..127, or of 0..127 to be mirrored, for a given step."""
    first = 0 if symmetric else -128
    n = np.arange(first, 128)
    v = (n + 0.5) * step
    # Half-steps from the left edge (0, or the first point) to the last point; those of points i and j are at[i], at[j] and
    # their midpoint's is (at[i] + at[j]) / 2.
    x = np.arange(0 if symmetric else 2 * first + 1, 256) * step / 2
    at = 2 * (n - first) + (1 if symmetric else 0)
    pdf = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
    t = np.array([tail(y) for y in x])
    m0, m1, m2 = t, pdf, t + x * pdf       # tail integrals of 1, x, x^2 from x to infinity
    error = lambda i, s0, s1, s2: s2 - 2 * v[i] * s1 + v[i] ** 2 * s0
    segment = lambda i, a, b: error(i, m0[a] - m0[b], m1[a] - m1[b], m2[a] - m2[b])   # of (x - v_i)^2 pdf

    i = np.arange(len(n))
    row, col = i[:, None], i[None, :]
    mid = (at[row] + at[col]) // 2
    pair = segment(col, at[col], mid) + segment(row, mid, at[row])     # between neighbours col < row
    pair[np.triu_indices(len(n))] = np.inf
    cost = segment(i, np.zeros(len(n), int), at) if symmetric else error(i, 1 - m0[at], -m1[at], 1 - m2[at])
    back = []
    for _ in range(levels - 1):
        total = cost + pair
        back.append(total.argmin(axis=1))
        cost = total[i, back[-1]]
    cost = cost + error(i, m0[at], m1[at], m2[at])
    j = int(cost.argmin())
    d, chosen = float(cost[j]), [j]
    for b in reversed(back):
        j = int(b[j])
        chosen.append(j)
    return 2 * d if symmetric else d, [int(n[j]) for j in reversed(chosen)]


def symmetric_table(bits, outer):
    """Best n and step: the exact subset at 4001 steps that put n = 127 at 0.7..1.7 of the Lloyd-Max outer level, then the step."""
    steps = outer / 127.5 * np.linspace(0.7, 1.7, 4001)
    scan = sorted((*best_subset(2 ** (bits - 1), s, True), s) for s in steps)
    best = None
    for d, n, s in scan[:20]:
        grid = [x + 0.5 for x in n]
        step = best_step(grid, 0.99 * s, 1.01 * s)
        d = cell_sums(grid, step)[0]
        if best is None or d < best[0]:
            best = (d, n, step)
    n, step = best[1], best[2]
    return [-1 - x for x in reversed(n)] + n, step


def any_table(bits, outer):
    """Best n and step over all subsets and all steps that put n = 127 at 0.7..1.7 of the Lloyd-Max outer level.

    At the best step s, (E - x)·E vanishes in the mean (E: the decoded x), so the same cells at s(1+δ) add δ²·mean(E²) < δ² to D.
    Hence a step whose exact D exceeds the best one known by δ² or more is not within δ of s, and its neighbourhood is dropped.
    """
    half = 0.002
    middles = outer / 127.5 * 0.7 * ((1 + half) / (1 - half)) ** np.arange(math.log(1.7 / 0.7) / (2 * half) + 1)
    lowest, highest = middles[0], middles[-1]
    best = (math.inf,)
    while True:
        scan = [(*best_subset(2 ** bits, s, False), s) for s in middles]
        best = min(best, *scan)
        if half < 1e-8:
            break
        worst = (half / (1 - half)) ** 2   # δ² of an interval whose end is the best step
        middles = [s * (1 + k * half * 2 / 3) for d, _, s in scan if d <= best[0] + worst for k in (-1, 0, 1)]
        half *= 0.34                       # thirds that overlap a little
    _, n, s = best
    assert lowest < s < highest
    # The mirror image is as good; this one gives zero the code 2^(bits-1) - 1, as the symmetric tables do.
    n = max(n, [-1 - x for x in reversed(n)])
    assert sum(x + y + 1 < 0 for x, y in zip(n, n[1:])) == 2 ** (bits - 1) - 1
    return n, best_step([x + 0.5 for x in n], 0.999 * s, 1.001 * s)


def uniform_table(bits):
    half = 2 ** (bits - 1)
    return list(range(-half, half)), best_step([x + 0.5 for x in range(half)], 1.0 / half, 8.0 / half)


def f32(x):
    return float(np.float32(x))


def solve_tables(exact):
    known = {2: ([35, 118], 0.012745, None), 3: ([12, 38, 68, 109], 0.019647, None),
             4: ([5, 16, 27, 39, 52, 67, 86, 114], 0.023884, 0.0095053)}
    bound = {2: 1.001, 3: 1.001, 4: 1.001, 5: 1.005, 6: 1.025}
    tables = []
    for bits in range(2, 9):
        c, optimum = exact[bits]
        n, step = symmetric_table(bits, c[-1]) if bits <= 5 else any_table(bits, c[-1]) if bits == 6 else uniform_table(bits)
        assert len(n) == 2 ** bits and all(x < y for x, y in zip(n, n[1:])) and -128 <= n[0] and n[-1] <= 127
        mirrored = n == [-1 - x for x in reversed(n)]
        positive = [x for x in n if x >= 0]
        step32 = f32(step)
        d = cell_sums([x + 0.5 for x in (positive if mirrored else n)], step32)[0]
        if bits in known:
            kn, ks, kd = known[bits]
            assert mirrored and positive == kn and abs(step / ks - 1) < 3e-4, (bits, n, step)
            assert kd is None or abs(d - kd) < 6e-8, (bits, d)
        if bits in bound:
            assert d / optimum <= bound[bits], (bits, d / optimum)
        tables.append({"bits": bits, "n_all": n, "step": step32, "step_bits": "0x%08x" % np.float32(step32).view(np.uint32),
                       "step_float64": step, "D": d, "D_lloyd_max": optimum, "ratio": d / optimum})
        print("bits %d  n %s  step %.9g  D %.8g  ratio %.6f"
              % (bits, n if bits < 7 else "%d..%d" % (n[0], n[-1]), step32, d, d / optimum))
    return tables


# ---------------------------------------------------------------- Hadamard matrices of order 12, 20, 28

def jacobsthal(q):
    """Q[i,j] = Legendre symbol of (i - j) mod the prime q."""
    squares = {x * x % q for x in range(1, q)}
    chi = [0] + [1 if x in squares else -1 for x in range(1, q)]
    return np.array([[chi[(i - j) % q] for j in range(q)] for i in range(q)])


def paley_1(q):
    """Order q+1 for a prime q = 3 mod 4: I + [[0, 1], [-1, Q]]."""
    s = np.zeros((q + 1, q + 1), int)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, -1, jacobsthal(q)
    return s + np.eye(q + 1, dtype=int)


def paley_2(q):
    """Order 2(q+1) for a prime q = 1 mod 4: conference matrix C, then C (x) [[1,1],[1,-1]] + I (x) [[1,-1],[-1,-1]]."""
    c = np.zeros((q + 1, q + 1), int)
    c[0, 1:], c[1:, 0], c[1:, 1:] = 1, 1, jacobsthal(q)
    return np.kron(c, np.array([[1, 1], [1, -1]])) + np.kron(np.eye(q + 1, dtype=int), np.array([[1, -1], [-1, -1]]))


def hadamard_tables():
    out = {}
    for m, h in ((12, paley_1(11)), (20, paley_1(19)), (28, paley_2(13))):
        assert h.shape == (m, m) and set(np.unique(h)) == {-1, 1}
        assert (h @ h.T == m * np.eye(m, dtype=int)).all()
        rows = [sum(1 << j for j in range(m) if h[i, j] < 0) for i in range(m)]
        out[str(m)] = {"construction": "Paley I, q = %d" % (m - 1) if m < 28 else "Paley II, q = 13",
                       "rows_hex": ["0x%07x" % r for r in rows],
                       "rows": ["".join("-" if x < 0 else "+" for x in row) for row in h]}
    return out


def dump(name, obj):
    """JSON with one line per innermost list."""
    text = json.dumps(obj, indent=1)
    flat = lambda m: "[" + re.sub(r"\s*\n\s*", " ", m.group(1)) + "]"
    (HERE / name).write_text(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", flat, text) + "\n")


def main():
    dump("hadamard_bits.json", {
        "about": "Sign bits of Hadamard matrices: bit j of rows_hex[i] is 1 when H[i][j] = -1. Group d = m*2^k uses "
                 "H_m (x) H_2^k (index = i_m*2^k + i_2, H_2^k in Sylvester order), y = d^(-1/2) H (s*x), x = s*(d^(-1/2) H^T y).",
        "matrices": hadamard_tables()})
    exact = {b: lloyd_max_positive_half(b) for b in range(1, 9)}
    known_d = {1: .363380, 2: .117482, 3: .034548, 4: .0095010, 5: .0025047, 6: 6.4424e-4, 7: 1.6348e-4, 8: 4.1185e-5}
    known_ends = {1: (.7978846, .7978846), 2: (.4527800, 1.5104176), 3: (.2450942, 2.1519457), 4: (.1283950, 2.7325896),
                  5: (.0658897, 3.2607325), 6: (.0334095, 3.7441013), 8: (.0084462, 4.6035356)}
    for b, (c, d) in exact.items():
        assert abs(d / known_d[b] - 1) < 2e-5, (b, d)
        assert b not in known_ends or (abs(c[0] - known_ends[b][0]) < 6e-8 and abs(c[-1] - known_ends[b][1]) < 6e-8), b
    dump("lloyd_max.json", {
        "about": "Exact Lloyd-Max levels for N(0,1): positive half, ascending (mirror for the negative half; boundaries are midpoints). "
                 "D = mean squared error per coordinate. Solved to 1e-35, printed as shortest float64.",
        "tables": [{"bits": b, "levels_positive": c, "D": d} for b, (c, d) in exact.items()]})
    dump("weft_tables.json", {
        "about": "Half-integer grid tables for N(0,1): level = (n + 1/2) * step, n from n_all, ascending; boundaries are midpoints. "
                 "step is a float32 value; D is the mean squared error per coordinate with that step. "
                 "Bits 2..5: optimum over the symmetric subsets of n = -128..127 and the step. Bits 6: optimum over all subsets, which is not "
                 "symmetric; of it and its mirror image the one in which 0 has code 31. Bits 7, 8: n = -2^(bits-1)..2^(bits-1)-1, optimal step.",
        "tables": solve_tables(exact)})


if __name__ == "__main__":
    main()

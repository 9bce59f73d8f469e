"""Solve the codebooks and Hadamard bit tables that the C++ commits; writes weft_tables.json, hadamard_bits.json, lloyd_max.json.

Nothing here reads the C++ sources. Lloyd-Max levels are solved in 50-digit arithmetic (Newton on
the centroid equations). Grid tables come from an exact dynamic program over all subsets of the
grid for each step, and a descent on the step. Hadamard matrices of order 12, 20 and 28 are Paley's.
"""
import json
import math
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
    """(D, sum value*moment, sum value^2*mass) of the symmetric table ±grid*step, by cells of the positive half."""
    v = [g * step for g in grid]
    edges = [0.0] + [(a + b) / 2 for a, b in zip(v, v[1:])] + [math.inf]
    d = num = den = 0.0
    for x, a, b in zip(v, edges, edges[1:]):
        pa, pb = phi(a), (phi(b) if b < math.inf else 0.0)
        ta, tb = tail(a), (tail(b) if b < math.inf else 0.0)
        mass, first = ta - tb, pa - pb
        second = mass + a * pa - (b * pb if b < math.inf else 0.0)
        d += second - 2 * x * first + x * x * mass
        num += first * x / step
        den += mass * (x / step) ** 2
    return 2 * d, num, den


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


def best_subset(levels, step, points=128):
    """Exact optimum over all ways to choose `levels` of the grid (n+½)·step, n < points, for a given step."""
    v = (np.arange(points) + 0.5) * step
    x = np.arange(2 * points) * step / 2   # 0, grid points (odd) and every midpoint (i+j+1)/2
    pdf = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
    t = np.array([tail(y) for y in x])
    # Tail integrals of 1, x, x^2 from x to infinity.
    m0, m1, m2 = t, pdf, t + x * pdf

    def segment(i, a, b):                  # integral of (x - v_i)^2 pdf between half-steps a and b (b None: infinity)
        part = lambda m: m[a] - (m[b] if b is not None else 0.0)
        return part(m2) - 2 * v[i] * part(m1) + v[i] ** 2 * part(m0)

    i = np.arange(points)
    row, col = i[:, None], i[None, :]
    mid = row + col + 1
    pair = segment(row, 2 * row + 1, mid) + segment(col, mid, 2 * col + 1)
    pair[np.tril_indices(points)] = np.inf
    cost = segment(i, np.zeros(points, int), 2 * i + 1)
    back = []
    for _ in range(levels - 1):
        total = cost[:, None] + pair
        back.append(total.argmin(axis=0))
        cost = total.min(axis=0)
    cost = cost + segment(i, 2 * i + 1, None)
    j = int(cost.argmin())
    d, chosen = 2 * float(cost[j]), [j]
    for b in reversed(back):
        j = int(b[j])
        chosen.append(j)
    return d, chosen[::-1]


def grid_table(bits, outer):
    """Best n_i and step: the exact subset at 4001 steps that put n = 127 at 0.7..1.7 of the Lloyd-Max outer level, then the step."""
    steps = outer / 127.5 * np.linspace(0.7, 1.7, 4001)
    scan = sorted((*best_subset(2 ** (bits - 1), s), s) for s in steps)
    best = None
    for d, n, s in scan[:20]:
        grid = [x + 0.5 for x in n]
        step = best_step(grid, 0.99 * s, 1.01 * s)
        d = cell_sums(grid, step)[0]
        if best is None or d < best[0]:
            best = (d, n, step)
    return best[1], best[2]


def uniform_table(bits):
    n = list(range(2 ** (bits - 1)))
    return n, best_step([x + 0.5 for x in n], 1.0 / len(n), 8.0 / len(n))


def f32(x):
    return float(np.float32(x))


def solve_tables(exact):
    known = {2: ([35, 118], 0.012745, None), 3: ([12, 38, 68, 109], 0.019647, None),
             4: ([5, 16, 27, 39, 52, 67, 86, 114], 0.023884, 0.0095053)}
    bound = {2: 1.001, 3: 1.001, 4: 1.001, 5: 1.005, 6: 1.029}
    tables = []
    for bits in range(2, 9):
        c, optimum = exact[bits]
        n, step = grid_table(bits, c[-1]) if bits <= 6 else uniform_table(bits)
        step32 = f32(step)
        d = cell_sums([x + 0.5 for x in n], step32)[0]
        if bits in known:
            kn, ks, kd = known[bits]
            assert n == kn and abs(step / ks - 1) < 3e-4, (bits, n, step)
            assert kd is None or abs(d - kd) < 6e-8, (bits, d)
        if bits in bound:
            assert d / optimum < bound[bits], (bits, d / optimum)
        assert all(x < y for x, y in zip(n, n[1:])) and 0 <= n[0] and n[-1] <= 127
        tables.append({"bits": bits, "n_positive": n, "n_all": [-1 - x for x in reversed(n)] + n,
                       "step": step32, "step_bits": "0x%08x" % np.float32(step32).view(np.uint32),
                       "step_float64": step, "D": d, "D_lloyd_max": optimum, "ratio": d / optimum})
        print("bits %d  n %s  step %.9g  D %.8g  ratio %.6f" % (bits, n if bits < 7 else "0..%d" % n[-1], step32, d, d / optimum))
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
    def short(x):                          # one line per innermost list
        text = json.dumps(x, indent=1)
        import re
        return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m.group(1)) + "]", text)
    (HERE / name).write_text(short(obj) + "\n")


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
                 "Bits 2..6: optimum over every subset of n = 0..127 and every step. Bits 7, 8: all n, optimal step.",
        "tables": solve_tables(exact)})


if __name__ == "__main__":
    main()

// Cases of kv_rotate, kv_encode, kv_decode and kv_repack.
#include <algorithm>
#include <cmath>
#include <map>

#include "cases/builders.h"
#include "cases/delta_inputs.h"
#include "cases/kv_inputs.h"
#include "common/kv_index.h"
#include "core/limits.h"

namespace weft::cases {
namespace {

// Codes may differ from the reference where a coordinate lies this near a boundary, in N(0,1) units: f32 cannot decide there.
constexpr double kBoundary = 1e-6;
// Roundings of two nearly equal gains may differ by a whole unit in the last place.
double gain_bound(DType dtype) { return dtype == DType::f16 ? 0x1p-10 : dtype == DType::bf16 ? 0x1p-7 : arithmetic(); }

// A row in the rotated domain, and the quantiser's input: y, and z = y sqrt(g) / |y| by gain group of g coordinates.
struct Rotated {
  std::vector<double> y, z;
};

Rotated rotated(const KvFormat& format, const Tensor& x, int64_t token, int64_t head) {
  Memory memory;
  const int64_t D = format.head_dim, g = format.gain_group;
  const Tensor row = memory.make(DType::f32, {1, 1, D}), y = memory.make(DType::f32, {1, 1, D});
  for (int64_t d = 0; d < D; ++d) {
    const double mean = format.mean.present() ? get(format.mean, head * format.mean.stride(0) + d) : 0;
    set(row, d, get(x, token * x.stride(0) + head * x.stride(1) + d) - mean);
  }
  run_op(kReference, KvRotateArgs{row, y, format, false});
  Rotated r{values(y), {}};
  r.z.resize(r.y.size());
  for (int64_t first = 0; first < D; first += g) {
    double norm = 0;
    for (int64_t d = first; d < first + g; ++d) norm += r.y[static_cast<size_t>(d)] * r.y[static_cast<size_t>(d)];
    norm = std::sqrt(norm);
    for (int64_t d = first; d < first + g; ++d)
      r.z[static_cast<size_t>(d)] =
          norm > format.tiny_norm ? r.y[static_cast<size_t>(d)] * std::sqrt(static_cast<double>(g)) / norm : 0;
  }
  return r;
}

double boundary(const KvFormat& format, size_t i) {  // between levels i - 1 and i
  return (static_cast<double>(format.codebook[i - 1]) + static_cast<double>(format.codebook[i])) / 2;
}

// The gain of the group that begins at coordinate `first`, by the formula of its GainRule, from y and the codes chosen for it.
double gain_by_rule(const KvFormat& format, const Rotated& row, const std::vector<uint8_t>& codes, size_t first) {
  double yy = 0, yc = 0, cc = 0;
  const auto g = static_cast<size_t>(format.gain_group);
  for (size_t d = first; d < first + g; ++d) {
    const double c = static_cast<double>(format.codebook[codes[d]]);
    yy += row.y[d] * row.y[d], yc += row.y[d] * c, cc += c * c;
  }
  const double root = std::sqrt(static_cast<double>(g)), rms = std::sqrt(yy) / root;
  double gain = 0;
  switch (format.gain_rule) {
    case GainRule::rms: gain = rms; break;
    case GainRule::matched: gain = cc > 0 ? std::sqrt(yy / cc) : rms; break;
    case GainRule::least_squares: gain = cc > 0 ? yc / cc : 0; break;
    case GainRule::unbiased: gain = yc > 0 ? yy / yc : 0; break;
  }
  return format.gain_units == GainUnits::unit_vector ? gain * root : gain;
}

// For each (block, row) of the cache, the last token of the call that writes it.
std::map<std::pair<int64_t, int64_t>, int64_t> writers(const KvEncodeArgs& args, const Tokens& tokens) {
  std::map<std::pair<int64_t, int64_t>, int64_t> last;
  for (int64_t n = 0; n < tokens.count; ++n)
    for (int64_t i = 0; i < tokens.length(n); ++i) {
      const int64_t t = tokens.begin(n) + i;
      const KvLocation at = locate(args.cache, n, static_cast<int64_t>(get(args.positions, t)));
      if (at.exists()) last[{at.block, at.row}] = t;
    }
  return last;
}

// One side of an encoded cache against `want` (codes and gains of the reference or of golden data), or, without `want`, against the
// formulas. Gains must follow their rule for the codes in the cache. Where those codes equal the wanted ones, the gains must also
// equal the wanted gains.
Findings compare_side(const std::string& name, const KvEncodeArgs& args, const Tokens& tokens, const Tensor& x, const KvSide& got,
                      const KvSide* want) {
  double wrong_codes = 0, gain_error = 0, wanted_gain_error = 0, wrong_values = 0;
  const KvFormat& format = got.format;
  const auto apart = [](double a, double b) {
    const double error = std::abs(a - b) / std::max(std::abs(b), 1e-20);
    return a == b ? 0 : std::isnan(error) ? INFINITY : error;
  };
  for (const auto& [where, token] : writers(args, tokens))
    for (int64_t h = 0; h < args.cache.heads(); ++h) {
      const RowContent mine = row_content(got, where.first, h, where.second);
      if (format.passthrough) {  // x itself, rounded once
        Memory own;
        const Tensor rounded = own.make(*format.passthrough, {1});
        for (size_t d = 0; d < mine.values.size(); ++d) {
          set(rounded, 0, get(x, token * x.stride(0) + h * x.stride(1) + static_cast<int64_t>(d)));
          wrong_values += mine.values[d] != get(rounded, 0) ? 1 : 0;
        }
        continue;
      }
      const Rotated row = rotated(format, x, token, h);
      std::vector<uint8_t> right;
      std::vector<double> right_gains;
      if (want) {
        const RowContent content = row_content(*want, where.first, h, where.second);
        right = content.codes;
        right_gains = content.gains;
      } else {
        for (double z : row.z) {
          uint8_t code = 0;
          for (size_t i = 1; i < size_t{1} << format.bits; ++i) code += z > boundary(format, i);
          right.push_back(code);
        }
      }
      for (size_t d = 0; d < right.size(); ++d) {
        if (mine.codes[d] == right[d]) continue;
        const size_t upper = std::max(mine.codes[d], right[d]), lower = std::min(mine.codes[d], right[d]);
        if (upper - lower != 1 || std::abs(row.z[d] - boundary(format, upper)) > kBoundary) ++wrong_codes;
      }
      for (size_t g = 0; g < mine.gains.size(); ++g) {
        const auto group = static_cast<size_t>(format.gain_group), first = g * group;
        gain_error = std::max(gain_error, apart(mine.gains[g], gain_by_rule(format, row, mine.codes, first)));
        const uint8_t* codes = mine.codes.data() + first;
        if (want && std::equal(codes, codes + group, right.data() + first))
          wanted_gain_error = std::max(wanted_gain_error, apart(mine.gains[g], right_gains[g]));
      }
    }
  if (format.passthrough) return {{name + " values that differ", wrong_values, 0}};
  const double bound = gain_bound(format.gain_dtype);
  Findings found{{name + " codes that differ", wrong_codes, 0}, {name + " gains by rule", gain_error, bound}};
  if (want) found.push_back({name + " gains as wanted", wanted_gain_error, 2 * bound});  // both are rounded
  return found;
}

}  // namespace

Findings compare_encoded(const Tokens& tokens, const KvEncodeArgs& got, const KvEncodeArgs* want) {
  Memory own;
  const KvCache mine = as_rows(own, got.cache), right = want ? as_rows(own, want->cache) : mine;
  Findings all;
  if (got.k.present()) all = compare_side("k", got, tokens, got.k, mine.k, want ? &right.k : nullptr);
  if (got.v.present())
    for (Finding& finding : compare_side("v", got, tokens, got.v, mine.v, want ? &right.v : nullptr))
      all.push_back(std::move(finding));
  return all;
}

// Options: T, H, D, dtype, inverse=1, inplace=1, padded=1, and those of a format (kbits, rotation, seed).
std::unique_ptr<Problem> build_kv_rotate(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<KvRotateArgs>>();
  Memory& memory = problem->memory();
  KvRotateArgs& args = problem->args;
  const int64_t T = options.integer("T", 5), H = options.integer("Hk", 2, 1), D = options.integer("D", 64, 8, kMaxHeadDim);
  const DType dtype = options.dtype("dtype", DType::f32);
  const bool padded = options.flag("padded"), inplace = options.flag("inplace");
  args.inverse = options.flag("inverse");
  args.format = make_format(options, memory, rng, 'k', H, D);
  args.x = padded ? memory.make_padded(dtype, {T, H, D}, 3) : memory.make(dtype, {T, H, D});
  args.y = inplace ? args.x : memory.make(dtype, {T, H, D});
  fill_normal(args.x, rng);
  const Bar bar = small_op(dtype, args.y.elements());
  problem->output(
      "y", [](KvRotateArgs& a) -> Tensor& { return a.y; }, bar);
  problem->work = traffic(args);
  problem->work.flops = static_cast<double>(args.x.elements()) * std::log2(static_cast<double>(D));
  problem->second = [p = problem.get(), bar](const KvRotateArgs& result) {
    Memory own;
    const Tensor back = own.make(DType::f32, {result.y.size(0), result.y.size(1), result.y.size(2)});
    run_op(kReference, KvRotateArgs{result.y, back, p->args.format, !p->args.inverse});
    return Findings{{"y, rotated back", relative_rms(back, p->args.x), bar.f32}};
  };
  return problem;
}

// Options: T (new tokens of each sequence), N, lens, start (position of the first), dtype, sides=both|k|v, spread (of the values),
// gap (elements between rows), and those of a cache.
std::unique_ptr<Problem> build_kv_encode(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<KvEncodeArgs>>();
  Memory& memory = problem->memory();
  KvEncodeArgs& args = problem->args;
  const Tokens tokens = make_tokens(options, memory, 5, 1);
  const int64_t start = options.integer("start", 0, -1000);
  const DType dtype = options.dtype("dtype", DType::f32);
  const std::string sides = options.choice("sides", "both", {"both", "k", "v"});
  const double spread = options.real("spread", 1);
  const int64_t gap = options.integer("gap", 0, 0);
  const KvSetting setting = make_cache(options, memory, rng, tokens.count, std::max<int64_t>(start + tokens.longest, 1));
  args.cache = setting.cache;
  args.sequences = tokens.sequences;
  std::vector<int64_t> positions(static_cast<size_t>(tokens.total), -1);
  for (int64_t n = 0; n < tokens.count; ++n)
    for (int64_t i = 0; i < tokens.length(n); ++i) positions[static_cast<size_t>(tokens.begin(n) + i)] = start + i;
  args.positions = memory.indices(positions);
  if (sides != "v") args.k = memory.make_padded(dtype, {tokens.total, setting.Hk, setting.Dk}, gap);
  if (sides != "k") args.v = memory.make_padded(dtype, {tokens.total, setting.Hk, setting.Dv}, gap);
  for (const Tensor* x : {&args.k, &args.v})
    if (x->present()) fill_normal(*x, rng, spread);
  problem->exact_output("cache.k.codes", [](KvEncodeArgs& a) -> Tensor& { return a.cache.k.codes; });
  problem->exact_output("cache.v.codes", [](KvEncodeArgs& a) -> Tensor& { return a.cache.v.codes; });
  if (args.cache.k.gains.present())
    problem->exact_output("cache.k.gains", [](KvEncodeArgs& a) -> Tensor& { return a.cache.k.gains; });
  if (args.cache.v.gains.present())
    problem->exact_output("cache.v.gains", [](KvEncodeArgs& a) -> Tensor& { return a.cache.v.gains; });

  problem->compare_as = [tokens](const Stream&, const KvEncodeArgs& got, const KvEncodeArgs& want) {
    return compare_encoded(tokens, got, &want);
  };
  problem->second = [tokens](const KvEncodeArgs& result) { return compare_encoded(tokens, result, nullptr); };
  problem->work.read_bytes = bytes_of(args.k) + bytes_of(args.v);
  problem->work.written_bytes = cache_bytes(args.cache, static_cast<double>(tokens.total));
  for (const Tensor* x : {&args.k, &args.v})
    if (x->present()) problem->work.flops += static_cast<double>(x->elements()) * (std::log2(static_cast<double>(x->size(2))) + 6);
  return problem;
}

// Options: context (tokens of each sequence), N, lengths=3:0:7, T (the newest T tokens of each sequence are decoded), astray=1
// (some positions have no row), dtype, domain=original|rotated, sides, and those of a cache.
std::unique_ptr<Problem> build_kv_decode(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<KvDecodeArgs>>();
  Memory& memory = problem->memory();
  KvDecodeArgs& args = problem->args;
  const Tokens tokens = make_tokens(options, memory, 7, 1);
  std::vector<int64_t> lengths = options.list("lengths");
  const int64_t context = options.integer("context", lengths.empty() ? 20 : *std::max_element(lengths.begin(), lengths.end()));
  if (lengths.empty()) lengths.assign(static_cast<size_t>(tokens.count), context);
  if (static_cast<int64_t>(lengths.size()) != tokens.count) throw OptionError("option lengths needs one number per sequence");
  const DType dtype = options.dtype("dtype", DType::f32);
  const std::string sides = options.choice("sides", "both", {"both", "k", "v"});
  const bool astray = options.flag("astray");  // also ask for positions without a row
  args.domain = options.choice("domain", "original", {"original", "rotated"}) == "rotated" ? KvDomain::rotated : KvDomain::original;
  KvSetting setting = make_cache(options, memory, rng, tokens.count, context);
  fill_cache(setting, memory, rng, lengths);
  args.cache = setting.cache;
  args.sequences = tokens.sequences;
  std::vector<int64_t> positions(static_cast<size_t>(tokens.total), 0);
  for (int64_t n = 0; n < tokens.count; ++n)
    for (int64_t i = 0; i < tokens.length(n); ++i) {
      const int64_t newest = lengths[static_cast<size_t>(n)] - tokens.length(n) + i;
      positions[static_cast<size_t>(tokens.begin(n) + i)] = astray && i % 3 == 1 ? (i % 2 ? -5 : int64_t{1} << 30) : newest;
    }
  if (astray && args.cache.kind == CacheKind::ring) throw OptionError("option astray: a ring has a row for every position");
  args.positions = memory.indices(positions);
  if (sides != "v") args.k = memory.make(dtype, {tokens.total, setting.Hk, setting.Dk});
  if (sides != "k") args.v = memory.make(dtype, {tokens.total, setting.Hk, setting.Dv});
  const Bar bar = small_op(dtype, 0);
  if (args.k.present())
    problem->output(
        "k", [](KvDecodeArgs& a) -> Tensor& { return a.k; }, bar);
  if (args.v.present())
    problem->output(
        "v", [](KvDecodeArgs& a) -> Tensor& { return a.v; }, bar);
  problem->work.read_bytes = cache_bytes(args.cache, static_cast<double>(tokens.total));
  problem->work.written_bytes = bytes_of(args.k) + bytes_of(args.v);
  problem->work.flops =
      static_cast<double>(args.k.elements() + args.v.elements()) * (std::log2(static_cast<double>(setting.Dk)) + 2);
  problem->second = [tokens, bar](const KvDecodeArgs& result) {
    Memory own;
    const KvCache rows = as_rows(own, result.cache);
    Findings findings;
    for (const auto& [name, x, side] : {std::tuple{"k, by formula", &result.k, &rows.k}, {"v, by formula", &result.v, &rows.v}}) {
      if (!x->present()) continue;
      const KvFormat& format = side->format;
      const Tensor want = own.make(DType::f32, {x->size(0), x->size(1), x->size(2)});
      fill(want, 0);
      std::vector<std::pair<int64_t, int64_t>> exist;  // (token, head) with a row
      for (int64_t n = 0; n < tokens.count; ++n)
        for (int64_t i = 0; i < tokens.length(n); ++i) {
          const int64_t t = tokens.begin(n) + i;
          const KvLocation at = locate(rows, n, static_cast<int64_t>(get(result.positions, t)));
          for (int64_t h = 0; at.exists() && h < x->size(1); ++h) {
            const std::vector<double> y = decoded_row(format, row_content(*side, at.block, h, at.row));
            for (int64_t d = 0; d < x->size(2); ++d)
              set(want, t * want.stride(0) + h * want.stride(1) + d, y[static_cast<size_t>(d)]);
            exist.emplace_back(t, h);
          }
        }
      if (result.domain == KvDomain::original) {
        run_op(kReference, KvRotateArgs{want, want, format, true});
        for (const auto& [t, h] : exist)
          for (int64_t d = 0; d < x->size(2) && format.mean.present(); ++d) {
            const int64_t at = t * want.stride(0) + h * want.stride(1) + d;
            set(want, at, get(want, at) + get(format.mean, h * format.mean.stride(0) + d));
          }
      }
      findings.push_back({name, relative_rms(*x, want), bar.f32});
    }
    return findings;
  };
  return problem;
}

// Options: those of a cache for `from` (full to its capacity), and to_layout, to_order, to_packing.
std::unique_ptr<Problem> build_kv_repack(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<KvRepackArgs>>();
  Memory& memory = problem->memory();
  const int64_t N = options.integer("N", 2, 0, kMaxSequences), context = options.integer("context", 70);
  KvSetting from = make_cache(options, memory, rng, N, context);
  fill_cache(from, memory, rng, std::vector<int64_t>(static_cast<size_t>(N), context));
  // The target: the same cache in another layout.
  const std::string layout = options.choice("to_layout", "tiles", {"rows", "tiles"});
  const bool lanes = options.choice("to_order", "plain", {"plain", "lanes"}) == "lanes";
  Options to_options("Hk=" + std::to_string(from.Hk) + ",Dk=" + std::to_string(from.Dk) + ",Dv=" + std::to_string(from.Dv));
  to_options.set("layout", layout);
  to_options.set("order", lanes ? "lanes" : "plain");
  to_options.set("capacity", std::to_string(from.cache.capacity()));
  for (const char* same : {"kbits", "vbits", "recipe", "seed", "rotation", "gain", "gain_type", "gain_group"})
    if (options.has(same)) to_options.set(same, options.text(same, ""));
  to_options.set("packing", options.choice("to_packing", "preset", {"preset", "dense", "byte"}));
  const int64_t blocks = from.cache.k.codes.size(0);
  KvSetting to = make_cache(to_options, memory, rng, blocks, from.cache.capacity());
  to.cache.k.format.dense_rotation = from.cache.k.format.dense_rotation;  // make_cache drew other matrices
  to.cache.v.format.dense_rotation = from.cache.v.format.dense_rotation;
  problem->args = {from.cache, to.cache};
  problem->exact_output("to.k.codes", [](KvRepackArgs& a) -> Tensor& { return a.to.k.codes; });
  problem->exact_output("to.v.codes", [](KvRepackArgs& a) -> Tensor& { return a.to.v.codes; });
  if (to.cache.k.gains.present()) problem->exact_output("to.k.gains", [](KvRepackArgs& a) -> Tensor& { return a.to.k.gains; });
  if (to.cache.v.gains.present()) problem->exact_output("to.v.gains", [](KvRepackArgs& a) -> Tensor& { return a.to.v.gains; });
  problem->work.read_bytes = problem->work.written_bytes =
      cache_bytes(from.cache, static_cast<double>(blocks * from.cache.capacity()));
  problem->second = [p = problem.get()](const KvRepackArgs& result) {
    // Repacking back must restore codes, gains and values.
    Memory own;
    const KvCache before = as_rows(own, p->args.from);
    KvCache back = as_rows(own, p->args.from);
    for (const Tensor& t : storage_of(back)) fill_bytes(t, 0);
    run_op(kReference, KvRepackArgs{result.to, back});
    double different = 0;
    const std::vector<Tensor> a = storage_of(before), b = storage_of(back);
    for (size_t i = 0; i < a.size(); ++i) different += same_bits(a[i], b[i]) ? 0 : 1;
    return Findings{{"tensors that differ after repacking back", different, 0}};
  };
  return problem;
}

}  // namespace weft::cases

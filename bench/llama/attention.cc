// Times one FLASH_ATTN_EXT of ggml's cpu backend and Weft's compressed_attention over the same f16 cache, in llama.cpp's layout: the keys
// of a token lie together, head after head.
//
//   attention BACKENDS THREADS CONTEXT QUERIES HQ HK D ROUNDS     one line: microseconds of ggml, of Weft, by turns; relative difference
//
// ggml gets a mask of zeros, as llama.cpp always passes a mask. Weft has no such argument and computes without one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "weft/weft.h"

namespace {

// With one thread, time of the processor, which other programs do not lengthen.
double seconds(int threads) {
  timespec now{};
  clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 9) return std::fputs("attention: wanted BACKENDS THREADS CONTEXT QUERIES HQ HK D ROUNDS\n", stderr), 1;
  const int threads = std::atoi(argv[2]), rounds = std::atoi(argv[8]);
  const int64_t context = std::atoll(argv[3]), T = std::atoll(argv[4]), Hq = std::atoll(argv[5]), Hk = std::atoll(argv[6]),
                D = std::atoll(argv[7]);
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  ggml_backend_load_all_from_path(argv[1]);
  ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  if (!cpu) return std::fputs("attention: ggml has no cpu backend\n", stderr), 1;
  using SetThreads = void (*)(ggml_backend_t, int);
  reinterpret_cast<SetThreads>(ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)),
                                                                 "ggml_backend_set_n_threads"))(cpu, threads);

  // q [D, T, Hq] (a permuted [D, Hq, T]), k and v [D, context, Hk] (permuted [D, Hk, context])
  ggml_context* ctx = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
  ggml_tensor* q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, D, Hq, T);
  ggml_tensor* k = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, D, Hk, context);
  ggml_tensor* v = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, D, Hk, context);
  ggml_tensor* mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, context, T);
  ggml_tensor* out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
                                         ggml_permute(ctx, v, 0, 2, 1, 3), mask, scale, 0, 0);
  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, out);
  ggml_backend_alloc_ctx_tensors(ctx, cpu);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  auto* queries = static_cast<float*>(q->data);
  for (int64_t i = 0; i < ggml_nelements(q); ++i) queries[i] = normal(rng);
  for (ggml_tensor* side : {k, v}) {
    auto* numbers = static_cast<ggml_fp16_t*>(side->data);
    for (int64_t i = 0; i < ggml_nelements(side); ++i) numbers[i] = ggml_fp32_to_fp16(normal(rng));
  }
  std::fill_n(static_cast<ggml_fp16_t*>(mask->data), context * T, ggml_fp32_to_fp16(0));

  weft::CompressedAttentionArgs args;
  args.queries.q = weft::dense(q->data, weft::DType::f32, {T, Hq, D});
  args.queries.scale = scale;
  args.mask.causal = false;
  args.cache.k.format = args.cache.v.format = weft::kv_format("f16", D);
  const auto side = [&](ggml_tensor* t) {
    weft::Tensor made = weft::dense(t->data, weft::DType::f16, {1, Hk, context, D});
    made.strides[1] = D;
    made.strides[2] = Hk * D;
    return made;
  };
  args.cache.k.codes = side(k);
  args.cache.v.codes = side(v);
  const int32_t length = static_cast<int32_t>(context);
  args.cache.lengths = weft::dense(&length, weft::DType::i32, {1});
  std::vector<float> o(static_cast<size_t>(T * Hq * D));
  args.o = weft::dense(o.data(), weft::DType::f32, {T, Hq, D});
  const weft::Stream stream{.threads = threads, .whole_team = true};
  weft::Memory scratch;
  scratch.at_least(weft::scratch_bytes(stream, args));

  std::vector<double> theirs, ours;
  for (int round = 0; round <= rounds; ++round) {
    const double begun = seconds(threads);
    ggml_backend_graph_compute(cpu, graph);
    const double between = seconds(threads);
    weft::compressed_attention(stream, args, scratch.at_least(0));
    if (round == 0) continue;  // touches the memory
    theirs.push_back(between - begun);
    ours.push_back(seconds(threads) - between);
  }
  double error = 0, size = 0;
  const auto* wanted = static_cast<const float*>(out->data);
  for (size_t i = 0; i < o.size(); ++i) {
    error += std::pow(o[i] - wanted[i], 2);
    size += std::pow(wanted[i], 2);
  }
  std::printf(
      "{\"threads\": %d, \"context\": %lld, \"queries\": %lld, \"Hq/Hk/D\": \"%lld/%lld/%lld\", \"ggml_us\": %.1f, \"weft_us\": "
      "%.1f, \"difference\": %.1e}\n",
      threads, static_cast<long long>(context), static_cast<long long>(T), static_cast<long long>(Hq), static_cast<long long>(Hk),
      static_cast<long long>(D), median(theirs) * 1e6, median(ours) * 1e6, std::sqrt(error / size));
}

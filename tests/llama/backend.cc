// Compares nodes of ggml on libggml-weft.so with the same nodes on ggml's cpu backend. Checks which nodes the plug-in refuses, and
// how it handles failures, threads and memory.
//
//   backend BACKENDS forms      nodes of many shapes, for the library of the tests, which takes them all
//   backend BACKENDS limits     refusals, failures, threads and memory
//
// GGML_BACKEND_PATH names the plug-in. Prints one line per failed check, and at the end "N checks passed, N failed".
#include <dirent.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

// Allocations of the whole process. The plug-in's allocations are included, because it calls these replaced functions.
static std::atomic<long> allocations{0};
void* operator new(size_t bytes) {
  ++allocations;
  if (void* data = std::malloc(bytes ? bytes : 1)) return data;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  ++allocations;
  const auto to = static_cast<size_t>(alignment);
  if (void* data = std::aligned_alloc(to, (bytes + to - 1) / to * to)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }

namespace {

int passed = 0, failed = 0;
std::mt19937 rng(1);

void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED: %s\n", what.c_str());
}

// A graph of one node and its leaves, in memory of its own.
class Graph {
 public:
  Graph() : ctx_(ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {}
  ~Graph() {
    ggml_backend_buffer_free(buffer_);
    ggml_free(ctx_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  ggml_context* ctx() { return ctx_; }
  // Allocates everything and fills the leaves with numbers that `number` draws.
  void build(ggml_tensor* node, ggml_backend_t backend, const std::function<float(const ggml_tensor*)>& number) {
    graph_ = ggml_new_graph(ctx_);
    ggml_build_forward_expand(graph_, node);
    buffer_ = ggml_backend_alloc_ctx_tensors(ctx_, backend);
    for (ggml_tensor* t = ggml_get_first_tensor(ctx_); t; t = ggml_get_next_tensor(ctx_, t)) {
      if (t->op != GGML_OP_NONE || t->view_src || t->type != GGML_TYPE_F32) continue;
      auto* data = static_cast<float*>(t->data);
      for (int64_t i = 0; i < ggml_nelements(t); ++i) data[i] = number(t);
    }
  }
  ggml_status run(ggml_backend_t backend) { return ggml_backend_graph_compute(backend, graph_); }
  std::vector<float> run(ggml_backend_t backend, ggml_tensor* node) {
    std::memset(node->data, 0, ggml_nbytes(node));
    if (run(backend) != GGML_STATUS_SUCCESS) return {};
    const auto* data = static_cast<const float*>(node->data);
    return {data, data + ggml_nelements(node)};
  }

 private:
  ggml_context* ctx_;
  ggml_cgraph* graph_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
};

struct Backends {
  ggml_backend_t cpu, weft;
  ggml_backend_dev_t device;
};

void set_threads(ggml_backend_t backend, int threads) {
  using Set = void (*)(ggml_backend_t, int);
  const ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  reinterpret_cast<Set>(ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"))(backend, threads);
}

// The error measure and the bar of llama.cpp's op tests.
bool agree(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return false;
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return !a.empty() && a.size() == b.size() && error <= 1e-7 * size;
}

// ---- GATED_DELTA_NET

struct Rule {
  int64_t S = 128, Hk = 2, repeat = 2, T = 1, N = 1, K = 1;
  bool per_channel = false;
  enum Layout { dense, permuted, packed, shared_keys } layout = dense;

  std::string text() const {
    static const char* const names[] = {"dense", "permuted", "packed", "shared keys"};
    return "S=" + std::to_string(S) + " Hk=" + std::to_string(Hk) + " Hv=" + std::to_string(Hk * repeat) +
           " T=" + std::to_string(T) + " N=" + std::to_string(N) + " K=" + std::to_string(K) +
           (per_channel ? " per channel " : " ") + names[layout];
  }
};

ggml_tensor* make_rule(ggml_context* ctx, const Rule& r) {
  const int64_t Hv = r.Hk * r.repeat, row = (2 * r.Hk + Hv) * r.S;
  ggml_tensor* rows = r.layout == Rule::packed ? ggml_new_tensor_3d(ctx, GGML_TYPE_F32, row, r.T, r.N) : nullptr;
  if (rows) ggml_set_name(rows, "k");  // all numbers then have the range of keys
  const auto make = [&](const char* name, int64_t heads, int64_t N, int64_t first) {
    ggml_tensor* t = nullptr;
    if (rows)
      t = ggml_view_4d(ctx, rows, r.S, heads, r.T, N, static_cast<size_t>(r.S) * 4, rows->nb[1], rows->nb[2],
                       static_cast<size_t>(first) * 4);
    else if (r.layout == Rule::permuted)
      t = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, r.S, r.T, heads, N);
    else
      t = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, r.S, heads, r.T, N);
    ggml_set_name(t, name);
    return r.layout == Rule::permuted ? ggml_permute(ctx, t, 0, 2, 1, 3) : t;
  };
  const int64_t of_keys = r.layout == Rule::shared_keys ? 1 : r.N;
  ggml_tensor* q = make("q", r.Hk, of_keys, 0);
  ggml_tensor* k = make("k", r.Hk, of_keys, r.Hk * r.S);
  ggml_tensor* v = make("v", Hv, r.N, 2 * r.Hk * r.S);
  ggml_tensor* g = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, r.per_channel ? r.S : 1, Hv, r.T, r.N);
  ggml_tensor* beta = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, Hv, r.T, r.N);
  ggml_tensor* state = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, r.S, r.S, Hv, r.N);
  ggml_set_name(g, "g");
  ggml_set_name(beta, "beta");
  return ggml_gated_delta_net(ctx, q, k, v, g, beta, state, r.K);
}

float draw(const ggml_tensor* t) {
  const float unit = std::uniform_real_distribution<float>(0, 1)(rng);
  if (std::strcmp(t->name, "g") == 0) return -3 * unit * unit;
  if (std::strcmp(t->name, "beta") == 0) return unit;
  const float normal = std::normal_distribution<float>()(rng);
  if (std::strcmp(t->name, "k") == 0 || std::strcmp(t->name, "q") == 0) return 0.8f * normal / std::sqrt(128.0f);  // shorter than 1
  return normal;
}

void compare_rule(const Backends& b, const Rule& r) {
  Graph graph;
  ggml_tensor* node = make_rule(graph.ctx(), r);
  if (!ggml_backend_dev_supports_op(b.device, node)) return check(false, "GATED_DELTA_NET " + r.text() + " is not taken");
  graph.build(node, b.cpu, draw);
  const std::vector<float> wanted = graph.run(b.cpu, node);
  for (int threads : {1, 2}) {
    set_threads(b.weft, threads);
    check(agree(graph.run(b.weft, node), wanted), "GATED_DELTA_NET " + r.text() + ", " + std::to_string(threads) + " threads");
  }
}

void compare_rules(const Backends& b) {
  for (auto layout : {Rule::dense, Rule::permuted, Rule::packed, Rule::shared_keys})
    for (bool per_channel : {false, true})
      for (int64_t N : {1, 3})
        for (int64_t T : {1, 2, 8, 9, 17, 70})
          for (int64_t K : {1, 3, 9})
            compare_rule(b, {.S = 64, .T = T, .N = N, .K = K, .per_channel = per_channel, .layout = layout});
  for (int64_t S : {1, 7, 16, 33, 128, 256})
    for (int64_t T : {1, 20}) compare_rule(b, {.S = S, .Hk = 3, .repeat = 1, .T = T, .N = 2, .K = 2});
  compare_rule(b, {.Hk = 16, .repeat = 2, .T = 65});
  compare_rule(b, {.Hk = 1, .repeat = 8, .T = 130, .K = 4});
}

// ---- SSM_CONV

void compare_convs(const Backends& b) {
  for (bool silu : {false, true})
    for (int64_t W : {2, 3, 4, 8})
      for (int64_t C : {1, 20, 600})
        for (int64_t T : {4, 5, 6, 7, 37, 130})
          for (int64_t N : {1, 3}) {
            Graph graph;
            ggml_tensor* x = ggml_new_tensor_3d(graph.ctx(), GGML_TYPE_F32, W - 1 + T, C, N);
            ggml_tensor* weight = ggml_new_tensor_2d(graph.ctx(), GGML_TYPE_F32, W, C);
            ggml_tensor* node = ggml_ssm_conv(graph.ctx(), x, weight);
            const std::string text = "SSM_CONV W=" + std::to_string(W) + " C=" + std::to_string(C) + " T=" + std::to_string(T) +
                                     " N=" + std::to_string(N) + (silu ? " silu" : "");
            if (silu) node = C == 20 ? ggml_silu(graph.ctx(), node) : ggml_silu_inplace(graph.ctx(), node);
            if (!ggml_backend_dev_supports_op(b.device, node)) {
              check(false, text + " is not taken");
              continue;
            }
            graph.build(node, b.cpu, draw);
            const std::vector<float> wanted = graph.run(b.cpu, node);
            for (int threads : {1, 2}) {
              set_threads(b.weft, threads);
              check(agree(graph.run(b.weft, node), wanted), text + ", " + std::to_string(threads) + " threads");
            }
          }
}

// ggml's allocator may give the SILU memory of the inputs of the convolution.
void reuse_inputs(const Backends& b) {
  Graph graph;
  ggml_tensor* x = ggml_new_tensor_3d(graph.ctx(), GGML_TYPE_F32, 3 + 40, 20, 2);
  ggml_tensor* node = ggml_silu(graph.ctx(), ggml_ssm_conv(graph.ctx(), x, ggml_new_tensor_2d(graph.ctx(), GGML_TYPE_F32, 4, 20)));
  graph.build(node, b.cpu, draw);
  const std::vector<float> wanted = graph.run(b.cpu, node);
  node->data = static_cast<float*>(x->data) + 20;
  check(graph.run(b.weft) == GGML_STATUS_SUCCESS, "a SILU in the memory of the inputs fails");
  const auto* data = static_cast<const float*>(node->data);
  check(agree({data, data + ggml_nelements(node)}, wanted), "a SILU in the memory of the inputs is wrong");
}

// ---- what is refused

void refuse(const Backends& b) {
  const auto taken = [&](const char* what, bool wanted, const std::function<ggml_tensor*(ggml_context*)>& make) {
    Graph graph;
    check(ggml_backend_dev_supports_op(b.device, make(graph.ctx())) == wanted,
          std::string(what) + (wanted ? " is refused" : " is taken"));
  };
  taken("S = 257", false, [](ggml_context* ctx) { return make_rule(ctx, {.S = 257, .T = 2}); });
  taken("S = 256", true, [](ggml_context* ctx) { return make_rule(ctx, {.S = 256, .T = 2}); });
  const auto changed = [&](const char* what, const std::function<void(ggml_tensor*)>& change) {
    taken(what, false, [&](ggml_context* ctx) {
      ggml_tensor* node = make_rule(ctx, {.T = 4, .N = 2});
      change(node);
      return node;
    });
  };
  taken("one token of 32 heads", true, [](ggml_context* ctx) { return make_rule(ctx, {.Hk = 16}); });
  taken("one token of 16 heads", false, [](ggml_context* ctx) { return make_rule(ctx, {.Hk = 8}); });
  taken("one token of 16 heads in two sequences", true, [](ggml_context* ctx) { return make_rule(ctx, {.Hk = 8, .N = 2}); });
  taken("two tokens of 16 heads", true, [](ggml_context* ctx) { return make_rule(ctx, {.Hk = 8, .T = 2}); });
  taken("the rule itself", true, [](ggml_context* ctx) { return make_rule(ctx, {.T = 4, .N = 2}); });
  changed("f16 keys", [](ggml_tensor* n) { n->src[1]->type = GGML_TYPE_F16; });
  changed("no snapshots", [](ggml_tensor* n) { n->op_params[0] = 0; });
  changed("more snapshots than the output has room for", [](ggml_tensor* n) { n->op_params[0] = 2; });
  changed("no state", [](ggml_tensor* n) { n->src[5] = nullptr; });
  changed("key heads that do not divide value heads", [](ggml_tensor* n) { n->src[0]->ne[1] = n->src[1]->ne[1] = 3; });
  changed("fewer queries than keys", [](ggml_tensor* n) { n->src[0]->ne[1] = 1; });
  changed("fewer tokens of gates", [](ggml_tensor* n) { n->src[3]->ne[2] = 3; });
  changed("rows of strided numbers", [](ggml_tensor* n) { n->src[2]->nb[0] = 8; });
  changed("unaligned rows", [](ggml_tensor* n) { n->src[2]->nb[1] = 514; });
  const auto conv = [](ggml_context* ctx, int64_t W, int64_t C, int64_t T = 4) {
    return ggml_ssm_conv(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, W - 1 + T, C, 1),
                         ggml_new_tensor_2d(ctx, GGML_TYPE_F32, W, C));
  };
  taken("a convolution of 4 tokens", true, [&](ggml_context* ctx) { return conv(ctx, 4, 5); });
  taken("a convolution of 3 tokens", false, [&](ggml_context* ctx) { return conv(ctx, 4, 5, 3); });
  taken("a convolution of 8 taps", true, [&](ggml_context* ctx) { return conv(ctx, 8, 5); });
  taken("a convolution of 9 taps", false, [&](ggml_context* ctx) { return conv(ctx, 9, 5); });
  taken("a SILU of something else", false,
        [](ggml_context* ctx) { return ggml_silu(ctx, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 8)); });
  taken("a GELU of a convolution", false, [&](ggml_context* ctx) { return ggml_gelu(ctx, conv(ctx, 4, 5)); });
  taken("a matrix product", false, [](ggml_context* ctx) {
    return ggml_mul_mat(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 8, 8), ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 8, 8));
  });
  taken("attention", false, [](ggml_context* ctx) {
    ggml_tensor* kv = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 64, 32, 2);
    return ggml_flash_attn_ext(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, 1, 2), kv, kv, nullptr, 1, 0, 0);
  });
}

// ---- failures, threads, memory

void fail_politely(const Backends& b) {
  Graph graph;
  ggml_tensor* x = ggml_new_tensor_1d(graph.ctx(), GGML_TYPE_F32, 8);
  graph.build(ggml_add(graph.ctx(), x, x), b.cpu, draw);
  check(graph.run(b.weft) == GGML_STATUS_FAILED, "a graph with ADD does not fail");
  Graph other;
  ggml_tensor* node = make_rule(other.ctx(), {.T = 4});
  other.build(node, b.cpu, draw);
  node->src[0]->nb[1] += 2;  // what supports_op() would have refused
  check(other.run(b.weft) == GGML_STATUS_FAILED, "a graph with unaligned queries does not fail");
}

int threads_of_process() {
  int count = 0;
  if (DIR* folder = opendir("/proc/self/task")) {
    while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
    closedir(folder);
  }
  return count;
}

void keep_threads_and_memory(const Backends& b) {
  Graph graph;
  ggml_tensor* node = make_rule(graph.ctx(), {.Hk = 16, .T = 200});
  graph.build(node, b.cpu, draw);
  const int before = threads_of_process();
  set_threads(b.weft, 1);
  graph.run(b.weft);
  check(threads_of_process() == before, "a backend of one thread starts others");
  for (int threads : {1, 2}) {
    set_threads(b.weft, threads);
    graph.run(b.weft);
    const long first = allocations;
    for (int i = 0; i < 5; ++i) graph.run(b.weft);
    const long more = allocations - first;
    check(more == 0, std::to_string(more) + " allocations in five calls with " + std::to_string(threads) + " threads");
  }
  check(threads_of_process() <= before + 1, "a backend of two threads has " + std::to_string(threads_of_process()) + " threads");
  set_threads(b.cpu, 2);
  for (int i = 0; i < 5; ++i) {
    graph.run(b.cpu);
    graph.run(b.weft);
  }
  set_threads(b.cpu, 1);
  check(threads_of_process() <= before + 1,
        "ggml and Weft have " + std::to_string(threads_of_process()) + " threads instead of two together");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc == 3 ? argv[2] : "";
  if (part != "forms" && part != "limits") return std::fputs("backend: wanted BACKENDS and forms or limits\n", stderr), 2;
  ggml_backend_load_all_from_path(argv[1]);
  Backends b{};
  b.device = ggml_backend_dev_by_name("Weft");
  if (!b.device) return std::fputs("backend: GGML_BACKEND_PATH brought no device Weft\n", stderr), 2;
  b.weft = ggml_backend_dev_init(b.device, nullptr);
  b.cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  set_threads(b.cpu, 1);
  if (part == "limits") {
    keep_threads_and_memory(b);  // first: ggml's own loops start threads
    refuse(b);
    fail_politely(b);
  } else {
    compare_rules(b);
    compare_convs(b);
    reuse_inputs(b);
  }
  ggml_backend_free(b.weft);
  ggml_backend_free(b.cpu);
  std::printf("%d checks passed, %d failed\n", passed, failed);
  return failed != 0;
}

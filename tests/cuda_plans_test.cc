// Every plan of the cuda backend fits its device. No device is needed: the CUDA runtime is pretended (support/pretended_cuda.h).
//
// Legal calls of every op are planned and launched on pretended devices of compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0. Each launch
// must fit the device: dynamic plus static shared memory, the limit that the library raised for the kernel, threads against
// __launch_bounds__, registers (sm_90a), and launch attributes that only code for Hopper may have. Static shared memory is read from the
// PTX and the machine code in this program. What a call may look like comes from three sources:
//   every case of the table, with at most 8 sequences and 130 tokens,
//   random draws from the options of each op, with head sizes and recipes over the whole legal domain,
//   random changes of those arguments, as random_args_test makes them.
// Calls that supports() refuses are not launched. The GEMMs of the model runner are launched over all row lengths that they support.
// Not covered: whether a kernel computes the right thing, and cuBLASLt.
//
//   cuda_plans_test [--portable]     plans of a build that has only PTX for sm_80
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>

#include "cases/options.h"
#include "cases/table.h"
#include "common/conventions.h"
#include "core/check.h"
#include "model/network/cuda/gemm.h"
#include "tests/support/pretended_cuda.h"
#include "tests/support/random_args.h"

namespace weft::tests {
namespace {

// Most refusals of a launch are faults. Grids that no device has are refused by the launch, in a sentence.
bool refused_rightly(const Error& error) { return error.status().code == Code::unsupported; }

struct Counts {
  int64_t calls = 0, launched = 0;
};

std::string first_faults() {
  std::string text;
  for (const std::string& fault : pretended_cuda().faults) text += "  " + fault + "\n";
  pretended_cuda().faults.clear();
  return text;
}

// Plans and launches a call on every device that supports it.
template <class Args>
Counts launch_everywhere(const Args& args, const std::string& what) {
  Counts counts;
  for (size_t device = 0; device < pretended_devices().size(); ++device) {
    Stream stream{Backend::cuda};
    stream.device = static_cast<int>(device);
    const Args there = cases::relabelled(args, stream);
    ++counts.calls;
    if (!supports(stream, there)) continue;
    try {
      const size_t bytes = scratch_bytes(stream, there);
      const Scratch scratch{reinterpret_cast<void*>(uintptr_t{1} << 40), bytes};  // kernels alone would touch it
      if (choose(stream, there).kernel.empty()) ADD_FAILURE() << what << ": choose() names no kernel";
      cases::launch(stream, there, scratch);
      ++counts.launched;
    } catch (const Error& error) {
      if (!refused_rightly(error)) ADD_FAILURE() << what << " on " << pretended_devices()[device].name() << ": " << error.what();
    }
  }
  if (!pretended_cuda().faults.empty()) ADD_FAILURE() << what << ":\n" << first_faults();
  return counts;
}

template <class Args>
const Args& args_of(const cases::Problem& problem) {
  return dynamic_cast<const cases::OpProblem<Args>&>(problem).args;
}

// Options of a case with long sequences and large batches made short: they change grids, not blocks.
std::string capped(const std::string& text) {
  std::string smaller;
  const cases::Options options(text);
  for (const auto& [key, value] : options.given()) {
    const int64_t cap = key == "N" ? 8 : key == "T" || key == "context" || key == "capacity" ? 130 : 0;
    if (cap > 0 && std::stoll(value) > cap) smaller += (smaller.empty() ? "" : ",") + key + "=" + std::to_string(cap);
  }
  return smaller;
}

std::unique_ptr<cases::Problem> build_small(const cases::Case& item) {
  if (!item.golden.empty()) return cases::build(item);
  try {
    return cases::build(item, capped(item.options));
  } catch (const cases::OptionError&) {  // another option wants the length
    return cases::build(item);
  }
}

// The alternatives of an option that decide what shared memory a kernel wants, over the whole legal domain.
std::string_view wide_alternatives(std::string_view op, std::string_view key) {
  const bool delta = op.starts_with("gated_delta") || op.starts_with("chunk_");
  if (key == "Dk=" && op != "delta_gates") return "1|8|16|32|40|63|64|65|72|96|100|120|128|136|192|200|255|256";
  if (key == "Dv=" && delta) return "1|8|16|17|32|33|48|64|65|100|128|129|192|256";
  if (key == "D=" && op != "l2_norm") return "8|16|24|40|64|80|96|104|112|128|160|192|256|320|448|512";
  if (key == "D=" || key == "Dv=") return "1|7|64|100|128|256|512";
  if (key == "recipe=") return "2v2|3v3|4v4|4v2|8v4|8v8|5v3|6v4|7v6|2v8|f16|bf16|f32|f16v4|f32v4|aura4v2|aura2v2";
  if (key == "kbits=" || key == "vbits=") return "2|3|4|5|6|7|8|f16|bf16|f32|aura-2|aura-4";
  if (key == "chunk=") return "16|32|64";
  if (key == "T=") return "0|1|2|16|17|64|70|130";
  if (key == "N=") return "1|2|5";
  if (key == "Hq=") return "2|4|8|16";
  if (key == "C=") return "1|7|64|1024|4096";
  if (key == "context=") return "1|9|64|130|700";
  if (key == "capacity=") return "64|192";
  if (key == "dtype=") return "f32|f16|bf16";
  return {};
}

std::string draw_options(std::string_view op, Rng& rng) {
  std::string_view grammar = cases::random_options(op);
  std::string options;
  while (!grammar.empty()) {
    const size_t end = std::min(grammar.find(','), grammar.size());
    std::string_view option = grammar.substr(0, end);
    grammar.remove_prefix(std::min(end + 1, grammar.size()));
    const std::string_view key = option.substr(0, option.find('=') + 1);
    option.remove_prefix(key.size());
    if (const std::string_view wide = wide_alternatives(op, key); !wide.empty()) option = wide;
    for (int64_t skip = rng.integer(0, std::count(option.begin(), option.end(), '|')); skip > 0; --skip)
      option.remove_prefix(option.find('|') + 1);
    options += (options.empty() ? "" : ",") + std::string(key) + std::string(option.substr(0, option.find('|')));
  }
  return options;
}

template <class Args>
void launch_cases(const std::string& op) {
  Counts all;
  for (const cases::Case& item : cases::all_cases()) {
    if (item.op != op || item.tier == cases::Tier::random) continue;
    const auto problem = build_small(item);
    const Counts counts = launch_everywhere(args_of<Args>(*problem), op + " " + item.name);
    all.calls += counts.calls, all.launched += counts.launched;
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(all.launched, all.calls / 2) << op;
}

template <class Args>
void launch_random(const std::string& op) {
  constexpr int kDraws = 120, kMutants = 2;
  Counts all;
  Rng rng(7);
  for (int draw = 0; draw < kDraws; ++draw) {
    const std::string options = draw_options(op, rng);
    std::unique_ptr<cases::Problem> problem;
    try {
      problem = cases::build({op, "random", options, cases::Tier::fast, ""});
    } catch (const cases::OptionError&) {
      continue;  // this draw does not go together
    } catch (const Error&) {
      continue;
    }
    const Args& args = args_of<Args>(*problem);
    const Counts counts = launch_everywhere(args, op + " of " + options);
    all.calls += counts.calls, all.launched += counts.launched;
    for (int mutant = 0; mutant < kMutants && !testing::Test::HasFailure(); ++mutant) {
      Args changed = args;
      Memory extra;
      Draft draft{members_of(changed), problem->memory(), extra, rng};
      for (int64_t changes = rng.integer(1, 2); changes > 0; --changes) change(draft, changed);
      launch_everywhere(changed, op + " of " + options + draft.story);
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(all.launched, kDraws) << op << " has few legal draws";
}

#define WEFT_LAUNCH_TESTS(name, Args)              \
  TEST(Cases, name) { launch_cases<Args>(#name); } \
  TEST(RandomCalls, name) { launch_random<Args>(#name); }
WEFT_FOR_EACH_OP(WEFT_LAUNCH_TESTS)
#undef WEFT_LAUNCH_TESTS

std::string prefill_kernel(int device, const char* options) {
  const auto problem = cases::build({"gated_delta_rule_prefill", "shape", options, cases::Tier::fast, ""});
  Stream stream{Backend::cuda};
  stream.device = device;
  return problem->choose(stream).kernel;
}

// Head sizes of Qwen3.5 run in chunks on every device, and on Hopper with its own kernels.
TEST(Choice, PrefillRunsInChunks) {
  for (size_t i = 0; i < pretended_devices().size(); ++i) {
    const PretendedDevice& device = pretended_devices()[i];
    const bool hopper = device.major == 9 && !pretended_cuda().portable;
    for (const char* options : {"T=130,Hk=1,Hv=2,Dk=128,Dv=128,dtype=bf16,schedule=invariant",
                                "T=130,Hk=1,Hv=2,Dk=64,Dv=64,dtype=f16,schedule=invariant"})
      EXPECT_EQ(prefill_kernel(static_cast<int>(i), options),
                std::string("cuda.gated_delta_rule_prefill.") + (hopper ? "wgmma" : "mma"))
          << device.name() << " " << options;
  }
}

// So does every other call. Where a device has too little shared memory, the plan says so.
TEST(Choice, PrefillOfEveryShapeRunsInChunks) {
  for (size_t i = 0; i < pretended_devices().size(); ++i) {
    const PretendedDevice& device = pretended_devices()[i];
    const auto kernel = [&](const std::string& options) {
      return prefill_kernel(static_cast<int>(i), ("T=130,Hv=2," + options).c_str());
    };
    for (const char* options : {"Dk=128,dtype=bf16,kda=1", "Dk=64,dtype=f16,kda=1", "Dk=256,dtype=bf16", "Dk=192,Dv=128,dtype=f16",
                                "Dk=100,dtype=bf16", "Dk=128,dtype=f32", "Dk=1,Dv=250,dtype=f32,kda=1"})
      EXPECT_EQ(kernel(options), "cuda.gated_delta_rule_prefill.staged") << device.name() << " " << options;
    if (device.shared_bytes >= 160 << 10)
      EXPECT_EQ(kernel("Dk=192,dtype=f32"), "cuda.gated_delta_rule_prefill.staged") << device.name();
    if (device.shared_bytes >= 227 << 10)
      EXPECT_EQ(kernel("Dk=256,dtype=f32"), "cuda.gated_delta_rule_prefill.staged") << device.name();
    EXPECT_EQ(prefill_kernel(static_cast<int>(i), "T=4,Hv=2,Dk=128,dtype=f32"), "cuda.gated_delta_rule_prefill.recurrent");
  }
}

// Prompts run on the kernels of Hopper there, and on no other device.
TEST(Choice, PromptsRunOnHopper) {
  const struct {
    const char *options, *kernel;
  } calls[] = {{"recipe=f16,layout=tiles,D=128,Hk=1,Hq=4,T=64", "prefill_dense"},
               {"recipe=bf16,layout=tiles,D=256,Hk=1,Hq=4,T=64", "prefill_dense"},
               {"recipe=4v4,layout=tiles,order=lanes,D=128,Hk=1,Hq=4,T=128", "prefill"},
               {"recipe=4v4,layout=tiles,order=lanes,D=128,Hk=1,Hq=4,T=129", "prefill_dense"},
               {"recipe=4v4,layout=tiles,order=lanes,D=128,Hk=1,Hq=4,T=64,schedule=invariant", "prefill_dense"},
               {"recipe=8v4,layout=tiles,order=lanes,D=256,Hk=1,Hq=4,T=24", "decode_coded"},
               {"recipe=8v4,layout=tiles,order=lanes,D=256,Hk=1,Hq=4,T=25", "prefill_dense"},
               {"recipe=5v3,D=96,Hk=1,Hq=4,T=64", "prefill_dense"},
               {"recipe=aura4v4,D=128,Hk=1,Hq=4,T=64", "decode_general"}};
  for (size_t i = 0; i < pretended_devices().size(); ++i)
    for (const auto& call : calls) {
      const PretendedDevice& device = pretended_devices()[i];
      const auto problem = cases::build({"compressed_attention", "shape", call.options, cases::Tier::fast, ""});
      Stream stream{Backend::cuda};
      stream.device = static_cast<int>(i);
      const std::string kernel = problem->choose(stream).kernel;
      if (device.major == 9 && !pretended_cuda().portable)
        EXPECT_EQ(kernel, std::string("cuda.compressed_attention.") + call.kernel) << device.name() << " " << call.options;
      else
        EXPECT_EQ(kernel.find("prefill"), std::string::npos) << device.name() << " " << call.options;
    }
}

TEST(Model, FusedProducts) {
  const auto tensor = [](DType dtype, int64_t rows, int64_t columns) {
    return dense(reinterpret_cast<void*>(uintptr_t{1} << 41), dtype, {rows, columns});
  };
  int64_t fused = 0;
  for (size_t device = 0; device < pretended_devices().size(); ++device) {
    Stream stream{Backend::cuda};
    stream.device = static_cast<int>(device);
    for (int64_t columns = 16; columns <= 4096 + 64; columns += 16)
      for (const int64_t rows : {1, 16, 17, 84})
        for (const int options : {0, 1, 2, 3}) {
          const bool swiglu = options & 1, low = options & 2;
          const Tensor x = tensor(DType::f32, rows, columns);
          if (!model::cuda::can_fuse(stream, x, swiglu, low)) continue;
          for (const int64_t outputs : {64, 8192}) {
            const int64_t matrix_rows = (swiglu ? 2 : 1) * outputs;
            const model::cuda::DeviceMatrix w{x.data, low ? x.data : nullptr, matrix_rows, columns};
            model::cuda::DeviceFusion fusion;
            fusion.swiglu = swiglu;
            if (!swiglu) fusion.gate = dense(x.data, DType::f32, {rows, 1, columns});
            model::cuda::multiply_fused(stream, w, x, fusion, tensor(DType::f32, rows, outputs));
            ++fused;
          }
        }
    for (const int64_t rows : {1, 4})
      model::cuda::multiply_few(stream, {reinterpret_cast<void*>(uintptr_t{1} << 41), nullptr, 64, 64},
                                tensor(DType::f16, rows, 64), tensor(DType::f32, rows, 64), false);
    model::cuda::multiply_tiles(stream, {reinterpret_cast<void*>(uintptr_t{1} << 41), nullptr, 64, 64}, tensor(DType::f16, 65, 64),
                                tensor(DType::f32, 65, 64), false);
  }
  EXPECT_EQ(first_faults(), "");
  EXPECT_GT(fused, 1000);
}

// Shapes of the kernels that the sources above reach by luck only.
TEST(Shapes, EveryStateDtype) {
  for (const char* op : {"gated_delta_rule_decode", "gated_delta_rule_prefill"})
    for (const char* size : {"64", "128"})
      for (const char* dtype : {"f32", "f16", "bf16"})
        for (const char* state : {"f32", "f16", "bf16"})
          for (const char* heads :
               {"T=1,Hk=2,Hv=4", "T=4,Hk=2,Hv=4", "T=130,Hk=2,Hv=2", "T=130,Hk=2,Hv=4", "T=4096,Hk=1,Hv=1,l2norm=1"}) {
            const bool decode = std::strcmp(op, "gated_delta_rule_decode") == 0;
            if (decode && std::strncmp(heads, "T=1,", 4) != 0 && std::strncmp(heads, "T=4,", 4) != 0) continue;
            if (!decode && std::strcmp(state, "f32") != 0) continue;
            const std::string options = std::string(heads) + ",Dv=128,Dk=" + size + ",dtype=" + dtype + ",state=" + state;
            const auto problem = cases::build({op, "shape", options, cases::Tier::fast, ""});
            if (decode)
              launch_everywhere(args_of<GatedDeltaRuleDecodeArgs>(*problem), op + (" of " + options));
            else
              launch_everywhere(args_of<GatedDeltaRulePrefillArgs>(*problem), op + (" of " + options));
          }
}

// A limit that no kernel fits must be noticed, or the tests above show nothing.
TEST(Pretence, SeesFaults) {
  EXPECT_GT(pretended_cuda().kernels.size(), 50u);
  const auto with_static = std::count_if(pretended_cuda().kernels.begin(), pretended_cuda().kernels.end(),
                                         [](const auto& kernel) { return kernel.second.ptx_shared > 0; });
  EXPECT_GT(with_static, 10) << "static shared memory is read from PTX";
  for (const auto& [name, kernel] : pretended_cuda().kernels)
    EXPECT_GT(kernel.most_threads, 0) << name << " has no __launch_bounds__";
}

// A kernel that nothing here launches is a kernel that nothing here checks.
TEST(Pretence, LaunchesEveryKernel) {
  const auto& kernels = pretended_cuda().kernels;
  const bool hopper =
      std::any_of(kernels.begin(), kernels.end(), [](const auto& kernel) { return kernel.second.hopper_shared >= 0; });
  if (pretended_cuda().portable || !hopper || testing::GTEST_FLAG(filter) != "*")
    GTEST_SKIP() << "a part of the calls, or a build without code for Hopper";
  for (const auto& [name, kernel] : pretended_cuda().kernels) EXPECT_TRUE(pretended_cuda().launched.contains(name)) << name;
}

class Report : public testing::Environment {
  void TearDown() override {
    const PretendedCuda& cuda = pretended_cuda();
    for (size_t i = 0; i < cuda.largest.size(); ++i)
      std::cout << pretended_devices()[i].name() << ": " << cuda.largest[i].launches << " launches, largest block "
                << cuda.largest[i].bytes << " of " << pretended_devices()[i].shared_bytes << " bytes, " << cuda.largest[i].kernel
                << "\n";
    std::cout << cuda.launched.size() << " of " << cuda.kernels.size() << " kernels launched\n";
  }
};

}  // namespace
}  // namespace weft::tests

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--portable") == 0) {
      weft::tests::pretended_cuda().portable = true;
    } else {
      std::cerr << "cuda_plans_test: unknown option '" << argv[i] << "', there is --portable\n";
      return 2;
    }
  }
  if (const std::string why = weft::tests::read_kernels(WEFT_CUOBJDUMP); !why.empty()) {
    std::cout << "cuda_plans_test: skipped, " << why << "\n";
    return 77;
  }
  testing::AddGlobalTestEnvironment(new weft::tests::Report);
  return RUN_ALL_TESTS();
}

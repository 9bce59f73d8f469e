// Random arguments for every op: each call ends in the right answer or in an Error that names operator and argument, and nothing outside
// the tensors of the call is ever touched.
//
//   random_args_test [--mutants=N] [--seed=S] [--first=I]     mutants per op, what they are drawn from, and the first one to run
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "cases/random_cases.h"
#include "cases/verify.h"
#include "core/backend.h"
#include "core/check.h"
#include "tests/support/random_args.h"

#if defined(__SANITIZE_ADDRESS__)
#define WEFT_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WEFT_TEST_ASAN 1
#endif
#endif
#ifdef WEFT_TEST_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace weft::tests {
namespace {

using cases::Image;

struct Plan {
  int64_t mutants = 1200, first = 0;
  uint64_t seed = 1;
};
Plan plan;

constexpr int64_t kMutantsOfBase = 50;  // mutants that start from the same legal arguments
constexpr size_t kMostScratch = size_t{32} << 20;

// The same arguments where no memory is: whoever touches it ends the test.
template <class Args>
Args as_ghosts(const Args& args) {
  return cases::mapped(args, [](Tensor t) {
    if (t.data) t.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) + (uintptr_t{1} << 46));
    return t;
  });
}

// A copy of all memory of a mutant to run in, out of bounds around every block.
class Sandbox {
 public:
  Sandbox(const Memory& base, const Memory& extra) : base_(base, cases::host_placement()), extra_(extra, cases::host_placement()) {
    close(true);
  }
  ~Sandbox() { close(false); }

  Tensor at(const Tensor& t) const {
    const Tensor there = base_.at(t);
    return there.data != t.data ? there : extra_.at(t);
  }
  // What a run did that it may not, or "".
  std::string misdeed(const std::vector<Tensor>& writable) {
    close(false);
    const std::string fault = cases::check_rest(base_, writable);
    return fault.empty() ? cases::check_rest(extra_, writable) : fault;
  }

 private:
  void close([[maybe_unused]] bool closed) {
#ifdef WEFT_TEST_ASAN
    for (const Image* image : {&base_, &extra_})
      for (size_t b = 0; b < image->memory().blocks().size(); ++b) {
        const Memory::Block& block = image->memory().blocks()[b];
        const uint8_t* bytes = image->bytes(b);
        if (closed) {
          ASAN_POISON_MEMORY_REGION(bytes, block.begin);
          ASAN_POISON_MEMORY_REGION(bytes + block.begin + block.size, block.total - block.begin - block.size);
        } else {
          ASAN_UNPOISON_MEMORY_REGION(bytes, block.total);
        }
      }
#endif
  }

  Image base_, extra_;
};

// Do two views share an element's bytes? By looking at every element.
bool touch(const Tensor& a, const Tensor& b) {
  std::set<uintptr_t> bytes;
  const auto visit = [](const Tensor& t, auto&& each) {
    const auto size = static_cast<uintptr_t>(dtype_bytes(t.dtype));
    cases::for_each_offset(t, [&](int64_t offset) {
      for (uintptr_t i = 0; i < size; ++i) each(reinterpret_cast<uintptr_t>(t.data) + static_cast<uintptr_t>(offset) * size + i);
    });
  };
  visit(a, [&](uintptr_t byte) { bytes.insert(byte); });
  bool found = false;
  visit(b, [&](uintptr_t byte) { found |= bytes.contains(byte); });
  return found;
}

// What validate() promises of memory: outputs are apart from all else, up to being the very view they may be.
std::string overlap(const std::vector<Member>& members) {
  for (const Member& out : members) {
    if (!out.writes || claimed_bytes(*out.tensor).value_or(0) == 0) continue;
    for (const Member& other : members) {
      const int64_t bytes = claimed_bytes(*other.tensor).value_or(0);
      if (&out == &other || bytes == 0 || same_view(*out.tensor, *other.tensor)) continue;
      const auto a = reinterpret_cast<uintptr_t>(out.tensor->data), b = reinterpret_cast<uintptr_t>(other.tensor->data);
      if (a + static_cast<uintptr_t>(*claimed_bytes(*out.tensor)) <= b || b + static_cast<uintptr_t>(bytes) <= a) continue;
      if (touch(*out.tensor, *other.tensor)) return out.name + " shares memory with " + other.name;
    }
  }
  return "";
}

// An output of the cpu against the reference's. Loose: cases with derived bounds judge numbers, this looks for wrong places and rules.
struct Verdict {
  bool comparable = true;
  std::string fault{};
};

Verdict compare(const Member& member, const Tensor& want, const Tensor& got, bool exact) {
  const Tensor& before = *member.tensor;
  const auto size = static_cast<size_t>(dtype_bytes(before.dtype));
  const auto same = [&](const Tensor& a, const Tensor& b, int64_t offset) {
    return std::memcmp(static_cast<const uint8_t*>(a.data) + static_cast<size_t>(offset) * size,
                       static_cast<const uint8_t*>(b.data) + static_cast<size_t>(offset) * size, size) == 0;
  };
  const bool is_float = before.dtype == DType::f32 || before.dtype == DType::f16 || before.dtype == DType::bf16;
  Verdict verdict;
  double error = 0, norm = 0, count = 0;
  int64_t differ = 0;
  cases::for_each_offset(before, [&](int64_t offset) {
    ++count;
    const double w = cases::get(want, offset), g = cases::get(got, offset);
    if (is_float && std::isnan(w) && !same(want, before, offset)) verdict.comparable = false;
    if (std::isfinite(w)) norm += w * w;
    if (!verdict.comparable || same(want, got, offset)) return;
    ++differ;
    if (!is_float) return;
    std::string fault;
    if (std::isnan(w)) {
      if (!std::isnan(g)) fault = " was written where the reference leaves it alone";
    } else if (w > 1e15 || (std::isfinite(w) && w < -1e15)) {
      verdict.comparable = false;
    } else if (!std::isfinite(w) || !std::isfinite(g)) {
      if (w != g) fault = " is " + std::to_string(g) + ", the reference has " + std::to_string(w);
    } else {
      error += (w - g) * (w - g);
    }
    if (!fault.empty() && verdict.fault.empty()) verdict.fault = member.name + fault;
  });
  if (!verdict.comparable) return {false, ""};
  if (!verdict.fault.empty()) return verdict;
  if (!is_float) {
    // A code may fall on the other side of a boundary, and with it the last bits of its gain.
    const int64_t allowed = exact || before.dtype != DType::u8 ? 0 : static_cast<int64_t>(count) / 8 + 2;
    if (differ > allowed) verdict.fault = member.name + " differs from the reference in " + std::to_string(differ) + " elements";
  } else if (std::sqrt(error) > 0.05 * std::sqrt(norm) + 1e-4 * std::sqrt(count)) {
    verdict.fault = member.name + " is off by " + std::to_string(std::sqrt(error)) + " of " + std::to_string(std::sqrt(norm));
  }
  return verdict;
}

// What is under way, for a report when a sanitizer ends the process.
std::string under_way;
#ifdef WEFT_TEST_ASAN
extern "C" void __ubsan_on_report();  // NOLINT: called by the sanitizer's runtime
extern "C" void __ubsan_on_report() { std::fprintf(stderr, "\nwhile running %s\n", under_way.c_str()); }
void tell_death() { std::fprintf(stderr, "\nwhile running %s\n", under_way.c_str()); }
#endif

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9E3779B97F4A7C15ull + b + 0x632BE59BD9B4E019ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  return z ^ (z >> 31);
}

template <class Args>
class Attack {
 public:
  explicit Attack(std::string op) : op_(std::move(op)), names_(argument_names<Args>()) {
    for (char letter : op_) seed_ = mixed(seed_, static_cast<uint8_t>(letter));
  }

  void run() {
    for (int64_t i = plan.first; i < plan.first + plan.mutants; ++i) {
      if (!base_ || i % kMutantsOfBase == 0) {
        Rng rng(mixed(seed_, static_cast<uint64_t>(i / kMutantsOfBase)));
        cases::RandomDraw drawn = cases::draw_call(op_, rng, cases::draw_options);
        options_ = std::move(drawn.options);
        base_ = std::move(drawn.problem);
      }
      Rng rng(mixed(mixed(seed_, 77), static_cast<uint64_t>(i)));
      fault_.clear();
      examine(i, rng);
      if (fault_.empty()) continue;
      ADD_FAILURE() << fault_ << "\n  in " << under_way;
      if (++faults_ == 5) return;
    }
    std::cout << "           " << op_ << ": " << plan.mutants << " mutants: " << refused_ << " refused, " << large_
              << " too large to run, " << ran_ << " ran, " << unsupported_ << " of them not on the cpu, " << compared_
              << " compared\n";
    if (plan.mutants < 500) return;
    EXPECT_GT(refused_, plan.mutants / 5);
    EXPECT_GT(ran_, plan.mutants / 10);
    EXPECT_GT(compared_ + unsupported_, plan.mutants / 20);
  }

 private:
  void require(bool good, const std::string& what) {
    if (!good && fault_.empty()) fault_ = what;
  }

  // A refusal must be a sentence "<op>: <argument> <what>" about an argument that exists.
  void check_sentence(const Status& status) {
    if (status.ok()) return;
    require(status.op == op_, "the status names operator '" + status.op + "'");
    require(names_.contains(status.argument), "there is no argument '" + status.argument + "': " + status.message);
    const std::string start = op_ + ": " + status.argument + " ";
    require(status.message.starts_with(start) && status.message.size() > start.size(), "this is no sentence: " + status.message);
  }

  // Calls what must either work, if `wanted` is ok, or throw an Error with that very status.
  template <class F>
  void check_call(const char* what, const Status& wanted, F&& call) {
    try {
      call();
      require(wanted.ok(), std::string(what) + " works, but supports() says: " + wanted.message);
    } catch (const Error& error) {
      check_sentence(error.status());
      require(error.status().code == wanted.code && error.what() == wanted.message,
              std::string(what) + " says: " + error.what() + "\n  but supports() says: " + wanted.message);
    } catch (const std::exception& error) {
      require(false, std::string(what) + " throws something else: " + error.what());
    }
  }

  // Asks everything that may be asked of arguments whose memory does not exist, and calls the op where it must refuse.
  Status ask(const Stream& stream, const Args& ghosts, size_t& scratch) {
    const Status status = supports(stream, ghosts);
    check_sentence(status);
    check_call("choose()", status, [&] { require(!choose(stream, ghosts).kernel.empty(), "choose() names no kernel"); });
    check_call("scratch_bytes()", status, [&] { scratch = scratch_bytes(stream, ghosts); });
    if (!status.ok()) check_call("the op", status, [&] { cases::launch(stream, ghosts, {}); });
    if (!status.ok() || scratch == 0) return status;
    Status little;
    try {
      cases::launch(stream, ghosts, {nullptr, scratch - 1});
    } catch (const Error& error) {
      little = error.status();
    }
    check_sentence(little);
    require(little.code == Code::scratch_too_small && little.argument == "scratch", "scratch that is too small is not refused");
    return status;
  }

  // Runs the op in a sandbox; outputs are found by placing their tensors there.
  void launch_in(const char* backend, const Stream& stream, const Args& args, size_t scratch, Sandbox& box,
                 const std::vector<Tensor>& writable) {
    cases::LentScratch lent(scratch, 0xFF, cases::host_placement());
    check_call("the op", {},
               [&] { cases::launch(stream, cases::mapped(args, [&](const Tensor& t) { return box.at(t); }), lent.scratch()); });
    const std::string misdeed = box.misdeed(writable);
    require(misdeed.empty(), std::string(backend) + ": " + misdeed);
    require(lent.guards_intact(), std::string(backend) + ": bytes beyond the scratch were written");
  }

  void examine(int64_t index, Rng& rng) {
    Args args = dynamic_cast<const cases::OpProblem<Args>&>(*base_).args;
    Memory extra;
    Draft draft{members_of(args), base_->memory(), extra, rng};
    for (int64_t n = pick<int64_t>(rng, {0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 6}); n > 0; --n) change(draft, args);
    bool runnable = back(draft);
    under_way = op_ + " of " + options_ + draft.story + "\n  again: random_args_test --gtest_filter='*." + op_ +
                "' --mutants=1 --first=" + std::to_string(index) + " --seed=" + std::to_string(plan.seed);

    const Args ghosts = as_ghosts(args);
    const Status valid = validate(ghosts);
    check_sentence(valid);
    require(valid.ok() || valid.code == Code::invalid_argument, "validate() says " + std::string(code_name(valid.code)));

    size_t need = 0;
    Stream strange;  // whatever it is, it must be told in a sentence
    strange.backend = static_cast<Backend>(pick<int>(rng, {0, 1, 1, 2, 3, 4, -1}));
    strange.isa = static_cast<Isa>(pick<int>(rng, {0, 0, 1, 2, 3, 4, 5, 6, -1}));
    strange.threads = pick<int>(rng, {0, 1, 5, -1, 1 << 20, std::numeric_limits<int>::max()});
    strange.device = pick<int>(rng, {0, 0, 1, -1, 99});
    if (place_of(strange.backend) == Place::host) ask(strange, ghosts, need);
    const Status there = supports({Backend::cuda}, ghosts);
    check_sentence(there);

    const Status on_reference = ask(cases::kReference, ghosts, need);
    require(valid.ok() || on_reference.message == valid.message, "supports() does not repeat what validate() says");
    if (!on_reference.ok()) {
      ++refused_;
      return;
    }
    Stream stream{Backend::cpu};
    stream.threads = pick<int>(rng, {1, 1, 1, 2, 3});
    stream.isa = pick<Isa>(rng, {Isa::best, Isa::best, Isa::best, Isa::scalar, Isa::avx2});
    if (!supports(stream, ghosts)) stream.isa = Isa::best;
    for (const Member& member : draft.members)
      runnable &= claimed_elements(*member.tensor).value_or(kMostElements + 1) <= kMostElements;
    for_each_scalar(args, [&](const Path& path, auto& value) {
      if constexpr (std::is_same_v<decltype(value), int64_t&>)
        runnable &= !path.text().ends_with("count") || value <= kMostElements;
    });
    if (runnable && sequences_meet(draft.members)) {
      stream.threads = 1;  // results depend on the order, and threads would race
      draft.wild = true;
    }
    size_t need_cpu = 0;
    const Status on_cpu = ask(stream, ghosts, need_cpu);
    require(on_cpu.ok() || on_cpu.code == Code::unsupported, "the cpu calls legal arguments invalid: " + on_cpu.message);
    if (!runnable || need_cpu > kMostScratch) {
      ++large_;
      return;
    }
    const std::string shared = overlap(draft.members);
    require(shared.empty(), "validate() lets this pass: " + shared);
    if (!fault_.empty()) return;

    ++ran_;
    std::vector<Tensor> writable;
    for (const Member& member : draft.members)
      if (member.writes && member.tensor->present()) writable.push_back(*member.tensor);
    Sandbox by_reference(base_->memory(), extra);
    launch_in("reference", cases::kReference, args, need, by_reference, writable);
    if (!on_cpu.ok()) {
      ++unsupported_;
      return;
    }
    Sandbox by_cpu(base_->memory(), extra);
    launch_in("cpu", stream, args, need_cpu, by_cpu, writable);
    // A score of integers errs by a part of the lengths of q and k, and gains of garbage make keys of any length.
    if constexpr (requires { args.precision; }) draft.wild |= draft.codes;
    if (draft.wild) return;
    bool comparable = true;
    std::string difference;
    for (const Member& member : draft.members) {
      if (!member.writes || !member.tensor->present()) continue;
      const Verdict verdict = compare(member, by_reference.at(*member.tensor), by_cpu.at(*member.tensor), op_ == "kv_repack");
      comparable &= verdict.comparable;
      if (difference.empty()) difference = verdict.fault;
    }
    if (!comparable) return;
    ++compared_;
    require(difference.empty(), "cpu: " + difference);
  }

  std::string op_, options_, fault_;
  std::set<std::string> names_;
  uint64_t seed_ = plan.seed;
  std::unique_ptr<cases::Problem> base_;
  int64_t refused_ = 0, large_ = 0, ran_ = 0, unsupported_ = 0, compared_ = 0, faults_ = 0;
};

#define WEFT_ATTACK(name, Args) \
  TEST(RandomArgs, name) { Attack<Args>(#name).run(); }
WEFT_FOR_EACH_OP(WEFT_ATTACK)
#undef WEFT_ATTACK

}  // namespace
}  // namespace weft::tests

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const size_t equals = option.find('=');
    const long long value = equals == std::string::npos ? -1 : std::atoll(option.c_str() + equals + 1);
    const std::string key = option.substr(0, equals);
    if (value >= 0 && key == "--mutants") {
      weft::tests::plan.mutants = value;
    } else if (value >= 0 && key == "--first") {
      weft::tests::plan.first = value;
    } else if (value >= 0 && key == "--seed") {
      weft::tests::plan.seed = static_cast<uint64_t>(value);
    } else {
      std::fprintf(stderr, "random_args_test: unknown option '%s', there are --mutants=N --seed=S --first=I\n", argv[i]);
      return 2;
    }
  }
#ifdef WEFT_TEST_ASAN
  __asan_set_death_callback(weft::tests::tell_death);
#endif
  return RUN_ALL_TESTS();
}

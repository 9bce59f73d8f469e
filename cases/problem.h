// Problem: one case made concrete. It owns inputs and outputs, knows the right answer, and can be run anywhere any number of times.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cases/bars.h"
#include "cases/image.h"
#include "cases/memory.h"
#include "core/backend.h"
#include "core/descriptions.h"

namespace weft::cases {

// Useful work of one call: what the algorithm must read, write and multiply, not what a kernel happens to do.
struct Work {
  double read_bytes = 0, written_bytes = 0, flops = 0;
};

// One compared quantity.
struct Finding {
  std::string name;
  double error = 0, bound = 0;
  bool ok() const { return error <= bound; }
};
using Findings = std::vector<Finding>;

// An output tensor and how near it must be. `exact`: same bits.
struct Output {
  std::string name;
  Tensor tensor;
  Bar bar{};
  bool exact = false;
  // Where the terms of the output's sum may cancel: the RMS of the terms. Errors are then relative to this RMS. Called only when needed.
  std::function<double()> scale{};
};

class Problem {
 public:
  virtual ~Problem() = default;

  virtual const char* op() const = 0;
  // The questions of the op, as if the tensors lived where the stream computes.
  virtual Status supports(const Stream& stream) const = 0;
  virtual Choice choose(const Stream& stream) const = 0;
  virtual size_t scratch_bytes(const Stream& stream) const = 0;
  // The host's share of a call on the stream, as a function to be timed: checks and plan, no kernel.
  virtual std::function<void()> host_share(const Stream& stream) const = 0;
  // A call in an image of memory(), which is never written itself, as a function to be timed: its arguments are made beforehand.
  virtual std::function<void()> call(const Stream& stream, const Image& image, Scratch scratch) const = 0;
  // Runs in an image of memory().
  virtual void run(const Stream& stream, const Image& image, Scratch scratch) const = 0;

  // Computes the right answer, once: the reference's, with outputs widened to f32, or golden data where the case has it.
  virtual void prepare() = 0;
  // What run() left in a fetched image against it. prepare() comes first.
  virtual Findings compare(const Stream& stream, const Image& result) const = 0;
  // The first rule of memory that run() broke, or "": elements that the op must write or leave alone, inputs, paddings, guards.
  virtual std::string misbehaviour(const Image& result) const = 0;
  // The reference's result against another way to compute it; absent where there is none (or where golden data is better).
  virtual std::optional<Findings> second_formulation(const Image& result) const = 0;
  // Laws beyond single results (bit-equal continuation, replay, batch independence), run on the stream's backend. Empty for backends
  // whose memory is not the host's.
  virtual Findings laws(const Stream& stream) const = 0;
  virtual bool golden() const = 0;

  const Memory& memory() const { return memory_; }
  Memory& memory() { return memory_; }
  Work work;
  std::vector<std::pair<std::string, std::string>> shape;  // the options as used

 protected:
  Memory memory_;
};

// Every op under one name, so that templates can call it.
#define WEFT_LAUNCH(name, Args)                                                                                \
  inline void launch(const Stream& stream, const Args& args, Scratch scratch) { name(stream, args, scratch); } \
  inline const char* name_of(const Args&) { return #name; }
WEFT_FOR_EACH_OP(WEFT_LAUNCH)
#undef WEFT_LAUNCH

// Runs an op with scratch of its own. For references and laws.
template <class Args>
void run_op(const Stream& stream, const Args& args) {
  Memory lent;
  const size_t bytes = scratch_bytes(stream, args);
  launch(stream, args, {lent.bytes(bytes), bytes});
}
inline constexpr Stream kReference{Backend::reference};

// Replaces every tensor of the arguments by map(tensor).
template <class Args, class Map>
Args mapped(Args args, const Map& map) {
  for_each_tensor(args, [&](const Path&, Tensor& tensor, const TensorRule&) { tensor = map(tensor); });
  return args;
}

// The arguments as if their tensors lived where the stream computes.
template <class Args>
Args relabelled(const Args& args, const Stream& stream) {
  return mapped(args, [&](Tensor tensor) {
    tensor.place = place_of(stream.backend);
    tensor.device = static_cast<int8_t>(stream.device);
    return tensor;
  });
}

// What an op writes of a tensor, in index order: of an exact output a byte for every byte of its elements, where a bit of 1 is written
// (codes of several tokens may share a byte); of others a byte for every element, 0 or 0xFF.
using Mask = std::vector<uint8_t>;

// got against want over what the op writes.
Finding measure(const Output& output, double bound, const Tensor& got, const Tensor& want, const Mask& written);
// Names bits that were written and must not be, or elements that were not written and must be; "" when all is well. output.tensor
// holds the contents from before the run.
std::string check_written(const Output& output, const Tensor& got, const Mask& written);
// Anything changed outside the elements of `writable`? Names the first fault, or "".
std::string check_rest(const Image& result, const std::vector<Tensor>& writable);
// Elements that differ from poison, of a tensor that was all poison.
Mask not_poison(const Tensor& tensor);
// Bits that are equal in tensors that held the opposite before.
Mask same_bits_of(const Tensor& a, const Tensor& b);
void fill_bytes(const Tensor& tensor, uint8_t byte);

template <class Args>
class OpProblem : public Problem {
 public:
  using Member = Tensor& (*)(Args&);

  Args args;
  // Another way to the same numbers: given the arguments as the reference left them.
  std::function<Findings(const Args& result)> second;
  // More laws, given fresh arguments of an image on the stream's backend.
  std::function<Findings(const Stream& stream, const Args& fresh)> more_laws;
  // Replaces the plain call, for cases that split it; run_as_scratch then says how much scratch it wants.
  std::function<void(const Stream& stream, const Args& args, Scratch scratch)> run_as;
  std::function<size_t(const Stream& stream, const Args& args)> run_as_scratch;
  // Replaces the comparison of outputs one by one, where they mean something only together.
  std::function<Findings(const Stream& stream, const Args& got, const Args& want)> compare_as;

  Args placed(const Image& image) const {
    return mapped(args, [&](const Tensor& tensor) { return tensor.present() ? image.at(tensor) : tensor; });
  }

  // Declares an output. Float outputs are widened to f32 for the right answer, exact ones keep their dtype.
  void output(const char* name, Member member, Bar bar) { add({name, member(args), bar, false}, member); }
  void exact_output(const char* name, Member member) { add({name, member(args), {}, true}, member); }
  // Sets Output::scale of the latest output.
  void relative_to(std::function<double()> scale) { outputs_.back().scale = std::move(scale); }
  // The right answer of the latest output comes from golden data, to be met within `tolerance`.
  void golden_answer(Tensor want, double tolerance) {
    golden_.resize(outputs_.size());
    golden_.back() = want;
    outputs_.back().bar.f32 = std::max(outputs_.back().bar.f32, tolerance);
    outputs_.back().bar.tensor_core = std::max(outputs_.back().bar.tensor_core, tolerance);
    if (outputs_.back().bar.integer > 0) outputs_.back().bar.integer = std::max(outputs_.back().bar.integer, tolerance);
  }

  const char* op() const override { return name_of(args); }
  bool golden() const override { return !golden_.empty(); }

  Status supports(const Stream& stream) const override { return weft::supports(stream, relabelled(args, stream)); }
  Choice choose(const Stream& stream) const override { return weft::choose(stream, relabelled(args, stream)); }
  size_t scratch_bytes(const Stream& stream) const override {
    const Args there = relabelled(args, stream);
    return run_as ? run_as_scratch(stream, there) : weft::scratch_bytes(stream, there);
  }
  std::function<void()> host_share(const Stream& stream) const override {
    return [this, stream, there = relabelled(args, stream)] {
      (void)(run_as ? run_as_scratch(stream, there) : weft::scratch_bytes(stream, there));
    };
  }
  std::function<void()> call(const Stream& stream, const Image& image, Scratch scratch) const override {
    return [this, stream, scratch, there = placed(image)] {
      run_as ? run_as(stream, there, scratch) : launch(stream, there, scratch);
    };
  }
  void run(const Stream& stream, const Image& image, Scratch scratch) const override { call(stream, image, scratch)(); }

  void prepare() override {
    if (answer_) return;
    answer_.emplace();
    Answer& answer = *answer_;
    // Float outputs go to fresh f32 tensors full of poison. Exact ones stay in an image, and a second image with the opposite poison
    // tells which of their bits the op writes.
    const bool any_exact = std::any_of(outputs_.begin(), outputs_.end(), [](const Output& out) { return out.exact; });
    answer.first = std::make_unique<Image>(memory_, host_placement());
    std::optional<Image> second_image;
    if (any_exact) second_image.emplace(memory_, host_placement());
    Args& want = answer.want = placed(*answer.first);
    Args other = any_exact ? placed(*second_image) : want;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (outputs_[i].exact) {
        fill_bytes(members_[i](want), 0xFF);
        fill_bytes(members_[i](other), 0x00);
      } else {
        members_[i](want) = members_[i](other) = answer.memory.make(DType::f32, sizes_of(outputs_[i].tensor));
      }
    }
    run_op(kReference, want);
    if (any_exact) run_op(kReference, other);
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Tensor& tensor = members_[i](want);
      answer.written.push_back(outputs_[i].exact ? same_bits_of(tensor, members_[i](other)) : not_poison(tensor));
      if (i < golden_.size() && golden_[i].present()) members_[i](want) = golden_[i];
    }
  }

  Findings compare(const Stream& stream, const Image& result) const override {
    Args got = fetched(result), want = answer_->want;
    if (compare_as) return compare_as(stream, got, want);
    Findings findings;
    const std::string kernel = choose(stream).kernel;
    const bool integer = stream.backend == Backend::cpu && kernel.find(".integer") != std::string::npos;
    // The chunk ops of the delta rule run on tensor cores, except where they are token by token.
    const bool in_f32 = stream.backend != Backend::cuda || kernel == "cuda.gated_delta_rule_prefill.recurrent" ||
                        kernel == "cuda.gated_delta_rule_summarize.recurrent";
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Bar& bar = outputs_[i].bar;
      const double bound = integer ? bar.integer : in_f32 ? bar.f32 : bar.tensor_core;
      findings.push_back(measure(outputs_[i], bound, members_[i](got), members_[i](want), answer_->written[i]));
    }
    return findings;
  }

  std::string misbehaviour(const Image& result) const override {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Output& out = outputs_[i];
      std::string fault = check_written(out, result.fetched(out.tensor), answer_->written[i]);
      if (!fault.empty()) return fault;
    }
    std::vector<Tensor> writable;
    for (const Output& out : outputs_) writable.push_back(out.tensor);
    return check_rest(result, writable);
  }

  std::optional<Findings> second_formulation(const Image& result) const override {
    if (!second) return std::nullopt;
    return second(fetched(result));
  }

  Findings laws(const Stream& stream) const override {
    if (!more_laws || placement_of(stream).place() != Place::host) return {};
    const Image fresh(memory_, placement_of(stream));
    return more_laws(stream, placed(fresh));
  }

 private:
  // The right answer and what it lives in.
  struct Answer {
    Memory memory;
    std::unique_ptr<Image> first;
    Args want;
    std::vector<Mask> written;
  };

  void add(Output output, Member member) {
    outputs_.push_back(std::move(output));
    members_.push_back(member);
  }
  static std::vector<int64_t> sizes_of(const Tensor& t) { return {t.sizes.begin(), t.sizes.begin() + t.rank}; }
  Args fetched(const Image& image) const {
    return mapped(args, [&](const Tensor& tensor) { return image.fetched(tensor); });
  }

  std::vector<Output> outputs_;
  std::vector<Member> members_;
  std::vector<Tensor> golden_;
  std::optional<Answer> answer_;
};

}  // namespace weft::cases

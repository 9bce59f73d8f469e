// Checks a case on a backend: results within their bounds, the same bits in every run, no stray writes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cases/table.h"

namespace weft::cases {

enum class Verdict { passed, failed, skipped };
const char* verdict_name(Verdict verdict);  // "passed", ...

struct Outcome {
  Verdict verdict = Verdict::failed;
  double error = 0, bound = 0;  // of the finding with the largest error relative to its bound
  std::string why;              // what failed, or why the case was skipped; of a pass, the name of that finding
  uint64_t bits = 0;            // checksum of all memory after the first run: equal for equal results; 0 when skipped
};

// Why the reference is skipped in a case that has neither golden data nor a second formulation.
inline constexpr const char* kTruth = "the reference is the truth of this op; golden vectors pin it";

// once: one run; checks its results and which memory it wrote. thorough: also checks that runs with other garbage in the scratch
// and other numbers of threads give the same bits, the laws of the op, and on the reference the second formulation.
enum class Depth { once, thorough };

// Holds one problem and its right answer, to check several streams against that answer.
class Checker {
 public:
  explicit Checker(std::unique_ptr<Problem> problem) : problem_(std::move(problem)) {}
  Outcome check(const Stream& stream, Depth depth = Depth::thorough);
  const Problem& problem() const { return *problem_; }

 private:
  Outcome check_supported(const Stream& stream, Depth depth);
  Outcome judge_run(const Stream& stream, Depth depth, const struct Run& first);

  std::unique_ptr<Problem> problem_;
};

// Instruction sets that the cpu backend has on this machine, best first.
std::vector<Isa> usable_isas();

// Scratch of exactly the size that an op asks for, filled with garbage and between guard bands, in the memory of a placement.
class LentScratch {
 public:
  LentScratch(size_t bytes, uint8_t garbage, Placement& placement);
  Scratch scratch() const { return {image_->at(tensor_).data, static_cast<size_t>(tensor_.size(0))}; }
  bool guards_intact();

 private:
  Memory memory_;
  Tensor tensor_;
  std::unique_ptr<Image> image_;
};

}  // namespace weft::cases

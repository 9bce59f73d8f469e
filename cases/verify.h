// Checking a case on a backend: the right numbers, the right bits every time, and nothing touched that is not the op's.
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
  double error = 0, bound = 0;  // of the output that comes nearest to its bar (or passes it farthest)
  std::string why;              // what failed, why skipped; of a pass, the quantity that error and bound are of
  uint64_t bits = 0;            // checksum of all memory after the first run: equal for equal results; 0 when skipped
};

// Why a case without golden data or second formulation cannot say anything about the reference.
inline constexpr const char* kTruth = "the reference is the truth of this op; golden vectors pin it";

// once: one run, its numbers and its manners. thorough: also that other runs, other garbage and other numbers of threads give the same
// bits, the laws of the op, and of the reference its second formulation.
enum class Depth { once, thorough };

// Holds one problem and its right answer, so that several streams can be checked against it.
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

// Scratch of exactly the size that an op asks for, full of garbage and between guard bands, in the memory of a placement.
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

// Checks a case on a backend: see verify.h.
#include "cases/verify.h"

#include <cmath>
#include <cstring>

#include "core/backend.h"
#include "files/checksum.h"

namespace weft::cases {

struct Run {
  std::unique_ptr<Image> image;
  std::string fault;
};

namespace {

Outcome failed(std::string why) { return {Verdict::failed, 0, 0, std::move(why)}; }

// Error relative to its bound; a finding above 1 fails.
double strain(const Finding& finding) {
  if (finding.ok()) return finding.bound > 0 ? finding.error / finding.bound : 0;
  return finding.bound > 0 ? finding.error / finding.bound : INFINITY;
}

// The worst of the findings as an outcome.
Outcome judge(const Findings& findings) {
  Outcome outcome{Verdict::passed, 0, 0, ""};
  double worst = -1;
  for (const Finding& finding : findings) {
    if (!finding.ok()) outcome.verdict = Verdict::failed;
    if (strain(finding) <= worst) continue;
    worst = strain(finding);
    outcome.error = finding.error;
    outcome.bound = finding.bound;
    outcome.why = finding.name;
  }
  return outcome;
}

// Runs the problem once in a new image, with scratch filled with `garbage`.
Run run_once(const Problem& problem, const Stream& stream, uint8_t garbage) {
  Placement& placement = placement_of(stream);
  Run run;
  run.image = std::make_unique<Image>(problem.memory(), placement);
  LentScratch lent(problem.scratch_bytes(stream), garbage, placement);
  placement.run(stream, [&](const Stream& on) { problem.run(on, *run.image, lent.scratch()); });
  run.image->fetch();
  if (!lent.guards_intact()) run.fault = "bytes beyond the scratch were written";
  return run;
}

// Every byte of the fetched image, guard bands included.
uint64_t checksum_of(const Image& image) {
  files::Checksum sum;
  for (size_t i = 0; i < image.memory().blocks().size(); ++i) sum.add(image.bytes(i), image.memory().blocks()[i].total);
  return sum.value();
}

bool same_images(const Image& a, const Image& b) {
  for (size_t i = 0; i < a.memory().blocks().size(); ++i)
    if (std::memcmp(a.bytes(i), b.bytes(i), a.memory().blocks()[i].total) != 0) return false;
  return true;
}

}  // namespace

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::passed: return "passed";
    case Verdict::failed: return "failed";
    case Verdict::skipped: return "skipped";
  }
  return "?";
}

LentScratch::LentScratch(size_t bytes, uint8_t garbage, Placement& placement) {
  tensor_ = memory_.make(DType::u8, {static_cast<int64_t>(bytes)});
  std::memset(tensor_.data, garbage, bytes);
  image_ = std::make_unique<Image>(memory_, placement);
}

bool LentScratch::guards_intact() {
  image_->fetch();
  return image_->guards_intact();
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> found;
  const BackendTable* table = cpu_backend();
  for (Isa isa : {Isa::neon, Isa::avx512_vnni, Isa::avx512, Isa::avx2, Isa::scalar}) {
    Stream stream;
    stream.isa = isa;
    if (table && (!table->check_stream || table->check_stream(stream, "weft"))) found.push_back(isa);
  }
  return found;
}

Outcome Checker::check(const Stream& stream, Depth depth) {
  const Status status = problem_->supports(stream);
  if (status.code == Code::unsupported) return {Verdict::skipped, 0, 0, status.message};
  if (!status) return failed(status.message);
  try {
    return check_supported(stream, depth);
  } catch (const Error& error) {
    return failed(error.what());
  }
}

Outcome Checker::check_supported(const Stream& stream, Depth depth) {
  problem_->prepare();
  const Run first = run_once(*problem_, stream, 0xFF);
  Outcome outcome = judge_run(stream, depth, first);
  outcome.bits = checksum_of(*first.image);
  return outcome;
}

Outcome Checker::judge_run(const Stream& stream, Depth depth, const Run& first) {
  if (!first.fault.empty()) return failed(first.fault);
  const Outcome numbers = judge(problem_->compare(stream, *first.image));
  if (numbers.verdict == Verdict::failed) return numbers;
  if (std::string fault = problem_->misbehaviour(*first.image); !fault.empty()) return failed(fault);
  if (depth == Depth::once) return numbers;

  // Neither other garbage in the scratch nor other numbers of threads may change the bits.
  Stream again = stream;
  if (!same_images(*first.image, *run_once(*problem_, again, 0x5A).image)) return failed("a second run gave other bits");
  if (stream.backend == Backend::cpu)
    for (int threads : {1, 3}) {
      again.threads = threads;
      if (!same_images(*first.image, *run_once(*problem_, again, 0xFF).image))
        return failed("other bits with " + std::to_string(threads) + " threads");
    }
  Findings more = problem_->laws(stream);
  if (stream.backend == Backend::reference) {
    const std::optional<Findings> second = problem_->second_formulation(*first.image);
    if (second) more.insert(more.end(), second->begin(), second->end());
    if (!second && !problem_->golden() && judge(more).verdict == Verdict::passed) return {Verdict::skipped, 0, 0, kTruth};
    // Without golden data, comparing the reference with itself shows only its rounding; report the second formulation instead.
    if (second && !problem_->golden()) return judge(more);
  }
  const Outcome laws = judge(more);
  return laws.verdict == Verdict::failed ? laws : numbers;
}

}  // namespace weft::cases

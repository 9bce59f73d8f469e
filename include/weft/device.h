// Stream, Scratch and Choice: who computes, in which order, with which lent memory, and by which kernel.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace weft {

enum class Backend { reference, cpu, cuda };

// Instruction sets of the cpu backend. `best` takes the best one that this machine has.
enum class Isa { best, scalar, avx2, avx512, avx512_vnni, neon };

// Whether a call may look at the whole batch to choose its splits (decided per op call; see DESIGN.md "Determinism").
enum class Schedule { fastest, invariant };

const char* backend_name(Backend backend);
const char* isa_name(Isa isa);

// A queue of one backend. Plain value: copying it shares the queue. The reference and cpu backends run synchronously on the
// calling thread (cpu with `threads` workers); cuda enqueues on `queue` and returns.
// The workers are OpenMP's, with what that brings: where the system refuses a thread, the OpenMP runtime prints so and ends the process; a
// child of fork() must not call with several threads before exec; every thread that calls keeps a team of its own. With threads = 1 there
// are none of them, and none of this applies.
struct Stream {
  Backend backend = Backend::cpu;
  int device = 0;         // cuda: device ordinal; otherwise 0
  void* queue = nullptr;  // cuda: cudaStream_t; otherwise null
  int threads = 0;  // cpu: worker threads at most, 0 = the library's choice; fewer work where other programs hold the processors
  Isa isa = Isa::best;  // cpu: force an instruction set; refused when the machine or the build lacks it
};

// Bytes the caller lends for one call, aligned to kScratchAlignment. Holds garbage on entry and on exit.
inline constexpr size_t kScratchAlignment = 256;
struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// What a backend would run for a call: the kernel's name and its plan in words.
struct Choice {
  std::string kernel;  // "cpu.gated_delta_rule_prefill.chunk16.avx512"
  std::string plan;    // "2 threads over 32 heads x 1 token range, chunk 16"
};

// One line of `weft devices`.
struct DeviceInfo {
  Backend backend;
  int device;
  std::string name;    // "AMD EPYC 9R14"
  std::string detail;  // "2 threads; avx512_vnni avx512 avx2 scalar"
  bool usable;
  std::string why_not;  // empty when usable
  int threads = 1;      // workers of a call that leaves their number to the library
};
std::vector<DeviceInfo> devices();

}  // namespace weft

/// Stream, Scratch and Choice: who computes, in which order, with which lent memory, and by which kernel.
/// @file
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// Who computes.
enum class Backend {
  reference,  ///< loops in double on the calling thread: the specification
  cpu,        ///< SIMD kernels on host threads
  cuda,       ///< kernels for NVIDIA GPUs
  vulkan,     ///< shaders for any GPU with Vulkan 1.2; weft/vulkan.h
};

/// Instruction sets of the cpu backend.
enum class Isa {
  best,         ///< the best one that this machine has
  scalar,       ///< no vector instructions
  avx2,         ///< x86 AVX2
  avx512,       ///< x86 AVX-512 without VNNI
  avx512_vnni,  ///< x86 AVX-512 with VNNI
  neon,         ///< Arm NEON
};

/// What a call may look at when it chooses its splits. See DESIGN.md, "Determinism".
enum class Schedule {
  fastest,    ///< the whole batch
  invariant,  ///< the sequence alone, so that its bits do not depend on the rest of the batch
};

/// How a kernel stands to what its processor can do.
enum class Speed {
  fast,      ///< made for the processor: its memory, its arithmetic or the launch bounds the call
  portable,  ///< for every processor of the backend: up to several times slower than a fast kernel
  slow,      ///< token by token, or a generic loop: ten times slower and more where there is much work
};

/// The name of a backend: "cpu".
const char* backend_name(Backend backend);
/// The name of an instruction set: "avx512_vnni".
const char* isa_name(Isa isa);
/// The name of a class of speed: "portable".
const char* speed_name(Speed speed);

/// A queue of one backend. It is a plain value: copies share the queue. The reference and cpu backends compute before the call
/// returns, on the calling thread and, on the cpu, its workers. cuda enqueues the work on `queue` and returns. vulkan records the work
/// into `queue`, and the caller submits it.
///
/// The workers are OpenMP threads:
/// - Where the system refuses a thread, the OpenMP runtime prints a message and ends the process.
/// - A child of fork() must not call with several threads before exec.
/// - Every thread that calls keeps a team of its own.
///
/// With threads = 1 there are no workers, and none of this applies.
struct Stream {
  Backend backend = Backend::cpu;  ///< who computes
  int device = 0;                  ///< cuda, vulkan: the ordinal of the device; otherwise 0
  void* queue = nullptr;           ///< cuda: a cudaStream_t; vulkan: Recorder::queue() of weft/vulkan.h; otherwise null
  int threads = 0;  ///< cpu: at most so many threads, 0: the library's choice. Fewer work where other programs hold the processors
  Isa isa = Isa::best;  ///< cpu: the instruction set. Refused where the machine or the build lacks it
  /// cpu: every parallel loop has a team of `threads` OpenMP threads, although some may have no work. For a thread whose own OpenMP
  /// loops have so many: libgomp ends the threads that a smaller team leaves over, and the next loop would start them again.
  bool whole_team = false;
};

/// The alignment of Scratch::data in bytes.
inline constexpr size_t kScratchAlignment = 256;

/// Bytes that the caller lends for one call, aligned to kScratchAlignment. They hold garbage on entry and on exit.
struct Scratch {
  void* data = nullptr;  ///< where the bytes are, in the memory of the stream's device
  size_t bytes = 0;      ///< how many there are
};

/// What a backend would run for a call.
struct Choice {
  std::string kernel;         ///< "cpu.gated_delta_rule_prefill.chunk16.avx512"
  std::string plan;           ///< "2 threads over 32 heads x 1 token range, chunk 16"
  Speed speed = Speed::fast;  ///< the class of the kernel for calls of these sizes
};

/// A device as `weft devices` prints it.
struct DeviceInfo {
  Backend backend;      ///< the backend that drives it
  int device;           ///< its ordinal, as in Stream
  std::string name;     ///< "AMD EPYC 9R14"
  std::string detail;   ///< "2 threads; avx512_vnni avx512 avx2 scalar"
  bool usable;          ///< can a call run on it?
  std::string why_not;  ///< empty when usable
  int threads = 1;      ///< the threads of a call that leaves their number to the library
  /// vulkan: a driver that computes on the processor (lavapipe). The command uses such a device only where --backend names vulkan.
  bool software = false;
};

/// All devices of all backends, those that cannot be used included.
std::vector<DeviceInfo> devices();

/// The devices of one backend. The drivers of other backends are not loaded, which takes time and memory.
std::vector<DeviceInfo> devices(Backend backend);

}  // namespace weft
#pragma GCC visibility pop

// Runs a GGUF file in llama.cpp with the backends that the environment names, for tests and measurements of libggml-weft.so.
//
//   drive MODEL BACKENDS THREADS logits FILE             logits of a few scenarios, as f32, to FILE; their sizes to stdout
//   drive MODEL BACKENDS THREADS time TOKENS STEPS       seconds of prompts and steps to stdout, until stdin has no more lines; with one
//                                                        thread, seconds of the processor, which other programs do not lengthen
//   drive MODEL BACKENDS THREADS profile TOKENS STEPS    seconds of a prompt and of steps by op to stdout
//
// BACKENDS is the folder of ggml's own backends. GGML_BACKEND_PATH names another one, as for every program of llama.cpp.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

[[noreturn]] void fail(const std::string& sentence) {
  std::fprintf(stderr, "drive: %s\n", sentence.c_str());
  std::exit(1);
}

llama_token token(int i) { return (i * 7919 + 13) % 512; }

// A batch of tokens of several sequences.
class Batch {
 public:
  Batch() : batch_(llama_batch_init(4096, 0, 1)) {}
  ~Batch() { llama_batch_free(batch_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void add(llama_token what, llama_pos position, llama_seq_id sequence) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = what;
    batch_.pos[i] = position;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = 1;
  }
  // Computes the batch and empties it. Logits of all its tokens are appended to `logits`.
  void run(llama_context* context, int vocabulary, std::vector<float>& logits) {
    if (const int status = llama_decode(context, batch_); status != 0) fail("llama_decode() returned " + std::to_string(status));
    for (int i = 0; i < batch_.n_tokens; ++i) {
      const float* row = llama_get_logits_ith(context, i);
      logits.insert(logits.end(), row, row + vocabulary);
    }
    batch_.n_tokens = 0;
  }

 private:
  llama_batch batch_;
};

struct Session {
  llama_context* context;
  int vocabulary;
  FILE* out;
  Batch batch{};
  std::vector<float> logits{};

  llama_memory_t memory() const { return llama_get_memory(context); }
  void add(int count, llama_pos first, llama_seq_id sequence) {
    for (int i = 0; i < count; ++i) batch.add(token(static_cast<int>(first) + i + 101 * sequence), first + i, sequence);
  }
  void run() { batch.run(context, vocabulary, logits); }
  void remove(llama_seq_id sequence, llama_pos from) {
    if (!llama_memory_seq_rm(memory(), sequence, from, -1)) fail("llama_memory_seq_rm() refused to roll back");
  }
  void finish(const char* scenario) {
    std::fwrite(logits.data(), sizeof(float), logits.size(), out);
    std::printf("%s %zu\n", scenario, logits.size());
    logits.clear();
    llama_memory_clear(memory(), true);
  }
};

void prefill_and_decode(Session& s) {
  s.add(300, 0, 0);
  s.run();
  s.finish("prefill");
  s.add(37, 0, 0);
  s.run();
  s.logits.clear();
  for (int i = 0; i < 24; ++i) {
    s.add(1, 37 + i, 0);
    s.run();
  }
  s.finish("decode");
  for (llama_pos first : {0, 5, 9, 26, 90}) {  // prompts continued: short and long pieces
    const llama_pos last = first == 0 ? 5 : first == 5 ? 9 : first == 9 ? 26 : first == 26 ? 90 : 217;
    s.add(last - first, first, 0);
    s.run();
  }
  s.finish("continued");
}

void several_sequences(Session& s) {
  for (int n = 0; n < 3; ++n) s.add(70, 0, n);
  s.run();
  for (int i = 0; i < 8; ++i) {
    for (int n = 0; n < 3; ++n) s.add(1, 70 + i, n);
    s.run();
  }
  s.finish("equal_sequences");
  s.add(90, 0, 0);
  s.add(4, 0, 1);
  s.add(33, 0, 3);
  s.run();
  for (int i = 0; i < 4; ++i) {  // two sequences decode, a third one gets its prompt
    s.add(1, 90 + i, 0);
    s.add(1, 33 + i, 3);
    s.add(12, 12 * i, 2);
    s.run();
  }
  s.finish("unequal_sequences");
}

// The operations of llama-server's slots: drafts that are partly accepted, prompts that share a beginning, a slot that gets another
// prompt.
void slots(Session& s) {
  s.add(50, 0, 0);
  s.add(20, 0, 1);
  s.run();
  llama_pos at = 50;
  for (int accepted : {5, 1, 3, 2, 4}) {
    s.add(5, at, 0);
    s.run();
    at += accepted;
    if (accepted < 5) s.remove(0, at);
    s.add(2, 20, 1);  // the other slot's draft is refused
    s.run();
    s.remove(1, 20);
  }
  s.add(1, at, 0);
  s.run();
  s.finish("rollback");
  s.add(40, 0, 0);
  s.run();
  llama_memory_seq_cp(s.memory(), 0, 2, -1, -1);  // a second slot with the prompt of the first
  s.add(3, 40, 0);
  s.add(3, 40, 2);
  s.run();
  s.remove(0, 0);  // the first slot gets another prompt
  s.add(17, 0, 0);
  s.run();
  s.add(1, 43, 2);
  s.add(1, 17, 0);
  s.run();
  s.finish("reused_slot");
}

double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Seconds by op: llama.cpp calls back before and after every node.
struct Profile {
  clockid_t clock = CLOCK_MONOTONIC;
  double begun = 0;
  std::map<std::string, double> seconds{};
};

bool observe(ggml_tensor* node, bool before, void* data) {
  auto& profile = *static_cast<Profile*>(data);
  if (before)
    profile.begun = now(profile.clock);
  else
    profile.seconds[ggml_op_desc(node)] += now(profile.clock) - profile.begun;
  return true;
}

llama_context* context_of(llama_model* model, int threads, uint32_t batch, uint32_t sequences, uint32_t snapshots, bool exact,
                          Profile* profile = nullptr) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 4096;
  params.n_batch = params.n_ubatch = batch;
  params.n_seq_max = sequences;
  params.n_rs_seq = snapshots;
  params.n_threads = params.n_threads_batch = threads;
  params.no_perf = true;
  if (exact) {  // an f16 cache would round a difference of 1e-7 up to 1e-3, and hide the differences that the plug-in makes
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  }
  if (profile) {
    params.cb_eval = observe;
    params.cb_eval_user_data = profile;
  }
  llama_context* context = llama_init_from_model(model, params);
  if (!context) fail("llama_init_from_model() returned nothing");
  return context;
}

void write_logits(llama_model* model, int threads, const char* file) {
  FILE* out = std::fopen(file, "wb");
  if (!out) fail(std::string("cannot write ") + file);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (uint32_t snapshots : {0u, 5u}) {
    Session s{context_of(model, threads, 512, 4, snapshots, true), vocabulary, out};
    prefill_and_decode(s);
    several_sequences(s);
    if (llama_n_rs_seq(s.context) > 0) slots(s);
    llama_free(s.context);
  }
  std::fclose(out);
}

double seconds_of(llama_context* context, std::vector<llama_token>& tokens) {
  const clockid_t clock = llama_n_threads(context) == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  const double begun = now(clock);
  const int status = llama_decode(context, llama_batch_get_one(tokens.data(), static_cast<int32_t>(tokens.size())));
  llama_synchronize(context);
  if (status != 0) fail("llama_decode() returned " + std::to_string(status));
  return now(clock) - begun;
}

// One measurement for every line of stdin, so that two processes can take turns.
void time_turns(llama_model* model, int threads, int count, int steps) {
  llama_context* context = context_of(model, threads, static_cast<uint32_t>(count), 1, 0, false);
  std::vector<llama_token> prompt;
  for (int i = 0; i < count; ++i) prompt.push_back(token(i));
  for (std::string line; std::getline(std::cin, line);) {
    llama_memory_clear(llama_get_memory(context), true);
    const double prefill = seconds_of(context, prompt);
    std::vector<double> of_step;
    for (int i = 0; i < steps; ++i) {
      std::vector<llama_token> one{token(count + i)};
      of_step.push_back(seconds_of(context, one));
    }
    std::printf("%.9f", prefill);
    for (double seconds : of_step) std::printf(" %.9f", seconds);
    std::printf("\n");
    std::fflush(stdout);
  }
  llama_free(context);
}

void profile_ops(llama_model* model, int threads, int count, int steps) {
  Profile profile{.clock = threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC};
  llama_context* context = context_of(model, threads, static_cast<uint32_t>(count), 1, 0, false, &profile);
  std::vector<llama_token> prompt;
  for (int i = 0; i < count; ++i) prompt.push_back(token(i));
  const auto tell = [&](const char* phase) {
    for (const auto& [op, seconds] : profile.seconds) std::printf("%s %.9f %s\n", phase, seconds, op.c_str());
    profile.seconds.clear();
  };
  seconds_of(context, prompt);  // the first prompt touches new memory
  llama_memory_clear(llama_get_memory(context), true);
  profile.seconds.clear();
  seconds_of(context, prompt);
  tell("prompt");
  for (int i = 0; i < steps; ++i) {
    std::vector<llama_token> one{token(count + i)};
    seconds_of(context, one);
  }
  tell("steps");
  llama_free(context);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) fail("wanted MODEL BACKENDS THREADS logits FILE, or MODEL BACKENDS THREADS time TOKENS STEPS");
  const bool quiet = !std::getenv("DRIVE_LOG");
  if (quiet) llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all_from_path(argv[2]);
  const int threads = std::atoi(argv[3]);
  llama_model_params params = llama_model_default_params();
  llama_model* model = llama_model_load_from_file(argv[1], params);
  if (!model) fail(std::string("cannot load ") + argv[1]);
  if (std::strcmp(argv[4], "logits") == 0)
    write_logits(model, threads, argv[5]);
  else if (argc > 6 && std::strcmp(argv[4], "profile") == 0)
    profile_ops(model, threads, std::atoi(argv[5]), std::atoi(argv[6]));
  else if (argc > 6)
    time_turns(model, threads, std::atoi(argv[5]), std::atoi(argv[6]));
  llama_model_free(model);
}

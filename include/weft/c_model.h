/* Whole models from C: load a checkpoint, plan and keep the memory of sequences, append tokens, read logits, generate text.
 *
 * Link with libweft_c, a shared library that also contains the ops of weft/c.h. It exports C functions only, so other languages can load it.
 * What the functions mean is said in weft/model.h, weft/hybrid_state.h, weft/prefix_store.h and weft/generate.h; a comment here says
 * where C differs.
 *
 * Conventions are those of weft/c.h: structs begin with struct_size and zero bytes after it mean the defaults; every fallible function
 * returns a code and fills a weft_status, which may be NULL; no exception leaves the library. Two more:
 *
 * Buffers. A function that writes a list or a text takes a buffer with its capacity, and sets *count to the full number of entries or bytes,
 * also where the buffer is too small and receives only the beginning. A call with capacity 0 and a NULL buffer asks for the number alone.
 * Texts are UTF-8; a terminating zero follows where the capacity allows it, and is not counted.
 *
 * Handles. Any number of threads may use a weft_model, which is immutable, or a weft_prefix_store. weft_state and weft_state_lock belong
 * to one thread at a time. A model may be freed before its states and stores. Freeing NULL does nothing.
 */
#ifndef WEFT_C_MODEL_H
#define WEFT_C_MODEL_H

#include "weft/c.h"

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* what the shared libraries export */
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* ---- models ---- */

typedef struct weft_model weft_model;

typedef struct weft_model_options {
  size_t struct_size;
  int32_t exact; /* ModelOptions::exact */
  int32_t reserved;
} weft_model_options;

/* Reads a folder in the format of Hugging Face, or a GGUF file. options may be NULL. */
weft_code weft_model_load(const char* directory, const weft_model_options* options, weft_model** model, weft_status* status);
void weft_model_free(weft_model* model);

int64_t weft_model_vocab_size(const weft_model* model);
int64_t weft_model_max_positions(const weft_model* model);               /* the context that it was trained for; 0: unknown */
int32_t weft_model_is_end_token(const weft_model* model, int32_t token); /* 1: an end-of-text token */
int32_t weft_model_begin_token(const weft_model* model);                 /* begins a text without a prompt; -1: none */
int32_t weft_model_has_tokenizer(const weft_model* model);               /* 0: encode and decode are refused */
int64_t weft_model_warning_count(const weft_model* model);               /* of Model::warnings() */

weft_code weft_model_summary(const weft_model* model, char* text, size_t capacity, size_t* count, weft_status* status);
/* The warning `index`, 0 to weft_model_warning_count() - 1. */
weft_code weft_model_warning(const weft_model* model, int64_t index, char* text, size_t capacity, size_t* count,
                             weft_status* status);
/* Special tokens in the text become tokens: see Model::encode. */
weft_code weft_model_encode(const weft_model* model, const char* text, size_t text_bytes, int32_t* tokens, size_t capacity,
                            size_t* count, weft_status* status);
weft_code weft_model_decode(const weft_model* model, const int32_t* tokens, size_t token_count, char* text, size_t capacity,
                            size_t* count, weft_status* status);

/* ---- plans ---- */

typedef struct weft_plan_options {
  size_t struct_size;
  const char* kv;    /* format of keys and values; NULL: "8v4" */
  int64_t context;   /* tokens of every sequence; 0: 4096 */
  int64_t sequences; /* 0: 1 */
  int64_t prompt;    /* most tokens of one input; 0: as many as context */
  int64_t rollback;  /* as in weft_state_options */
} weft_plan_options;

/* ModelBytes, and the bytes of a token in all KV caches. */
typedef struct weft_model_bytes {
  size_t struct_size;
  int64_t weights;
  int64_t copies; /* of the weights */
  int64_t recurrent, windows, kv, records;
  int64_t scratch;
  int64_t total; /* weights, recurrent, windows, kv, records and scratch */
  int64_t bytes_per_token, bytes_per_token_f16;
} weft_model_bytes;

/* The bytes of running a model on a stream, known before anything is allocated. options may be NULL. */
weft_code weft_model_plan(const weft_model* model, const weft_stream* stream, const weft_plan_options* options,
                          weft_model_bytes* bytes, weft_status* status);

/* ---- states ---- */

typedef struct weft_state weft_state;

typedef struct weft_state_options {
  size_t struct_size;
  const char* kv;    /* format of keys and values; NULL: "8v4" */
  int64_t capacity;  /* most tokens of one sequence; 0: 4096 */
  int64_t sequences; /* 0: 1 */
  int64_t rollback;  /* tokens that can be rolled back, 0 to 16: as many as weft_generate_options.draft */
} weft_state_options;

/* On the device of the stream. options may be NULL. */
weft_code weft_state_create(const weft_model* model, const weft_stream* stream, const weft_state_options* options,
                            weft_state** state, weft_status* status);
void weft_state_free(weft_state* state);

int64_t weft_state_tokens(const weft_state* state, int64_t sequence); /* -1: no such sequence */
int64_t weft_state_bytes(const weft_state* state);                    /* of its memory as allocated now: HybridState::bytes() */
weft_code weft_state_reset(weft_state* state, int64_t sequence, weft_status* status);
weft_code weft_state_fork(weft_state* state, int64_t from, int64_t to, weft_status* status);
/* Removes the last tokens, at most weft_state_rollable() of them. */
weft_code weft_state_rollback(const weft_stream* stream, weft_state* state, int64_t sequence, int64_t tokens, weft_status* status);
int64_t weft_state_rollable(const weft_state* state, int64_t sequence); /* -1: no such sequence */

/* A state file (weft/state_file.h). The tokens are those of the sequence, perhaps followed by tokens that are still to be appended.
 * weft_state_save() waits up to 60 seconds for another writer of the file. */
weft_code weft_state_save(const weft_model* model, const weft_state* state, int64_t sequence, const char* file,
                          const int32_t* tokens, size_t token_count, weft_status* status);
/* Loads a file into a sequence and writes its tokens. Where the buffer is too small for all of them, nothing is loaded and the code is
 * WEFT_INVALID_ARGUMENT. */
weft_code weft_state_load(const weft_model* model, weft_state* state, int64_t sequence, const char* file, int32_t* tokens,
                          size_t capacity, size_t* count, weft_status* status);

/* Exclusive use of a state file from load to save (StateLock in weft/state_file.h), so that no turn of another writer is lost in between:
 *
 *   weft_state_lock_open("story.state", NULL, &lock, &status);
 *   if (weft_state_lock_exists(lock)) weft_state_lock_load(model, lock, state, 0, tokens, capacity, &count, &status);
 *   ...                                                        append or generate
 *   weft_state_lock_save(model, lock, state, 0, tokens, count, &status);
 *   weft_state_lock_close(lock);
 *
 * Until the lock is closed, other locks and weft_state_save() of this file wait, also in the same thread. Readers do not wait. A process
 * that ends or is killed releases its locks. */
typedef struct weft_state_lock weft_state_lock;

/* Called once, after one second of waiting, with the process that holds the file; 0: not known. */
typedef void (*weft_state_wait_callback)(int64_t process, void* user);

typedef struct weft_state_lock_options {
  size_t struct_size;
  int32_t has_wait; /* 0: wait up to 60 seconds; 1: up to `wait` seconds */
  int32_t reserved;
  double wait;                      /* 0: a file that another writer holds is refused at once */
  weft_state_wait_callback on_wait; /* may be NULL */
  void* user;                       /* passed to on_wait */
} weft_state_lock_options;

/* The file need not exist, but its folder must. options may be NULL. After an error *lock is NULL. A file that is still held after the
 * wait is an error whose argument is "wait"; its message names the process. */
weft_code weft_state_lock_open(const char* file, const weft_state_lock_options* options, weft_state_lock** lock,
                               weft_status* status);
void weft_state_lock_close(weft_state_lock* lock); /* NULL: does nothing */

int32_t weft_state_lock_exists(const weft_state_lock* lock); /* 1: there was a file when it was locked, loaded or saved last */
/* As weft_state_save() and weft_state_load(), on the locked file, any number of times. A save is refused if a program that knows no locks
 * changed the file since it was locked, loaded or saved last. */
weft_code weft_state_lock_save(const weft_model* model, weft_state_lock* lock, const weft_state* state, int64_t sequence,
                               const int32_t* tokens, size_t token_count, weft_status* status);
weft_code weft_state_lock_load(const weft_model* model, weft_state_lock* lock, weft_state* state, int64_t sequence, int32_t* tokens,
                               size_t capacity, size_t* count, weft_status* status);

/* ---- prefix stores ---- */

typedef struct weft_prefix_store weft_prefix_store;

/* The values of weft::StateStorage. */
enum { WEFT_STATE_STORAGE_F32 = 0, WEFT_STATE_STORAGE_F16 = 1, WEFT_STATE_STORAGE_BF16 = 2, WEFT_STATE_STORAGE_INT8 = 3 };

typedef struct weft_prefix_store_options {
  size_t struct_size;
  int64_t bytes; /* no default */
  int64_t every; /* default 512 */
  int32_t has_every;
  int32_t recurrent; /* WEFT_STATE_STORAGE_... */
} weft_prefix_store_options;

typedef struct weft_prefix_store_stats {
  size_t struct_size;
  int64_t bytes, checkpoints, hits, misses, tokens, inserted, evicted, refused;
  double drift, largest_drift;
} weft_prefix_store_stats;

weft_code weft_prefix_store_create(const weft_prefix_store_options* options, weft_prefix_store** store, weft_status* status);
void weft_prefix_store_free(weft_prefix_store* store);
weft_code weft_prefix_store_read_stats(const weft_prefix_store* store, weft_prefix_store_stats* stats, weft_status* status);
/* *restored, which may be NULL, receives the number of restored tokens. */
weft_code weft_prefix_store_restore(weft_prefix_store* store, weft_state* state, int64_t sequence, const int32_t* tokens,
                                    size_t token_count, int64_t most, int64_t* restored, weft_status* status);
weft_code weft_prefix_store_insert(weft_prefix_store* store, const weft_state* state, int64_t sequence, const int32_t* tokens,
                                   size_t token_count, weft_status* status);

/* ---- steps ---- */

/* This struct never changes. */
typedef struct weft_model_input {
  int64_t sequence;
  const int32_t* tokens;
  int64_t token_count;
  float* logits;       /* [vocab_size], or [token_count, vocab_size] with every_token; NULL: none */
  int32_t* best;       /* NULL, or receives the most probable token after the last one */
  int32_t every_token; /* 0 or 1 */
  int32_t prompt_part; /* 0 or 1 */
} weft_model_input;

weft_code weft_model_append(const weft_model* model, const weft_stream* stream, weft_state* state, const weft_model_input* inputs,
                            size_t count, weft_status* status);

/* Model::prefill: the sequence will hold exactly `tokens`. logits are [vocab_size]. *restored, which may be NULL, receives the number
 * of tokens that the store had. */
weft_code weft_model_prefill(const weft_model* model, const weft_stream* stream, weft_state* state, int64_t sequence,
                             const int32_t* tokens, size_t token_count, float* logits, weft_prefix_store* store, int64_t* restored,
                             weft_status* status);

/* ---- generation ---- */

enum {
  WEFT_STOP_LENGTH = 0,
  WEFT_STOP_END_TOKEN = 1,
  WEFT_STOP_STOP_TOKEN = 2,
  WEFT_STOP_STOP_STRING = 3,
  WEFT_STOP_SENTENCE_END = 4,
  WEFT_STOP_CAPACITY = 5,
  WEFT_STOP_CALLBACK = 6
};

/* Called after every step of a prompt with the tokens read so far and all that are to be read. Tokens that a store restored count as
 * read. 0 continues, any other value stops. */
typedef int32_t (*weft_prompt_callback)(int64_t done, int64_t all, void* user);

/* Optional members have a has_ flag; without it the default of weft/generate.h holds. For max_tokens, temperature, top_p,
 * top_k and repetition_penalty the model's generation_config.json comes before that default. */
typedef struct weft_generate_options {
  size_t struct_size;
  int64_t sequence;
  int64_t max_tokens;
  int64_t top_k;
  uint64_t seed;
  double temperature, top_p, min_p;
  double repetition_penalty, presence_penalty, frequency_penalty;
  int32_t has_max_tokens, has_top_k, has_temperature, has_top_p, has_repetition_penalty;
  int32_t has_logprobs, logprobs; /* with the flag: log probabilities of the chosen token and of this many most probable tokens */
  int32_t has_sentence_after;
  int64_t sentence_after;
  int64_t draft;
  const char* const* stop_strings; /* texts that end with a zero */
  size_t stop_string_count;
  const int32_t* stop_tokens;
  size_t stop_token_count;
  int32_t ignore_end_tokens;      /* 0 or 1 */
  int32_t no_special_text;        /* the negation of GenerateOptions::special_text, so that 0 is the default */
  weft_prefix_store* store;       /* NULL, or as GenerateOptions::store */
  weft_prompt_callback on_prompt; /* NULL: none */
  void* on_prompt_user;
} weft_generate_options;

/* Writes what GenerateOptions says by default, or the model's generation_config.json where it says more, into max_tokens, temperature,
 * top_p, top_k and repetition_penalty, and sets their flags. No other member changes. */
weft_code weft_generate_suggest(const weft_model* model, weft_generate_options* options, weft_status* status);

/* These structs never change. */
typedef struct weft_token_logprob {
  int32_t token;
  float logprob;
} weft_token_logprob;
typedef struct weft_generated_token {
  int32_t token;    /* -1 in the last call, which passes on text that was held back */
  float logprob;    /* with has_logprobs */
  const char* text; /* UTF-8, followed by a zero; often empty; valid during the call */
  size_t text_bytes;
  const weft_token_logprob* top; /* valid during the call */
  size_t top_count;
} weft_generated_token;

/* Called for every token. 0 continues, any other value stops. */
typedef int32_t (*weft_generate_callback)(const weft_generated_token* token, void* user);

typedef struct weft_generate_result {
  size_t struct_size;
  int32_t stop; /* WEFT_STOP_... */
  int32_t reserved;
  uint64_t stop_index; /* which stop string or stop token */
  int64_t prompt_tokens, written_tokens;
  double prefill_seconds, decode_seconds;
  int64_t draft_proposed, draft_accepted, steps;
  int64_t restored_tokens; /* of prompt_tokens, restored from the store */
} weft_generate_result;

/* Continues a sequence. tokens[0 .. *token_count) are all its tokens; the state holds the first of them, and at least one is left to read.
 * Every token that is chosen is written behind them and counted in *token_count. `capacity` is the room of `tokens`, of which at least
 * *token_count + max_tokens are needed. callback, options and result may be NULL. */
weft_code weft_generate(const weft_model* model, const weft_stream* stream, weft_state* state, const weft_generate_options* options,
                        int32_t* tokens, size_t capacity, size_t* token_count, weft_generate_callback callback, void* user,
                        weft_generate_result* result, weft_status* status);

#ifdef __cplusplus
}
#endif
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif /* WEFT_C_MODEL_H */

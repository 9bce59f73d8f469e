/* The C interface of models, as a C program sees it: the bundled model is loaded from libweft_c and continues a text. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/model_c.h"

/* The layout that the ABI promises on 64-bit machines. */
_Static_assert(sizeof(void*) != 8 || sizeof(weft_model_options) == 16, "weft_model_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_state_options) == 40, "weft_state_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_state_lock_options) == 40, "weft_state_lock_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_model_input) == 48, "weft_model_input");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_generate_options) == 200, "weft_generate_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_generated_token) == 40, "weft_generated_token");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_generate_result) == 88, "weft_generate_result");

enum { kRoom = 256 };

typedef struct Seen {
  int32_t tokens[kRoom];
  size_t count, stop_after;
  char text[4096];
  float logprob;
  size_t top_count;
} Seen;

static int32_t on_token(const weft_generated_token* token, void* user) {
  Seen* seen = user;
  EXPECT(strlen(token->text) == token->text_bytes);
  strncat(seen->text, token->text, sizeof seen->text - strlen(seen->text) - 1);
  if (token->token < 0) return 0;
  if (seen->count < kRoom) seen->tokens[seen->count] = token->token;
  ++seen->count;
  seen->logprob = token->logprob;
  seen->top_count = token->top_count;
  return seen->count == seen->stop_after;
}

/* Buffers: the full size comes back however small they are. */
static int test_text(const weft_model* model) {
  int32_t tokens[kRoom], few[2] = {-7, -7};
  size_t count = 0, bytes = 0;
  char text[64], small[5];
  const char* given = "The old house";
  REQUIRE(weft_model_encode(model, given, strlen(given), tokens, kRoom, &count, &status) == WEFT_OK);
  EXPECT(count == 3);
  EXPECT(weft_model_encode(model, given, strlen(given), few, 1, &count, &status) == WEFT_OK);
  EXPECT(count == 3 && few[0] == tokens[0] && few[1] == -7);
  EXPECT(weft_model_encode(model, given, strlen(given), NULL, 0, &count, &status) == WEFT_OK && count == 3);
  EXPECT(weft_model_decode(model, tokens, 3, text, sizeof text, &bytes, &status) == WEFT_OK);
  EXPECT(bytes == strlen(given) && strcmp(text, given) == 0);
  EXPECT(weft_model_decode(model, tokens, 3, small, sizeof small, &bytes, &status) == WEFT_OK);
  EXPECT(bytes == strlen(given) && memcmp(small, given, sizeof small) == 0);
  EXPECT(weft_model_summary(model, text, sizeof text, &bytes, &status) == WEFT_OK && strstr(text, "qwen3_5") != NULL);
  EXPECT(weft_model_vocab_size(model) == 6144);
  EXPECT(weft_model_begin_token(model) >= 0 && weft_model_is_end_token(model, weft_model_begin_token(model)) == 1);
  EXPECT(weft_model_is_end_token(model, tokens[0]) == 0);
  return EXIT_SUCCESS;
}

/* The same tokens by hand, step by step, and by weft_generate. */
static int test_generation(const weft_model* model, const weft_stream* stream) {
  int32_t by_hand[kRoom], tokens[kRoom];
  size_t count = 0, all;
  weft_state* state = NULL;
  weft_state_options how = {.struct_size = sizeof how, .capacity = 512, .sequences = 2, .rollback = 4};
  weft_generate_options options = greedy(20);
  weft_generate_result result = {.struct_size = sizeof result};
  Seen seen = {.stop_after = 0};
  const char* prompt = "the sea, the sea, the sea";
  REQUIRE(weft_state_create(model, stream, &how, &state, &status) == WEFT_OK);
  REQUIRE(weft_model_encode(model, prompt, strlen(prompt), by_hand, kRoom, &count, &status) == WEFT_OK);
  memcpy(tokens, by_hand, sizeof tokens);
  weft_model_input input = {.sequence = 1, .tokens = by_hand, .token_count = (int64_t)count};
  for (all = count; all < count + 20; ++all) {
    input.best = &by_hand[all];
    REQUIRE(weft_model_append(model, stream, state, &input, 1, &status) == WEFT_OK);
    input.tokens = &by_hand[all];
    input.token_count = 1;
  }
  EXPECT(weft_state_tokens(state, 1) == (int64_t)all - 1);
  EXPECT(weft_state_tokens(state, 2) == -1);

  all = count;
  options.draft = 4;
  options.has_logprobs = 1;
  options.logprobs = 2;
  REQUIRE(weft_generate(model, stream, state, &options, tokens, kRoom, &all, on_token, &seen, &result, &status) == WEFT_OK);
  EXPECT(all == count + 20 && memcmp(tokens, by_hand, all * sizeof *tokens) == 0);
  EXPECT(seen.count == 20 && memcmp(seen.tokens, tokens + count, sizeof *tokens * 20) == 0);
  EXPECT(seen.logprob < 0 && seen.top_count == 2);
  EXPECT(result.stop == WEFT_STOP_LENGTH && result.written_tokens == 20 && result.prompt_tokens == (int64_t)count);
  EXPECT(result.draft_proposed >= result.draft_accepted);

  /* Under a frequency penalty no token is written twice. */
  all = count;
  options.frequency_penalty = 100;
  REQUIRE(weft_state_reset(state, 0, &status) == WEFT_OK);
  REQUIRE(weft_generate(model, stream, state, &options, tokens, kRoom, &all, NULL, NULL, NULL, &status) == WEFT_OK);
  for (size_t i = count; i < all; ++i)
    for (size_t j = count; j < i; ++j) EXPECT(tokens[i] != tokens[j]);
  options.frequency_penalty = 0;

  /* A callback stops; a stop string cuts. */
  memset(&seen, 0, sizeof seen);
  seen.stop_after = 5;
  all = count;
  EXPECT(weft_state_reset(state, 0, &status) == WEFT_OK);
  EXPECT(weft_generate(model, stream, state, &options, tokens, kRoom, &all, on_token, &seen, &result, &status) == WEFT_OK);
  EXPECT(result.stop == WEFT_STOP_CALLBACK && all == count + 5);
  const char* stops[] = {"no such text", "sea"};
  options.stop_strings = stops;
  options.stop_string_count = 2;
  memset(&seen, 0, sizeof seen);
  all = count;
  EXPECT(weft_state_reset(state, 0, &status) == WEFT_OK);
  EXPECT(weft_generate(model, stream, state, &options, tokens, kRoom, &all, on_token, &seen, &result, &status) == WEFT_OK);
  EXPECT(result.stop == WEFT_STOP_STOP_STRING && result.stop_index == 1 && !strstr(seen.text, "sea"));
  weft_state_free(state);
  return EXIT_SUCCESS;
}

/* Fork, rollback, save and load give the sequence back. */
static int test_states(const weft_model* model, const weft_stream* stream, const char* file) {
  const int32_t tokens[] = {10, 20, 30, 40, 50, 60};
  int32_t loaded[8];
  size_t count = 0;
  int32_t best = -1, after_rollback = -2, after_load = -3;
  weft_state *state = NULL, *other = NULL;
  weft_state_options how = {.struct_size = sizeof how, .sequences = 2, .rollback = 2};
  REQUIRE(weft_state_create(model, stream, &how, &state, &status) == WEFT_OK);
  weft_model_input input = {.tokens = tokens, .token_count = 4};
  EXPECT(weft_model_append(model, stream, state, &input, 1, &status) == WEFT_OK);
  EXPECT(weft_state_fork(state, 0, 1, &status) == WEFT_OK && weft_state_tokens(state, 1) == 4);
  weft_model_input next = {.tokens = tokens + 4, .token_count = 1, .best = &best};
  EXPECT(weft_model_append(model, stream, state, &next, 1, &status) == WEFT_OK);
  next.sequence = 1;
  next.token_count = 2;
  next.best = NULL;
  EXPECT(weft_model_append(model, stream, state, &next, 1, &status) == WEFT_OK);
  EXPECT(weft_state_rollable(state, 1) == 2);
  EXPECT(weft_state_rollback(stream, state, 1, 2, &status) == WEFT_OK && weft_state_tokens(state, 1) == 4);
  next.token_count = 1;
  next.best = &after_rollback;
  EXPECT(weft_model_append(model, stream, state, &next, 1, &status) == WEFT_OK);
  EXPECT(after_rollback == best);

  EXPECT(weft_state_rollback(stream, state, 1, 1, &status) == WEFT_OK);
  EXPECT(weft_state_save(model, state, 1, file, tokens, 6, &status) == WEFT_OK);
  REQUIRE(weft_state_create(model, stream, NULL, &other, &status) == WEFT_OK);
  EXPECT(weft_state_load(model, other, 0, file, loaded, 5, &count, &status) == WEFT_INVALID_ARGUMENT && count == 6);
  EXPECT(strcmp(status.message, "state_load: capacity is 5, the file has 6 tokens") == 0 && weft_state_tokens(other, 0) == 0);
  EXPECT(weft_state_load(model, other, 0, file, loaded, 8, &count, &status) == WEFT_OK);
  EXPECT(count == 6 && memcmp(loaded, tokens, sizeof tokens) == 0 && weft_state_tokens(other, 0) == 4);
  next.sequence = 0;
  next.best = &after_load;
  EXPECT(weft_model_append(model, stream, other, &next, 1, &status) == WEFT_OK);
  EXPECT(after_load == best);
  weft_state_free(state);
  weft_state_free(other);
  remove(file);
  return EXIT_SUCCESS;
}

enum { kWriters = 2, kTurns = 6 };

/* One program: loads, appends its number, and saves, a few times. */
static int write_turns(const char* directory, const char* file, int32_t number) {
  weft_model* model = NULL;
  weft_stream stream = {.struct_size = sizeof stream, .threads = 1};
  weft_state_lock_options wait = {.struct_size = sizeof wait, .has_wait = 1, .wait = 600};
  REQUIRE(weft_model_load(directory, NULL, &model, &status) == WEFT_OK);
  for (int turn = 0; turn < kTurns; ++turn) {
    int32_t tokens[kRoom];
    size_t count = 0;
    weft_state_lock* lock = NULL;
    weft_state* state = NULL;
    REQUIRE(weft_state_create(model, &stream, NULL, &state, &status) == WEFT_OK);
    REQUIRE(weft_state_lock_open(file, &wait, &lock, &status) == WEFT_OK);
    if (weft_state_lock_exists(lock))
      REQUIRE(weft_state_lock_load(model, lock, state, 0, tokens, kRoom, &count, &status) == WEFT_OK);
    tokens[count] = number;
    weft_model_input input = {.tokens = tokens + count, .token_count = 1};
    REQUIRE(weft_model_append(model, &stream, state, &input, 1, &status) == WEFT_OK);
    REQUIRE(weft_state_lock_save(model, lock, state, 0, tokens, count + 1, &status) == WEFT_OK);
    weft_state_lock_close(lock);
    weft_state_free(state);
  }
  weft_model_free(model);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Two programs continue one file. Called while this process has one thread. */
static int test_race(const char* directory, const char* file) {
  pid_t writers[kWriters];
  remove(file);
  for (int32_t i = 0; i < kWriters; ++i) {
    writers[i] = fork();
    REQUIRE(writers[i] >= 0);
    if (writers[i] == 0) _exit(write_turns(directory, file, 100 + i));
  }
  for (int i = 0; i < kWriters; ++i) {
    int ended = -1;
    EXPECT(waitpid(writers[i], &ended, 0) == writers[i] && ended == 0);
  }
  return EXIT_SUCCESS;
}

static int test_raced(const weft_model* model, const weft_stream* stream, const char* file) {
  int32_t tokens[kRoom];
  size_t count = 0, turns[kWriters] = {0};
  weft_state* state = NULL;
  REQUIRE(weft_state_create(model, stream, NULL, &state, &status) == WEFT_OK);
  REQUIRE(weft_state_load(model, state, 0, file, tokens, kRoom, &count, &status) == WEFT_OK);
  EXPECT(count == kWriters * kTurns && weft_state_tokens(state, 0) == kWriters * kTurns);
  for (size_t i = 0; i < count; ++i)
    if (tokens[i] >= 100 && tokens[i] < 100 + kWriters) ++turns[tokens[i] - 100];
  for (int i = 0; i < kWriters; ++i) EXPECT(turns[i] == kTurns);
  weft_state_free(state);
  remove(file);
  return EXIT_SUCCESS;
}

typedef struct Waited {
  int64_t process;
  int calls, tell; /* the end of a pipe */
} Waited;

static void on_wait(int64_t process, void* user) {
  Waited* waited = user;
  waited->process = process;
  ++waited->calls;
  EXPECT(write(waited->tell, "x", 1) == 1);
}

/* Another process holds the file until the callback tells it to stop. */
static int test_wait(const char* file) {
  int held[2], done[2], ended = -1;
  char byte = 0, wanted[64];
  weft_state_lock* lock = (weft_state_lock*)&failures;
  REQUIRE(pipe(held) == 0 && pipe(done) == 0);
  const pid_t holder = fork();
  REQUIRE(holder >= 0);
  if (holder == 0) {
    const int good =
        weft_state_lock_open(file, NULL, &lock, NULL) == WEFT_OK && write(held[1], "x", 1) == 1 && read(done[0], &byte, 1) == 1;
    weft_state_lock_close(lock);
    _exit(good ? EXIT_SUCCESS : EXIT_FAILURE);
  }
  REQUIRE(read(held[0], &byte, 1) == 1);
  weft_state_lock_options options = {.struct_size = sizeof options, .has_wait = 1};
  EXPECT(weft_state_lock_open(file, &options, &lock, &status) == WEFT_INVALID_ARGUMENT && lock == NULL);
  EXPECT(strcmp(status.argument, "wait") == 0);
  snprintf(wanted, sizeof wanted, ": is held by process %d; nothing was changed", (int)holder);
  EXPECT(strstr(status.message, wanted) != NULL);
  Waited waited = {.tell = done[1]};
  options = (weft_state_lock_options){.struct_size = sizeof options, .on_wait = on_wait, .user = &waited};
  EXPECT(weft_state_lock_open(file, &options, &lock, &status) == WEFT_OK);
  EXPECT(waited.calls == 1 && waited.process == holder);
  EXPECT(weft_state_lock_exists(lock) == 0);
  weft_state_lock_close(lock);
  EXPECT(waitpid(holder, &ended, 0) == holder && ended == 0);
  for (int i = 0; i < 2; ++i) {
    close(held[i]);
    close(done[i]);
  }
  return EXIT_SUCCESS;
}

static int test_lock(const weft_model* model, const weft_stream* stream, const char* file) {
  const int32_t tokens[] = {10, 20, 30};
  int32_t loaded[4] = {0};
  size_t count = 0;
  weft_state* state = NULL;
  weft_state_lock *lock = NULL, *second = NULL;
  weft_state_lock_options options = {.struct_size = sizeof options, .has_wait = 1};
  REQUIRE(weft_state_create(model, stream, NULL, &state, &status) == WEFT_OK);
  REQUIRE(weft_state_lock_open(file, &options, &lock, &status) == WEFT_OK);
  EXPECT(weft_state_lock_exists(lock) == 0);
  EXPECT(weft_state_lock_load(model, lock, state, 0, loaded, 4, &count, &status) == WEFT_INVALID_ARGUMENT);
  weft_model_input input = {.tokens = tokens, .token_count = 2};
  EXPECT(weft_model_append(model, stream, state, &input, 1, &status) == WEFT_OK);
  EXPECT(weft_state_lock_save(model, lock, state, 0, tokens, 3, &status) == WEFT_OK && weft_state_lock_exists(lock) == 1);
  EXPECT(weft_state_lock_save(model, lock, state, 0, tokens, 3, &status) == WEFT_OK);
  EXPECT(weft_state_lock_open(file, &options, &second, &status) == WEFT_INVALID_ARGUMENT && second == NULL);
  EXPECT(weft_state_reset(state, 0, &status) == WEFT_OK);
  EXPECT(weft_state_lock_load(model, lock, state, 0, NULL, 0, &count, &status) == WEFT_INVALID_ARGUMENT && count == 3);
  EXPECT(strcmp(status.message, "state_lock_load: capacity is 0, the file has 3 tokens") == 0 && weft_state_tokens(state, 0) == 0);
  EXPECT(weft_state_lock_load(model, lock, state, 0, loaded, 4, &count, &status) == WEFT_OK && count == 3);
  EXPECT(memcmp(loaded, tokens, sizeof tokens) == 0 && weft_state_tokens(state, 0) == 2);

  /* A program that knows no locks replaces the file. Asking for the number of tokens is not loading. */
  char other[4096];
  REQUIRE(snprintf(other, sizeof other, "%s.other", file) < (int)sizeof other);
  EXPECT(weft_state_save(model, state, 0, other, tokens, 2, &status) == WEFT_OK && rename(other, file) == 0);
  EXPECT(weft_state_lock_load(model, lock, state, 0, NULL, 0, &count, &status) == WEFT_INVALID_ARGUMENT && count == 2);
  EXPECT(weft_state_lock_save(model, lock, state, 0, tokens, 3, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strstr(status.message, ": was changed by another process since it was read; nothing was saved") != NULL);
  EXPECT(weft_state_lock_load(model, lock, state, 0, loaded, 4, &count, &status) == WEFT_OK);
  EXPECT(weft_state_lock_save(model, lock, state, 0, tokens, 3, &status) == WEFT_OK);
  weft_state_lock_close(lock);
  weft_state_lock_close(NULL);
  EXPECT(weft_state_lock_exists(NULL) == 0);

  /* Arguments. */
  options.wait = -1;
  EXPECT(weft_state_lock_open(file, &options, &lock, &status) == WEFT_INVALID_ARGUMENT && lock == NULL);
  options.has_wait = 2;
  EXPECT(weft_state_lock_open(file, &options, &lock, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "state_lock_open: options.has_wait is 2, wanted 0 or 1") == 0);
  options = (weft_state_lock_options){.struct_size = sizeof options, .reserved = 1};
  EXPECT(weft_state_lock_open(file, &options, &lock, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(weft_state_lock_open(NULL, NULL, &lock, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(weft_state_lock_open(file, NULL, NULL, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(weft_state_lock_save(model, NULL, state, 0, tokens, 3, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "state_lock_save: lock is null") == 0);
  EXPECT(weft_state_lock_load(model, NULL, state, 0, loaded, 4, &count, &status) == WEFT_INVALID_ARGUMENT);
  weft_state_free(state);
  remove(file);
  return EXIT_SUCCESS;
}

static void test_refusals(const weft_model* model) {
  weft_model* none = (weft_model*)&failures;
  weft_state* state = NULL;
  weft_generate_options options = greedy(5);
  int32_t tokens[4] = {1, 2, 3, 4};
  size_t count = 1;
  EXPECT(weft_model_load("/no/such/model", NULL, &none, &status) == WEFT_INVALID_ARGUMENT && none == NULL);
  EXPECT(strstr(status.message, "/no/such/model/config.json") != NULL);
  EXPECT(weft_model_load(NULL, NULL, &none, NULL) == WEFT_INVALID_ARGUMENT);
  EXPECT(weft_model_encode(NULL, "a", 1, tokens, 4, &count, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "model_encode: model is null") == 0);
  EXPECT(weft_state_create(model, NULL, NULL, &state, &status) == WEFT_OK);
  count = 1;
  EXPECT(weft_generate(model, NULL, state, &options, tokens, 4, &count, NULL, NULL, NULL, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "generate: capacity is 4, wanted room for 1 tokens and 5 more") == 0);
  options.max_tokens = -1;
  EXPECT(weft_generate(model, NULL, state, &options, tokens, 4, &count, NULL, NULL, NULL, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.op, "generator") == 0 && strcmp(status.argument, "max_tokens") == 0);
  options.max_tokens = 1;
  options.ignore_end_tokens = 2;
  EXPECT(weft_generate(model, NULL, state, &options, tokens, 4, &count, NULL, NULL, NULL, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(weft_state_fork(state, 0, 1, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(count == 1 && weft_state_tokens(state, 0) == 0);
  weft_state_free(state);
  weft_state_free(NULL);
  weft_model_free(NULL);
}

int main(int argc, char** argv) {
  weft_model* model = NULL;
  weft_stream stream = {.struct_size = sizeof stream, .threads = 1};
  if (argc != 3) return EXIT_FAILURE; /* the model's directory, and a file to write */
  if (test_race(argv[1], argv[2])) return EXIT_FAILURE;
  REQUIRE(weft_model_load(argv[1], NULL, &model, &status) == WEFT_OK);
  if (test_raced(model, &stream, argv[2]) || test_wait(argv[2]) || test_lock(model, &stream, argv[2])) ++failures;
  if (test_text(model) || test_generation(model, &stream) || test_states(model, &stream, argv[2])) ++failures;
  test_refusals(model);
  weft_model_free(model);
  if (failures == 0) printf("weft %s: models from C\n", weft_version());
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

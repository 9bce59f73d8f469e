/* The C interface of models, as a C program sees it: the bundled model is loaded from libweft_c and continues a text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "weft/c_model.h"

/* The layout that the ABI promises on 64-bit machines. */
_Static_assert(sizeof(void*) != 8 || sizeof(weft_model_options) == 16, "weft_model_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_state_options) == 40, "weft_state_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_model_input) == 48, "weft_model_input");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_generate_options) == 192, "weft_generate_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_generated_token) == 40, "weft_generated_token");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_generate_result) == 88, "weft_generate_result");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_plan_options) == 48, "weft_plan_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_model_bytes) == 88, "weft_model_bytes");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_prefix_store_options) == 32, "weft_prefix_store_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_prefix_store_stats) == 88, "weft_prefix_store_stats");

static int failures = 0;
static weft_status status = {.struct_size = sizeof(weft_status)};

static void expect(int good, const char* what, int line) {
  if (good) return;
  fprintf(stderr, "%d: %s (last message: %s)\n", line, what, status.message);
  ++failures;
}
#define EXPECT(good) expect((good), #good, __LINE__)
#define REQUIRE(good)      \
  do {                     \
    if (!(good)) {         \
      EXPECT(good);        \
      return EXIT_FAILURE; \
    }                      \
  } while (0)

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

/* A model of two tensors that contradict its config.json: what a caller shows to people. */
static int test_warnings(const char* directory) {
  weft_model* model = NULL;
  size_t bytes = 0;
  char text[512];
  REQUIRE(weft_model_load(directory, NULL, &model, &status) == WEFT_OK);
  EXPECT(weft_model_warning_count(model) == 1 && weft_model_has_tokenizer(model) == 0);
  EXPECT(weft_model_warning(model, 0, text, sizeof text, &bytes, &status) == WEFT_OK && bytes == strlen(text));
  EXPECT(strstr(text, "config.json says that lm_head.weight") != NULL);
  EXPECT(weft_model_warning(model, 1, text, sizeof text, &bytes, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "model_warning: index is 1, the model has 1 warnings") == 0);
  weft_model_free(model);
  return EXIT_SUCCESS;
}

/* The plan of memory is that of the states that are then made. */
static int test_plan(const weft_model* model, const weft_stream* stream) {
  int32_t tokens[kRoom] = {0};
  weft_state* state = NULL;
  weft_plan_options options = {.struct_size = sizeof options, .context = kRoom, .sequences = 2, .rollback = 4};
  weft_state_options how = {.struct_size = sizeof how, .capacity = kRoom, .sequences = 2, .rollback = 4};
  weft_model_bytes planned = {.struct_size = sizeof planned}, f16 = planned, larger = planned;
  REQUIRE(weft_model_plan(model, stream, &options, &planned, &status) == WEFT_OK);
  REQUIRE(weft_state_create(model, stream, &how, &state, &status) == WEFT_OK);
  weft_model_input inputs[2] = {{.tokens = tokens, .token_count = kRoom}, {.sequence = 1, .tokens = tokens, .token_count = kRoom}};
  REQUIRE(weft_model_append(model, stream, state, inputs, 2, &status) == WEFT_OK);
  EXPECT(weft_state_bytes(state) == planned.recurrent + planned.windows + planned.kv + planned.records);
  EXPECT(planned.total == weft_state_bytes(state) + planned.weights + planned.scratch);
  EXPECT(planned.kv == 2 * kRoom * planned.bytes_per_token && planned.copies < planned.weights && planned.records > 0);
  options.kv = "f16";
  options.prompt = 1;
  EXPECT(weft_model_plan(model, stream, &options, &f16, &status) == WEFT_OK);
  EXPECT(f16.bytes_per_token == f16.bytes_per_token_f16 && planned.bytes_per_token_f16 == f16.bytes_per_token);
  EXPECT(f16.scratch < planned.scratch && f16.kv > planned.kv);
  EXPECT(weft_model_plan(model, stream, NULL, &larger, &status) == WEFT_OK && larger.kv == 4096 * larger.bytes_per_token);
  options.prompt = kRoom + 1;
  EXPECT(weft_model_plan(model, stream, &options, &f16, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "model_plan: options.prompt is 257, wanted 0 to the context, 256") == 0);
  options.prompt = 0;
  options.kv = "nonsense";
  EXPECT(weft_model_plan(model, stream, &options, &f16, &status) == WEFT_INVALID_ARGUMENT && strstr(status.message, "nonsense"));
  weft_state_free(state);
  return EXIT_SUCCESS;
}

static weft_generate_options greedy(int64_t max_tokens) {
  weft_generate_options options = {.struct_size = sizeof options};
  options.has_max_tokens = 1;
  options.max_tokens = max_tokens;
  options.has_temperature = 1;
  return options;
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

/* A prompt that begins like an earlier one is restored, and the text is the same. */
static int test_prefix_store(const weft_model* model, const weft_stream* stream) {
  enum { kPrompt = 192 };
  int32_t tokens[kRoom], again[kRoom];
  size_t count = kPrompt, all = kPrompt;
  int64_t restored = -1;
  float* logits = malloc(sizeof(float) * (size_t)weft_model_vocab_size(model));
  weft_state* state = NULL;
  weft_prefix_store* store = NULL;
  weft_prefix_store_options how = {.struct_size = sizeof how, .bytes = 64 << 20, .has_every = 1, .every = 64};
  weft_prefix_store_stats stats = {.struct_size = sizeof stats};
  weft_generate_options options = greedy(8);
  weft_generate_result result = {.struct_size = sizeof result};
  for (int32_t i = 0; i < kPrompt; ++i) tokens[i] = again[i] = 10 + i;
  REQUIRE(logits && weft_state_create(model, stream, NULL, &state, &status) == WEFT_OK);
  REQUIRE(weft_prefix_store_create(&how, &store, &status) == WEFT_OK);
  options.store = store;
  EXPECT(weft_generate(model, stream, state, &options, tokens, kRoom, &count, NULL, NULL, &result, &status) == WEFT_OK);
  EXPECT(result.restored_tokens == 0 && result.prompt_tokens == kPrompt && count == kPrompt + 8);
  EXPECT(weft_generate(model, stream, state, &options, again, kRoom, &all, NULL, NULL, &result, &status) == WEFT_OK);
  EXPECT(result.restored_tokens == 128 && all == count && memcmp(tokens, again, all * sizeof *tokens) == 0);
  EXPECT(weft_prefix_store_read_stats(store, &stats, &status) == WEFT_OK);
  EXPECT(stats.hits == 1 && stats.misses == 1 && stats.tokens == 128 && stats.bytes > 0 && stats.checkpoints > 2);

  EXPECT(weft_prefix_store_restore(store, state, 0, tokens, 70, 70, &restored, &status) == WEFT_OK && restored == 64);
  EXPECT(weft_state_tokens(state, 0) == 64);
  EXPECT(weft_prefix_store_insert(store, state, 0, tokens + 1, 64, &status) == WEFT_OK);
  EXPECT(weft_prefix_store_restore(store, state, 0, tokens + 1, 70, 70, &restored, &status) == WEFT_OK && restored == 64);
  EXPECT(weft_model_prefill(model, stream, state, 0, tokens, 65, logits, store, &restored, &status) == WEFT_OK && restored == 64);
  EXPECT(weft_state_tokens(state, 0) == 65);
  EXPECT(weft_model_prefill(model, stream, state, 0, tokens, 65, logits, NULL, NULL, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "model_prefill: store is null") == 0);
  EXPECT(weft_prefix_store_insert(store, state, 0, tokens, 3, &status) == WEFT_INVALID_ARGUMENT);
  weft_prefix_store_free(store);
  how.every = 65;
  EXPECT(weft_prefix_store_create(&how, &store, &status) == WEFT_INVALID_ARGUMENT && store == NULL);
  EXPECT(strcmp(status.op, "prefix_store") == 0 && strcmp(status.argument, "every") == 0);
  how.recurrent = 4;
  EXPECT(weft_prefix_store_create(&how, &store, &status) == WEFT_INVALID_ARGUMENT);
  EXPECT(strcmp(status.message, "prefix_store_create: options.recurrent is 4, wanted 0..3") == 0);
  weft_prefix_store_free(NULL);
  weft_state_free(state);
  free(logits);
  return EXIT_SUCCESS;
}

typedef struct Steps {
  int64_t calls, done, all, stop_after;
} Steps;

static int32_t on_prompt(int64_t done, int64_t all, void* user) {
  Steps* steps = user;
  ++steps->calls;
  EXPECT(done > steps->done);
  steps->done = done;
  steps->all = all;
  return steps->calls == steps->stop_after;
}

/* A prompt of several steps reports each, and can be stopped between two of them. */
static int test_progress(const weft_model* model, const weft_stream* stream) {
  enum { kPrompt = 3000 };
  static int32_t tokens[kPrompt + 1];
  size_t count = kPrompt;
  weft_state* state = NULL;
  weft_generate_options options = greedy(1);
  weft_generate_result result = {.struct_size = sizeof result};
  Steps steps = {.stop_after = 1};
  REQUIRE(weft_state_create(model, stream, NULL, &state, &status) == WEFT_OK);
  options.on_prompt = on_prompt;
  options.on_prompt_user = &steps;
  EXPECT(weft_generate(model, stream, state, &options, tokens, kPrompt + 1, &count, NULL, NULL, &result, &status) == WEFT_OK);
  EXPECT(result.stop == WEFT_STOP_CALLBACK && steps.calls == 1 && steps.all == kPrompt && steps.done < kPrompt);
  EXPECT(count == kPrompt && weft_state_tokens(state, 0) == steps.done);
  const int64_t left = kPrompt - steps.done;
  steps = (Steps){.stop_after = -1};
  EXPECT(weft_generate(model, stream, state, &options, tokens, kPrompt + 1, &count, NULL, NULL, &result, &status) == WEFT_OK);
  EXPECT(result.stop == WEFT_STOP_LENGTH && steps.calls > 1 && steps.done == left && steps.all == left && count == kPrompt + 1);
  /* A caller built with an older header knows neither the callback nor the store. */
  options.struct_size = offsetof(weft_generate_options, store);
  steps = (Steps){.stop_after = 1};
  count = 1;
  EXPECT(weft_state_reset(state, 0, &status) == WEFT_OK);
  EXPECT(weft_generate(model, stream, state, &options, tokens, kPrompt + 1, &count, NULL, NULL, NULL, &status) == WEFT_OK);
  EXPECT(count == 2 && steps.calls == 0);
  weft_state_free(state);
  return EXIT_SUCCESS;
}

/* What generation_config.json of the bundled model says. */
static void test_suggestions(const weft_model* model) {
  weft_generate_options options = {.struct_size = sizeof options, .seed = 7};
  EXPECT(weft_generate_suggest(model, &options, &status) == WEFT_OK);
  EXPECT(options.has_max_tokens == 1 && options.max_tokens == 200);
  EXPECT(options.has_temperature == 1 && options.temperature == 0.8 && options.has_top_p == 1 && options.top_p == 0.95);
  EXPECT(options.has_top_k == 1 && options.top_k == 0 && options.has_repetition_penalty == 1 && options.repetition_penalty == 1);
  EXPECT(options.seed == 7 && options.has_logprobs == 0);
  EXPECT(weft_generate_suggest(NULL, &options, &status) == WEFT_INVALID_ARGUMENT);
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
  if (argc != 4) return EXIT_FAILURE; /* the bundled model, a file to write, a model with a warning */
  REQUIRE(weft_model_load(argv[1], NULL, &model, &status) == WEFT_OK);
  if (test_text(model) || test_generation(model, &stream) || test_states(model, &stream, argv[2]) || test_plan(model, &stream) ||
      test_prefix_store(model, &stream) || test_progress(model, &stream) || test_warnings(argv[3]))
    ++failures;
  test_suggestions(model);
  test_refusals(model);
  weft_model_free(model);
  if (failures == 0) printf("weft %s: models from C\n", weft_version());
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Memory and progress from C: the plan of memory, prefix stores, prompts that report their steps, and what a checkpoint says of itself. */
#include "support/model_c.h"

/* The layout that the ABI promises on 64-bit machines. */
_Static_assert(sizeof(void*) != 8 || sizeof(weft_plan_options) == 48, "weft_plan_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_model_bytes) == 88, "weft_model_bytes");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_prefix_store_options) == 32, "weft_prefix_store_options");
_Static_assert(sizeof(void*) != 8 || sizeof(weft_prefix_store_stats) == 88, "weft_prefix_store_stats");

enum { kRoom = 256 };

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
  /* A store reports and stops in the same way. Restored tokens count as read. */
  weft_prefix_store* store = NULL;
  const weft_prefix_store_options how = {.struct_size = sizeof how, .bytes = 64 << 20, .has_every = 1, .every = 0};
  REQUIRE(weft_prefix_store_create(&how, &store, &status) == WEFT_OK);
  options.store = store;
  steps = (Steps){.stop_after = 1};
  count = kPrompt;
  EXPECT(weft_generate(model, stream, state, &options, tokens, kPrompt + 1, &count, NULL, NULL, &result, &status) == WEFT_OK);
  EXPECT(result.stop == WEFT_STOP_CALLBACK && steps.calls == 1 && steps.all == kPrompt && steps.done < kPrompt);
  EXPECT(count == kPrompt && weft_state_tokens(state, 0) == steps.done);
  const int64_t stored = steps.done;
  steps = (Steps){.stop_after = -1, .done = stored};
  EXPECT(weft_generate(model, stream, state, &options, tokens, kPrompt + 1, &count, NULL, NULL, &result, &status) == WEFT_OK);
  EXPECT(result.restored_tokens == stored && steps.calls > 1 && steps.done == kPrompt && count == kPrompt + 1);
  weft_prefix_store_free(store);
  /* A caller built with an older header knows neither the callback nor the store. */
  options.store = NULL;
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

int main(int argc, char** argv) {
  weft_model* model = NULL;
  weft_stream stream = {.struct_size = sizeof stream, .threads = 1};
  if (argc != 3) return EXIT_FAILURE; /* the bundled model, and a model with a warning */
  REQUIRE(weft_model_load(argv[1], NULL, &model, &status) == WEFT_OK);
  if (test_plan(model, &stream) || test_prefix_store(model, &stream) || test_progress(model, &stream) || test_warnings(argv[2]))
    ++failures;
  test_suggestions(model);
  weft_model_free(model);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

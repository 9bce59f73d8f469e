// Generation from C: see weft/c_model.h.
#include "weft/generate.h"

#include <algorithm>

#include "c_model/handles.h"

namespace weft::c {
namespace {

constexpr const char* kOp = "generate";

static_assert(WEFT_STOP_LENGTH == static_cast<int>(StopReason::length) &&
              WEFT_STOP_END_TOKEN == static_cast<int>(StopReason::end_token) &&
              WEFT_STOP_STOP_TOKEN == static_cast<int>(StopReason::stop_token) &&
              WEFT_STOP_STOP_STRING == static_cast<int>(StopReason::stop_string) &&
              WEFT_STOP_SENTENCE_END == static_cast<int>(StopReason::sentence_end) &&
              WEFT_STOP_CAPACITY == static_cast<int>(StopReason::capacity) &&
              WEFT_STOP_CALLBACK == static_cast<int>(StopReason::callback));

GenerateOptions to_options(const Model& model, const weft_generate_options* options) {
  GenerateOptions out = suggested_options(model);
  if (!options) return out;
  const weft_generate_options given = full_copy(kOp, "options", options);
  const auto has = [](const char* argument, int32_t value) { return flag(kOp, argument, value); };
  out.sequence = given.sequence;
  if (has("options.has_max_tokens", given.has_max_tokens)) out.max_tokens = given.max_tokens;
  Sampling& sampling = out.sampling;
  sampling.seed = given.seed;
  if (has("options.has_top_k", given.has_top_k)) sampling.top_k = given.top_k;
  if (has("options.has_temperature", given.has_temperature)) sampling.temperature = given.temperature;
  if (has("options.has_top_p", given.has_top_p)) sampling.top_p = given.top_p;
  if (has("options.has_repetition_penalty", given.has_repetition_penalty)) sampling.repetition_penalty = given.repetition_penalty;
  sampling.min_p = given.min_p;
  sampling.presence_penalty = given.presence_penalty;
  sampling.frequency_penalty = given.frequency_penalty;
  if (has("options.has_logprobs", given.has_logprobs)) out.logprobs = given.logprobs;
  if (has("options.has_sentence_after", given.has_sentence_after)) out.sentence_after = given.sentence_after;
  out.draft = given.draft;
  for (const char* text : list(kOp, "options.stop_strings", given.stop_strings, given.stop_string_count))
    out.stop_strings.emplace_back(&not_null(kOp, "options.stop_strings", text));
  const auto stop_tokens = list(kOp, "options.stop_tokens", given.stop_tokens, given.stop_token_count);
  out.stop_tokens.assign(stop_tokens.begin(), stop_tokens.end());
  out.ignore_end_tokens = has("options.ignore_end_tokens", given.ignore_end_tokens);
  out.special_text = !has("options.no_special_text", given.no_special_text);
  if (given.store) out.store = &given.store->store;
  return out;
}

weft::PromptCallback to_prompt_callback(const weft_generate_options* options) {
  if (!options) return {};
  const weft_generate_options given = full_copy(kOp, "options", options);
  if (!given.on_prompt) return {};
  return [given](int64_t done, int64_t all) { return given.on_prompt(done, all, given.on_prompt_user) == 0; };
}

// Passes a token to a callback of C. Its text needs a terminating zero, and its list the struct of C.
bool call(weft_generate_callback callback, void* user, const GeneratedToken& next) {
  const std::string text(next.text);
  std::vector<weft_token_logprob> top;
  for (const TokenLogprob& entry : next.top) top.push_back({entry.token, entry.logprob});
  const weft_generated_token token{next.token.value_or(-1), next.logprob, text.c_str(), text.size(), top.data(), top.size()};
  return callback(&token, user) == 0;
}

void report_result(const Generation& done, weft_generate_result* result) {
  if (!result) return;
  weft_generate_result full = full_copy(kOp, "result", result);
  full.stop = static_cast<int32_t>(done.stop);
  full.stop_index = done.stop_index;
  full.prompt_tokens = done.prompt_tokens;
  full.written_tokens = static_cast<int64_t>(done.tokens.size());
  full.prefill_seconds = done.prefill.seconds;
  full.decode_seconds = done.decode.seconds;
  full.draft_proposed = done.draft.proposed;
  full.draft_accepted = done.draft.accepted;
  full.steps = done.draft.steps;
  full.restored_tokens = done.restored_tokens;
  std::memcpy(result, &full, full.struct_size);
}

}  // namespace
}  // namespace weft::c

extern "C" weft_code weft_generate(const weft_model* model, const weft_stream* stream, weft_state* state,
                                   const weft_generate_options* options, int32_t* tokens, size_t capacity, size_t* token_count,
                                   weft_generate_callback callback, void* user, weft_generate_result* result, weft_status* status) {
  using namespace weft::c;
  return guarded(kOp, status, [&] {
    const weft::Model& runs = not_null(kOp, "model", model).model;
    weft::HybridState& memory = not_null(kOp, "state", state).state;
    size_t& count = not_null(kOp, "token_count", token_count);
    const auto given = list(kOp, "tokens", tokens, count);
    if (result) full_copy(kOp, "result", result);  // refuses an unknown size before the work
    const weft::Generator generator(runs, to_options(runs, options), to_stream(kOp, stream));
    const auto most = static_cast<size_t>(generator.options().max_tokens);
    if (count > capacity || capacity - count < most)
      refuse(kOp, "capacity",
             "is " + std::to_string(capacity) + ", wanted room for " + std::to_string(count) + " tokens and " +
                 std::to_string(most) + " more");
    std::vector<int32_t> sequence(given.begin(), given.end());
    weft::TokenCallback on_token;
    if (callback) on_token = [&](const weft::GeneratedToken& next) { return call(callback, user, next); };
    const weft::Generation done = generator.run(memory, sequence, on_token, to_prompt_callback(options));
    std::copy(sequence.begin() + static_cast<std::ptrdiff_t>(count), sequence.end(), tokens + count);
    count = sequence.size();
    report_result(done, result);
  });
}

extern "C" weft_code weft_generate_suggest(const weft_model* model, weft_generate_options* options, weft_status* status) {
  using namespace weft::c;
  constexpr const char* kSuggest = "generate_suggest";
  return guarded(kSuggest, status, [&] {
    weft_generate_options full = full_copy(kSuggest, "options", options);
    const weft::GenerateOptions suggested = weft::suggested_options(not_null(kSuggest, "model", model).model);
    full.max_tokens = suggested.max_tokens;
    full.temperature = suggested.sampling.temperature;
    full.top_p = suggested.sampling.top_p;
    full.top_k = suggested.sampling.top_k;
    full.repetition_penalty = suggested.sampling.repetition_penalty;
    full.has_max_tokens = full.has_temperature = full.has_top_p = full.has_top_k = full.has_repetition_penalty = 1;
    std::memcpy(options, &full, full.struct_size);
  });
}

// The loop that continues a text: see weft/generate.h.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "core/check.h"
#include "model/generate/draft.h"
#include "model/generate/writer.h"
#include "model/parts.h"
#include "weft/generate.h"

namespace weft {
namespace {

constexpr const char* kOp = "generator";
constexpr int64_t kSingleSteps = 4;  // steps of one token before the first draft; the speed of drafts is compared with theirs

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// One run of a Generator: the steps of the model, and the writer that their logits go to.
class Run {
 public:
  Run(const Model& model, const Stream& stream, const GenerateOptions& options, HybridState& state, std::vector<int32_t>& tokens,
      const TokenCallback& on_token, const PromptCallback& on_prompt);
  Generation go();

 private:
  bool read_prompt();  // false: a callback stopped
  void decode_step();
  // Chooses a token from each of the first `count` rows of logits in turn, up to the first that differs from its proposal or stops
  // the run. Returns how many proposals were accepted.
  size_t choose(size_t count);
  int64_t held() const { return state_.tokens(options_.sequence); }

  const Model& model_;
  const Stream& stream_;
  const GenerateOptions& options_;
  HybridState& state_;
  std::vector<int32_t>& tokens_;
  const PromptCallback& on_prompt_;

  model::Writer writer_;  // keeps an exception of a callback; go() throws it once the state is consistent
  Generation& out_;
  std::vector<float> logits_;             // [draft + 1, vocab_size]
  std::vector<int32_t> proposed_, step_;  // the draft of a step, and all its tokens
};

Run::Run(const Model& model, const Stream& stream, const GenerateOptions& options, HybridState& state, std::vector<int32_t>& tokens,
         const TokenCallback& on_token, const PromptCallback& on_prompt)
    : model_(model),
      stream_(stream),
      options_(options),
      state_(state),
      tokens_(tokens),
      on_prompt_(on_prompt),
      writer_(model, stream, options, options.sampling, on_token),
      out_(writer_.result()) {
  const auto refuse = [](const char* argument, const std::string& what) {
    throw Error(fail(Code::invalid_argument, kOp, argument, what));
  };
  model::check_owner(kOp, model, state);
  if (options.sequence < 0 || options.sequence >= state.sequences())
    refuse("sequence", "is " + std::to_string(options.sequence) + ", the state holds " + std::to_string(state.sequences()));
  const int64_t known = options.store ? 0 : held(), count = static_cast<int64_t>(tokens.size());
  if (count <= known)
    refuse("tokens",
           "are " + std::to_string(count) + ", and the state holds " + std::to_string(known) + "; wanted at least one more");
  const ModelInput prompt{.sequence = options.sequence, .tokens = std::span(tokens).subspan(static_cast<size_t>(known))};
  model::check_append(kOp, model::parts_of(model).config, stream, state, {&prompt, 1}, options.store != nullptr);
  if (options.draft > state.plan().rollback)
    refuse("draft", "is " + std::to_string(options.draft) + ", the state can roll back " + std::to_string(state.plan().rollback) +
                        " tokens (HybridPlan::rollback)");
  out_.prompt_tokens = count - known;
  logits_.resize(static_cast<size_t>(model.vocab_size() * (options.draft + 1)));
}

Generation Run::go() {
  writer_.see(tokens_);
  if (!read_prompt()) writer_.stop(StopReason::callback);
  const auto begin = Clock::now();
  if (!writer_.stopped() && options_.max_tokens > 0) choose(1);
  while (!writer_.stopped() && writer_.written() < options_.max_tokens) {
    if (held() >= state_.plan().capacity)
      writer_.stop(StopReason::capacity);
    else
      decode_step();
  }
  writer_.finish_text();
  out_.decode.seconds = since(begin);
  // A later prompt may begin with what the state holds now.
  if (options_.store && held() > 0)
    options_.store->insert(state_, options_.sequence, std::span(tokens_).first(static_cast<size_t>(held())));
  if (writer_.thrown()) std::rethrow_exception(writer_.thrown());
  return std::move(out_);
}

bool Run::read_prompt() {
  const auto begin = Clock::now();
  ModelTimes* const times = &out_.prefill.times;
  const int64_t all = out_.prompt_tokens;
  bool proceed = true;
  if (options_.store) {
    const PromptCallback on_step = [&](int64_t done, int64_t count) { return proceed = writer_.ask(on_prompt_, done, count); };
    out_.restored_tokens =
        model_.prefill(stream_, state_, options_.sequence, tokens_, logits_.data(), *options_.store, times, on_step);
    out_.prefill.tokens = held() - out_.restored_tokens;
  } else {
    // Steps as large as append() makes them, so that a callback can stop a long prompt between steps at no cost.
    const auto most = static_cast<size_t>(model::step_tokens(stream_, model::parts_of(model_).config));
    auto left = std::span<const int32_t>(tokens_).last(static_cast<size_t>(all));
    while (!left.empty() && proceed) {
      const auto part = left.first(std::min(most, left.size()));
      left = left.subspan(part.size());
      model_.append(stream_, state_,
                    {{.sequence = options_.sequence,
                      .tokens = part,
                      .logits = left.empty() ? logits_.data() : nullptr,
                      .prompt_part = all > kMaxDecodeTokens}},
                    times);
      out_.prefill.tokens += static_cast<int64_t>(part.size());
      proceed = writer_.ask(on_prompt_, out_.prefill.tokens, all);
    }
  }
  out_.prefill.seconds = out_.first_token_seconds = since(begin);
  return proceed;
}

void Run::decode_step() {
  const auto begin = Clock::now();
  const int64_t room = std::min(options_.max_tokens - writer_.written(), state_.plan().capacity - held()) - 1;
  proposed_.clear();
  if (out_.draft.steps >= kSingleSteps) proposed_ = model::propose(tokens_, std::min(options_.draft, room));
  step_.assign(1, tokens_.back());
  step_.insert(step_.end(), proposed_.begin(), proposed_.end());
  model_.append(stream_, state_, {{.sequence = options_.sequence, .tokens = step_, .logits = logits_.data(), .every_token = true}},
                &out_.decode.times);
  const size_t accepted = choose(step_.size());
  if (accepted < proposed_.size()) state_.rollback(stream_, options_.sequence, static_cast<int64_t>(proposed_.size() - accepted));
  out_.decode.tokens += static_cast<int64_t>(accepted) + 1;
  out_.draft.proposed += static_cast<int64_t>(proposed_.size());
  out_.draft.accepted += static_cast<int64_t>(accepted);
  ++out_.draft.steps;
  if (proposed_.empty()) out_.draft.single.push_back(since(begin));
}

size_t Run::choose(size_t count) {
  const auto vocab = static_cast<size_t>(model_.vocab_size());
  for (size_t i = 0;; ++i) {
    const int32_t token = writer_.choose(logits_.data() + i * vocab);
    tokens_.push_back(token);
    writer_.write(token);
    if (i + 1 == count || writer_.stopped() || token != proposed_[i]) return i;
  }
}

}  // namespace

const char* stop_reason_name(StopReason reason) {
  constexpr const char* kNames[] = {"length", "end_token", "stop_token", "stop_string", "sentence_end", "capacity", "callback"};
  const auto i = static_cast<size_t>(reason);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

double DraftStats::single_seconds() const {
  if (single.empty()) return 0;
  std::vector<double> sorted = single;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

double Generation::draft_speed_up() const {
  return decode.seconds > 0 ? static_cast<double>(decode.tokens) * draft.single_seconds() / decode.seconds : 0;
}

GenerateOptions suggested_options(const Model& model) {
  const model::GenerationConfig& suggested = model::parts_of(model).config.generation;
  GenerateOptions options;
  Sampling& sampling = options.sampling;
  sampling.temperature = suggested.do_sample == false ? 0 : suggested.temperature.value_or(sampling.temperature);
  sampling.top_p = suggested.top_p.value_or(sampling.top_p);
  sampling.top_k = suggested.top_k.value_or(sampling.top_k);
  sampling.repetition_penalty = suggested.repetition_penalty.value_or(sampling.repetition_penalty);
  options.max_tokens = suggested.max_new_tokens.value_or(options.max_tokens);
  return options;
}

Generator::Generator(const Model& model, GenerateOptions options, const Stream& stream)
    : model_(&model), options_(std::move(options)), stream_(stream) {
  if (Status status = model::check_options(model, options_, kOp); !status) throw Error(std::move(status));
}

Generation Generator::run(HybridState& state, std::vector<int32_t>& tokens, const TokenCallback& on_token,
                          const PromptCallback& on_prompt) const {
  return Run(*model_, stream_, options_, state, tokens, on_token, on_prompt).go();
}

}  // namespace weft

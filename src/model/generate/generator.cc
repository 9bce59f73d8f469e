// The loop that continues a text: see weft/generate.h.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <string>
#include <utility>

#include "core/check.h"
#include "model/generate/draft.h"
#include "model/generate/sampling.h"
#include "model/generate/text_stream.h"
#include "model/network/cpu/activations.h"
#include "model/parts.h"
#include "weft/generate.h"

namespace weft {
namespace {

constexpr const char* kOp = "generator";
constexpr int64_t kSingleSteps = 4;  // before the first draft: what drafts are compared with

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Status check_options(const Model& model, const GenerateOptions& options) {
  Check check(kOp);
  check.also(model::check_sampling(options.sampling, kOp, "sampling."));
  check.require(options.max_tokens >= 0, "max_tokens",
                [&] { return "is " + std::to_string(options.max_tokens) + ", wanted 0 or more"; });
  check.between("draft", options.draft, 0, kMaxDecodeTokens - 1);
  if (options.logprobs) check.between("logprobs", *options.logprobs, 0, model.vocab_size());
  if (options.sentence_after)
    check.require(*options.sentence_after >= 0, "sentence_after",
                  [&] { return "is " + std::to_string(*options.sentence_after) + ", wanted 0 or more"; });
  for (int32_t token : options.stop_tokens)
    check.require(token >= 0 && token < model.vocab_size(), "stop_tokens", [&] {
      return "hold token " + std::to_string(token) + ", wanted 0 to " + std::to_string(model.vocab_size() - 1);
    });
  check.also(model::check_stop_strings(options.stop_strings, kOp));
  const char* const about_text = options.sentence_after ? "sentence_after" : "stop_strings";
  check.require(model.has_tokenizer() || (options.stop_strings.empty() && !options.sentence_after), about_text,
                "needs text, and the model has no tokenizer.json");
  return std::move(check).status();
}

// One run of a Generator: what it needs, and what it has found so far.
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
  void choose_next(const float* logits);
  void write(int32_t token, const float* logits);
  void find_logprobs(int32_t token, const float* logits, GeneratedToken& out);
  void pass_on(GeneratedToken& next);
  void finish_text();
  void stop(StopReason reason, size_t index = 0) {
    stopped_ = true;
    out_.stop = reason;
    out_.stop_index = index;
  }
  int64_t written() const { return static_cast<int64_t>(out_.tokens.size()); }
  int64_t held() const { return state_.tokens(options_.sequence); }
  // Calls back; an exception stops the run as false does, and go() throws it when the state is in order.
  template <class Callback, class... Values>
  bool ask(const Callback& callback, Values&&... values);

  const Model& model_;
  const Stream& stream_;
  const GenerateOptions& options_;
  HybridState& state_;
  std::vector<int32_t>& tokens_;
  const TokenCallback& on_token_;
  const PromptCallback& on_prompt_;

  Sampler sampler_;
  std::optional<TextStream> text_;  // none where the model has no tokenizer
  model::SentenceEnd sentence_;
  std::vector<float> logits_;             // [draft + 1, vocab_size]
  std::vector<int32_t> proposed_, step_;  // the draft of a step, and all its tokens
  std::vector<TokenLogprob> top_;
  Generation out_;
  bool stopped_ = false;
  std::exception_ptr thrown_;
};

Run::Run(const Model& model, const Stream& stream, const GenerateOptions& options, HybridState& state, std::vector<int32_t>& tokens,
         const TokenCallback& on_token, const PromptCallback& on_prompt)
    : model_(model),
      stream_(stream),
      options_(options),
      state_(state),
      tokens_(tokens),
      on_token_(on_token),
      on_prompt_(on_prompt),
      sampler_(options.sampling) {
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
  if (model.has_tokenizer()) text_.emplace(model, options.stop_strings, options.special_text);
  logits_.resize(static_cast<size_t>(model.vocab_size() * (options.draft + 1)));
}

Generation Run::go() {
  sampler_.see(tokens_);
  if (!read_prompt()) stop(StopReason::callback);
  const auto begin = Clock::now();
  if (!stopped_ && options_.max_tokens > 0) choose(1);
  while (!stopped_ && written() < options_.max_tokens) {
    if (held() >= state_.plan().capacity)
      stop(StopReason::capacity);
    else
      decode_step();
  }
  finish_text();
  out_.decode.seconds = since(begin);
  // A later prompt may begin with what the state holds now.
  if (options_.store && held() > 0)
    options_.store->insert(state_, options_.sequence, std::span(tokens_).first(static_cast<size_t>(held())));
  if (thrown_) std::rethrow_exception(thrown_);
  return std::move(out_);
}

bool Run::read_prompt() {
  const auto begin = Clock::now();
  ModelTimes* const times = &out_.prefill.times;
  const int64_t all = out_.prompt_tokens;
  bool proceed = true;
  if (options_.store) {
    const PromptCallback on_step = [&](int64_t done, int64_t count) { return proceed = ask(on_prompt_, done, count); };
    out_.restored_tokens =
        model_.prefill(stream_, state_, options_.sequence, tokens_, logits_.data(), *options_.store, times, on_step);
    out_.prefill.tokens = held() - out_.restored_tokens;
  } else {
    // Steps of the size that append() would cut anyway, so that a callback can stop a long prompt.
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
      proceed = ask(on_prompt_, out_.prefill.tokens, all);
    }
  }
  out_.prefill.seconds = out_.first_token_seconds = since(begin);
  return proceed;
}

void Run::decode_step() {
  const auto begin = Clock::now();
  const int64_t room = std::min(options_.max_tokens - written(), state_.plan().capacity - held()) - 1;
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
  for (size_t i = 0; i + 1 < count; ++i) {
    choose_next(logits_.data() + i * vocab);
    if (stopped_ || tokens_.back() != proposed_[i]) return i;
  }
  choose_next(logits_.data() + (count - 1) * vocab);
  return count - 1;
}

void Run::choose_next(const float* logits) {
  const int32_t token = sampler_({logits, static_cast<size_t>(model_.vocab_size())});
  tokens_.push_back(token);
  if (model_.ends(token) && !options_.ignore_end_tokens) return stop(StopReason::end_token);
  if (const auto found = std::ranges::find(options_.stop_tokens, token); found != options_.stop_tokens.end())
    return stop(StopReason::stop_token, static_cast<size_t>(found - options_.stop_tokens.begin()));
  write(token, logits);
}

void Run::write(int32_t token, const float* logits) {
  out_.tokens.push_back(token);
  GeneratedToken next;
  next.token = token;
  if (options_.logprobs) find_logprobs(token, logits, next);
  const std::string piece = text_ ? text_->push(token) : std::string();
  next.text = piece;
  if (text_ && text_->stopped()) stop(StopReason::stop_string, *text_->stopped());
  pass_on(next);
}

void Run::find_logprobs(int32_t token, const float* logits, GeneratedToken& out) {
  const int64_t vocab = model_.vocab_size();
  const double sum = model::log_sum_exp(stream_, logits, vocab);
  const auto logprob = [&](int64_t v) { return static_cast<float>(static_cast<double>(logits[v]) - sum); };
  top_.clear();
  for (int32_t v = 0; *options_.logprobs > 0 && v < vocab; ++v)
    if (!std::isnan(logits[v])) top_.push_back({v, logits[v]});
  const auto count = std::min(static_cast<std::ptrdiff_t>(*options_.logprobs), static_cast<std::ptrdiff_t>(top_.size()));
  std::partial_sort(top_.begin(), top_.begin() + count, top_.end(), [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  });
  top_.resize(static_cast<size_t>(count));
  for (TokenLogprob& entry : top_) entry.logprob = logprob(entry.token);
  out.logprob = logprob(token);
  out.top = top_;
  out_.logprobs.push_back(out.logprob);
  out_.top.push_back(top_);
}

void Run::pass_on(GeneratedToken& next) {
  const bool may_end = options_.sentence_after && written() >= *options_.sentence_after;
  if (const auto end = sentence_.find(next.text, may_end)) {
    next.text = next.text.substr(0, *end);
    stop(StopReason::sentence_end);
  }
  out_.text += next.text;
  // A run that a stop rule ended already keeps that reason.
  if (!ask(on_token_, std::as_const(next)) && !stopped_) stop(StopReason::callback);
}

// Passes on the text that was held back, unless a stop rule or a callback cut the text. The rules about text hold for it too.
void Run::finish_text() {
  if (!text_ || out_.stop == StopReason::stop_string || out_.stop == StopReason::sentence_end || out_.stop == StopReason::callback)
    return;
  const std::string rest = text_->finish();
  if (text_->stopped()) stop(StopReason::stop_string, *text_->stopped());
  if (rest.empty()) return;
  GeneratedToken last;
  last.text = rest;
  stopped_ = true;  // the run has ended, so the callback's answer is not its reason
  pass_on(last);
}

template <class Callback, class... Values>
bool Run::ask(const Callback& callback, Values&&... values) {
  if (!callback) return true;
  try {
    return callback(std::forward<Values>(values)...);
  } catch (...) {
    thrown_ = std::current_exception();
    return false;
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
  if (Status status = check_options(model, options_); !status) throw Error(std::move(status));
}

Generation Generator::run(HybridState& state, std::vector<int32_t>& tokens, const TokenCallback& on_token,
                          const PromptCallback& on_prompt) const {
  return Run(*model_, stream_, options_, state, tokens, on_token, on_prompt).go();
}

}  // namespace weft

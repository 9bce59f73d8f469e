// One step of a batcher: a token of every sequence that decodes, and chunks of prompts. See engine.h.
#include <algorithm>
#include <string_view>

#include "cpu/runner-inl.h"
#include "model/batch/engine.h"
#include "model/network/append.h"

namespace weft::model {
namespace {

constexpr const char* kThrown = "ended by an exception of its callback";

}  // namespace

void Engine::step() {
  inputs_.clear();
  pieces_.clear();
  chosen_.clear();
  decoding_.clear();
  bool reading = false;
  for (auto& job : running_) {
    if (job->fault) continue;
    reading |= job->reads();
    if (job->reads()) continue;
    for (Choice& choice : job->choices)
      if (!choice.ended) decoding_.emplace_back(job.get(), &choice);
  }
  const auto decoding = static_cast<int64_t>(decoding_.size());
  if (reading) grant_pieces(pace_.prompt_tokens(decoding));
  if (decoding_.empty() && pieces_.empty()) return;
  const Clock::time_point begin = Clock::now();
  if (!compute()) return;
  int64_t prompt = 0;
  for (const Piece& piece : pieces_) {
    prompt += piece.tokens;
    if (!piece.job->request.prompt_logprobs || read_logprobs(*piece.job, piece.tokens)) finish_piece(*piece.job, piece.tokens);
  }
  choose();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  pace_.measure(decoding, prompt, seconds);
  ++stats_.steps;
  stats_.step_seconds += seconds;
  if (decoding > 0) stats_.longest_step_seconds = std::max(stats_.longest_step_seconds, seconds);
  for (const Chosen& chosen : chosen_)
    if (!chosen.job->fault) write(*chosen.job, *chosen.choice, chosen.token);
}

int64_t Engine::piece_end(const Job& job) const {
  if (!store_ || !job.from_prompts) return job.prompt();
  // The store gets checkpoints at multiples of `every`, and at the last multiple of 64 that leaves at least one token.
  const int64_t last = (job.prompt() - 1) / kCutTokens * kCutTokens;
  if (job.read >= last) return job.prompt();
  return options_.every > 0 ? std::min(last, (job.read / options_.every + 1) * options_.every) : last;
}

// Gives the prompt tokens of a step to the requests that are being prefilled: 64 to each client in turn, and within a client to
// each user in turn. A user's requests are prefilled in order. A piece ends at a multiple of 64 tokens from where the prefill
// began, or at the end of the prompt, so the bits are those of the prompt in one call.
void Engine::grant_pieces(int64_t tokens) {
  struct User {
    std::string_view name;
    std::vector<size_t> pieces;  // indices of pieces_
  };
  struct Client {
    std::string_view name;
    std::vector<User> users;
    uint64_t next = 0;  // index of the user whose turn it is
  };
  const auto named = [](auto& list, std::string_view name) -> auto& {
    const auto found = std::ranges::find_if(list, [&](const auto& entry) { return entry.name == name; });
    if (found != list.end()) return *found;
    auto& entry = list.emplace_back();
    entry.name = name;
    return entry;
  };
  std::vector<Client> clients;
  for (auto& job : running_) {
    if (job->fault || !job->reads()) continue;
    named(named(clients, job->request.client).users, job->request.user).pieces.push_back(pieces_.size());
    pieces_.push_back({job.get(), 0});
  }
  const uint64_t count = clients.size(), turn = turns_++;
  for (Client& client : clients) client.next = turn / count;
  std::rotate(clients.begin(), clients.begin() + static_cast<std::ptrdiff_t>(turn % count), clients.end());
  bool rows_taken = false;  // does a piece of this step use prompt_logits_?
  const auto grant = [&](const User& user) {
    for (const size_t i : user.pieces) {
      Piece& piece = pieces_[i];
      const bool takes_rows = piece.job->request.prompt_logprobs;
      if (takes_rows && rows_taken) continue;
      const int64_t wanted = std::min(kCutTokens, piece_end(*piece.job) - piece.job->read - piece.tokens);
      if (wanted == 0) continue;
      if (wanted > tokens) return false;
      piece.tokens += wanted;
      tokens -= wanted;
      rows_taken |= takes_rows;
      return true;
    }
    return false;
  };
  const auto grant_one = [&](Client& client) {
    for (size_t n = 0; n < client.users.size(); ++n)
      if (grant(client.users[client.next++ % client.users.size()])) return true;
    return false;
  };
  for (bool granted = true; granted;) {
    granted = false;
    for (Client& client : clients) granted |= grant_one(client);
  }
  std::erase_if(pieces_, [](const Piece& piece) { return piece.tokens == 0; });
}

// Runs the model. False: the step failed, and every request of the step fails with it.
bool Engine::compute() {
  for (const auto& [job, choice] : decoding_) {
    inputs_.push_back({.sequence = choice->sequence, .tokens = {&choice->last, 1}, .logits = logits_of(*choice)});
    chosen_.push_back({job, choice, logits_of(*choice), 0});
  }
  for (const Piece& piece : pieces_) {
    const Choice& first = piece.job->choices[0];
    const bool whole = piece.job->read + piece.tokens == piece.job->prompt() && piece.job->request.options.max_tokens > 0,
               every = piece.job->request.prompt_logprobs;
    inputs_.push_back(
        {.sequence = first.sequence,
         .tokens =
             std::span(piece.job->request.tokens).subspan(static_cast<size_t>(piece.job->read), static_cast<size_t>(piece.tokens)),
         .logits = every   ? reinterpret_cast<float*>(prompt_logits_.data())
                   : whole ? logits_of(first)
                           : nullptr,
         .every_token = every,
         .prompt_part = piece.job->prompt_part});
  }
  try {
    model_.append(options_.stream, state_, inputs_);
  } catch (...) {
    const Status fault = fault_of("request", "was in a step that failed");
    const auto break_job = [&](Job& job) {
      job.broken = true;
      job.fault = fault;
    };
    for (const auto& [job, choice] : decoding_) break_job(*job);
    for (const Piece& piece : pieces_) break_job(*piece.job);
    return false;
  }
  for (const auto& [job, choice] : decoding_)
    if (job->keeps) job->decoded.push_back(choice->last);  // cannot throw: start() reserved the memory
  return true;
}

// Called after a piece of a prompt whose log probabilities are wanted. prompt_logits_ has a row for every token of the piece.
bool Engine::read_logprobs(Job& job, int64_t tokens) {
  const int64_t vocab = model_.vocab_size(), top = *job.request.options.logprobs,
                known = static_cast<int64_t>(job.prompt_logprobs.size()), count = std::min(tokens, job.prompt() - 1 - job.read);
  const auto* const rows = reinterpret_cast<const float*>(prompt_logits_.data());
  try {
    job.prompt_logprobs.resize(static_cast<size_t>(known + count));
    job.prompt_top.resize(static_cast<size_t>(known + count));
    std::vector<TokenLogprob> likely;
    for (int64_t t = 0; t < count; ++t) {
      const auto at = static_cast<size_t>(known + t);
      const int32_t token = job.request.tokens[static_cast<size_t>(job.read + t + 1)];
      job.prompt_logprobs[at] = find_logprobs(model_, options_.stream, rows + t * vocab, token, top, likely);
      job.prompt_top[at].assign(likely.begin(), likely.end());
    }
  } catch (...) {
    job.fault = fault_of("request", "could not find the log probabilities of its prompt");
    return false;
  }
  if (job.read + tokens == job.prompt() && job.request.options.max_tokens > 0)
    std::copy_n(rows + (tokens - 1) * vocab, vocab, logits_of(job.choices[0]));
  return true;
}

// Called after a piece of a prompt: gives the store a checkpoint, and after the last piece forks the other choices.
void Engine::finish_piece(Job& job, int64_t tokens) {
  const bool checkpoint = store_ && job.from_prompts && job.read + tokens == piece_end(job);
  job.read += tokens;
  Choice& first = job.choices[0];
  if (job.reads()) {
    if (!checkpoint) return;
    try {
      store_->insert(state_, first.sequence, std::span(job.request.tokens).first(static_cast<size_t>(job.read)));
    } catch (const std::bad_alloc&) {  // the store then gets no checkpoint
    }
    return;
  }
  job.first_token = Clock::now();
  try {
    for (Choice& choice : job.choices) {
      if (choice.sequence != first.sequence) state_.fork(first.sequence, choice.sequence);
      if (job.request.options.max_tokens > 0) chosen_.push_back({&job, &choice, logits_of(first), 0});
    }
    if (job.request.options.max_tokens == 0)
      for (Choice& choice : job.choices) end_choice(job, choice);
  } catch (...) {
    job.fault = fault_of("request", "could not copy its prompt");
  }
}

// Chooses a token for every choice that has new logits, on several threads: with a large vocabulary, choosing takes as long as a
// layer.
void Engine::choose() {
  constexpr double kOperations = 10;  // operations per logit
  const auto count = static_cast<int64_t>(chosen_.size());
  const int threads =
      cpu::worth_threads(cpu::thread_count(options_.stream), kOperations * static_cast<double>(count * model_.vocab_size()));
  cpu::parallel_for(threads, count, [&](int64_t i, int) {
    Chosen& chosen = chosen_[static_cast<size_t>(i)];
    try {
      chosen.token = chosen.choice->writer->choose(chosen.logits);
    } catch (...) {
      chosen.choice->thrown = std::current_exception();
    }
  });
}

void Engine::write(Job& job, Choice& choice, int32_t token) {
  Writer& writer = *choice.writer;
  try {
    if (choice.thrown) std::rethrow_exception(choice.thrown);
    const int64_t before = writer.written();
    writer.write(token);
    stats_.written_tokens += writer.written() - before;
  } catch (...) {
    job.fault = fault_of("request", "could not choose or write a token");
    return;
  }
  choice.last = token;
  const bool full = state_.tokens(choice.sequence) >= options_.capacity;
  const bool done = writer.stopped() || writer.written() >= job.request.options.max_tokens;
  if (!done && full) writer.stop(StopReason::capacity);
  if (done || full) end_choice(job, choice);
  check_callbacks(job, choice);
}

void Engine::end_choice(Job& job, Choice& choice) {
  choice.ended = true;
  try {
    choice.writer->finish_text();
  } catch (...) {
    job.fault = fault_of("request", "could not end its text");
  }
  check_callbacks(job, choice);
  try {
    if (!job.fault && job.callbacks.on_choice_end)
      job.callbacks.on_choice_end(&choice - job.choices.data(), choice.writer->result());
  } catch (...) {
    job.fault = fault_of("request", kThrown);
  }
  if (!job.keeps) release(job, choice);
}

// An exception that a callback threw ends the callback's request.
void Engine::check_callbacks(Job& job, Choice& choice) {
  if (!choice.writer->thrown() || job.fault) return;
  try {
    std::rethrow_exception(choice.writer->thrown());
  } catch (...) {
    job.fault = fault_of("request", kThrown);
  }
}

float* Engine::logits_of(const Choice& choice) const {
  return reinterpret_cast<float*>(logits_.data()) + choice.sequence * model_.vocab_size();
}

}  // namespace weft::model

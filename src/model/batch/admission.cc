// Which request a batcher admits next, and at which token the prefill of its prompt begins: see engine.h.
#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "model/batch/engine.h"
#include "model/network/append.h"
#include "model/state/hybrid_pools.h"

namespace weft::model {

namespace {

// The place of a client or user in the order of service. Least rank comes first: few running sequences, and many sequences that
// were admitted for others while it waited.
struct Turn {
  int64_t running = 0, passed = 0;
  int64_t rank(int64_t sequences) const { return running * sequences - passed; }
};

struct ClientTurn : Turn {
  std::unordered_map<std::string_view, Turn> users;
};

}  // namespace

// The first waiting request of the next user of the next client: see weft/batcher.h. A request waits while another request runs in
// its session, or an earlier one waits for its session. A request that does not fit yet blocks the others, so that large requests
// get their turn.
Jobs::iterator Engine::next_waiting() {
  std::unordered_map<std::string_view, ClientTurn> clients;
  std::unordered_set<std::string_view> sessions;
  for (const auto& job : running_) {
    const BatchRequest& request = job->request;
    ClientTurn& client = clients[request.client];
    client.running += request.choices;
    client.users[request.user].running += request.choices;
    if (!request.session.empty()) sessions.insert(request.session);
  }
  for (const auto& job : waiting_) {
    ClientTurn& client = clients[job->request.client];
    client.passed = std::max(client.passed, job->passed_by_clients);
    Turn& user = client.users[job->request.user];
    user.passed = std::max(user.passed, job->passed_by_users);
  }
  auto best = waiting_.end();
  std::pair<int64_t, int64_t> least;
  for (auto job = waiting_.begin(); job != waiting_.end(); ++job) {
    const BatchRequest& request = (*job)->request;
    if (!request.session.empty() && !sessions.insert(request.session).second) continue;
    const ClientTurn& client = clients[request.client];
    const std::pair rank(client.rank(options_.sequences), client.users.at(request.user).rank(options_.sequences));
    if (best != waiting_.end() && rank >= least) continue;
    best = job;
    least = rank;
  }
  return best;
}

// Called when a request is admitted. Its client and its user have had their turn; the requests of others have waited longer.
void Engine::age_waiting(const BatchRequest& admitted) {
  for (const auto& job : waiting_) {
    const BatchRequest& request = job->request;
    if (request.client != admitted.client) {
      job->passed_by_clients += admitted.choices;
      continue;
    }
    job->passed_by_clients = 0;
    job->passed_by_users = request.user == admitted.user ? 0 : job->passed_by_users + admitted.choices;
  }
}

// Looks for the file only once per request, because a request may be the next one for many turns.
bool Engine::has_file(Job& job) const {
  if (job.request.session.empty()) return false;
  if (!job.has_file) job.has_file = files_.has(job.request.session);
  return *job.has_file;
}

const KeptSession* Engine::parent_of(const BatchRequest& request) const {
  const KeptSession* parent = request.parent.empty() ? nullptr : sessions_.find(request.parent);
  return parent && continues(request.tokens, parent->tokens) ? parent : nullptr;
}

bool Engine::make_room(Job& job) {
  const BatchRequest& request = job.request;
  if (static_cast<int64_t>(free_.size()) < request.choices) return false;
  const KeptSession* own = request.session.empty() ? nullptr : sessions_.find(request.session);
  if (own && !continues(request.tokens, own->tokens)) {
    sessions_.drop(request.session);
    own = nullptr;
  }
  int64_t pages = pages_of_request(budget_, job.prompt(), request.options.max_tokens).total(request.choices);
  // How many tokens a file holds is not known before it is read, so pages for the whole capacity are counted.
  if (!own && has_file(job)) pages = std::max(pages, pages_of(options_.capacity));
  pages += reserved_pages_ - (own ? own->pages : 0);
  if (pages + (own ? own->pages : 0) > budget_.pages) return false;
  while (pages + sessions_.pages() > budget_.pages) {
    if (!sessions_.drop_oldest(request.session, request.parent) && (request.parent.empty() || !sessions_.drop(request.parent)))
      return false;
    ++stats_.dropped_sessions;
  }
  return true;
}

void Engine::admit() {
  while (!waiting_.empty()) {
    const auto next = next_waiting();
    if (next == waiting_.end() || !make_room(**next)) return;
    Job& job = **next;
    running_.splice(running_.end(), waiting_, next);
    job.admitted = true;
    age_waiting(job.request);
    job.pages = pages_of_request(budget_, job.prompt(), job.request.options.max_tokens);
    reserved_pages_ += job.pages.total(job.request.choices);
    {
      const std::lock_guard lock(mailbox_.mutex);
      mailbox_.waiting.leave(job.request.client);
    }
    start(job);
  }
}

void Engine::start(Job& job) {
  job.started = Clock::now();
  const BatchRequest& request = job.request;
  try {
    job.choices = std::vector<Choice>(static_cast<size_t>(request.choices));
  } catch (...) {
    reserved_pages_ -= request.choices * job.pages.each;  // release() subtracts these for choices that began
    job.fault = fault_of("request", "could not start");
    return;
  }
  for (Choice& choice : job.choices) {
    choice.sequence = free_.back();
    free_.pop_back();
  }
  try {
    Sampling sampling = request.options.sampling;
    for (size_t i = 0; i < job.choices.size(); ++i, ++sampling.seed) {
      Choice& choice = job.choices[i];
      if (job.callbacks.on_token)
        choice.on_token = [&on_token = job.callbacks.on_token, i](const GeneratedToken& next) {
          return on_token(static_cast<int64_t>(i), next);
        };
      choice.writer.emplace(model_, options_.stream, request.options, sampling, choice.on_token);
      choice.writer->see(request.tokens);
    }
    if (request.prompt_logprobs && !prompt_logits_.data())
      prompt_logits_ = Block::allocate(static_cast<size_t>(kCutTokens * model_.vocab_size()) * sizeof(float));
    job.keeps = !request.session.empty();
    if (job.keeps) job.decoded.reserve(static_cast<size_t>(std::min(request.options.max_tokens, options_.capacity - job.prompt())));
    find_beginning(job);
    stats_.prompt_tokens += job.prompt();
    stats_.cached_tokens += job.cached;
  } catch (...) {
    job.broken = true;
    job.fault = fault_of("request", "could not start");
  }
}

void Engine::find_beginning(Job& job) {
  const BatchRequest& request = job.request;
  const int64_t sequence = job.choices[0].sequence;
  const KeptSession* kept = request.session.empty() ? nullptr : sessions_.find(request.session);
  if (kept) {  // make_room() found that the prompt continues its tokens
    state_.restore(sequence, kept->memory);
    job.read = static_cast<int64_t>(kept->tokens.size());
    sessions_.drop(request.session);
  } else if (has_file(job)) {
    resume(job);
    if (job.fault) return;
  }
  if (const KeptSession* parent = job.read == 0 ? parent_of(request) : nullptr) {
    state_.restore(sequence, parent->memory);
    job.read = static_cast<int64_t>(parent->tokens.size());
    sessions_.touch(request.parent, job.started);
  }
  job.cached = job.read;
  if (job.read > 0) {
    // As in a Generator: only an input of more than 16 tokens is a prompt.
    job.prompt_part = job.prompt() - job.read > kMaxDecodeTokens;
    ++stats_.resumed_sessions;
    return;
  }
  job.prompt_part = job.prompt() > kMaxDecodeTokens;
  job.from_prompts = true;
  if (!store_ || request.prompt_logprobs) return;
  try {
    job.cached = job.read = store_->restore(state_, sequence, request.tokens, job.prompt() - 1);
  } catch (const std::bad_alloc&) {  // then the whole prompt is prefilled
  }
}

void Engine::resume(Job& job) {
  const std::string& session = job.request.session;
  const int64_t sequence = job.choices[0].sequence;
  try {
    const std::vector<int32_t> tokens = files_.load(model_, state_, sequence, session);
    if (continues(job.request.tokens, tokens)) {
      job.read = static_cast<int64_t>(tokens.size());
      return;
    }
    state_.reset(sequence);
    job.stale_file = true;
  } catch (const Error&) {
    job.keeps = false;
    job.fault = fault_of("session", "cannot be resumed", session);
  }
}

}  // namespace weft::model

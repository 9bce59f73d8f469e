// One connection of the HTTP server: see connection.h.
#include "serve/connection.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>

#include "serve/connection_answer.h"

namespace weft::serve {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {

constexpr std::chrono::hours kNoDeadline{24 * 365};

// The answer as the API holds it.
template <class Answer>
class Handle : public Exchange {
 public:
  explicit Handle(std::shared_ptr<Answer> answer) : answer_(std::move(answer)) {}
  ~Handle() override { answer_->drop(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  void reply(HttpReply reply) override { answer_->reply(std::move(reply)); }
  void begin(HttpReply head) override { answer_->begin(head); }
  bool write(std::string_view piece) override { return answer_->write(piece); }
  void end() override { answer_->end(); }
  void on_leave(std::function<void()> leave) override { answer_->on_leave(std::move(leave)); }

 private:
  std::shared_ptr<Answer> answer_;
};

void run_handler(const HttpHandler& handler, HttpRequest request, const std::shared_ptr<Exchange>& exchange) {
  try {
    handler(std::move(request), exchange);
  } catch (const ApiError& error) {
    exchange->reply(reply_of(error));
  } catch (const std::exception& error) {
    exchange->reply(reply_of(ApiError(500, error.what())));
  }
}

// Counts the bytes of a body that a worker holds.
struct BodyCount {
  BodyCount(std::shared_ptr<ConnectionHost> counts, size_t size) : host(std::move(counts)), bytes(size) {}
  ~BodyCount() { host->bodies -= bytes; }
  BodyCount(const BodyCount&) = delete;
  BodyCount& operator=(const BodyCount&) = delete;
  const std::shared_ptr<ConnectionHost> host;
  const size_t bytes;
};

}  // namespace

Connection::Connection(Socket socket, std::shared_ptr<ConnectionHost> host) : socket_(std::move(socket)), host_(std::move(host)) {}

void Connection::start() {
  error_code fault;
  const auto peer = socket_.remote_endpoint(fault);
  if (!fault) peer_ = peer.address().to_string();
  socket_.non_blocking(true, fault);
  socket_.set_option(asio::ip::tcp::no_delay(true), fault);
  socket_.set_option(asio::socket_base::keep_alive(true), fault);
  // Bounds the bytes that a client which does not read holds in the kernel, beside kMaxUnsentBytes in the server.
  socket_.set_option(asio::socket_base::send_buffer_size(kMaxUnsentBytes / 2), fault);
  enter(State::idle, host_->limits.idle);
  read();
}

void Connection::enter(State state, std::chrono::milliseconds deadline) {
  state_ = state;
  since_ = Clock::now();
  deadline_ = since_ + deadline;
  window_ = since_;
  window_bytes_ = 0;
}

// Waits until there are bytes, and then reads them into a buffer of the thread, so that a waiting connection holds no buffer.
void Connection::read() {
  if (reading_ || state_ == State::closed) return;
  if (state_ == State::answer && in_.size() >= kMaxHeaderBytes) return;
  reading_ = true;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const error_code& fault) {
    self->reading_ = false;
    if (self->state_ == State::closed) return;
    if (fault) return self->close();
    self->guarded([&] { self->on_readable(); });
  });
}

void Connection::on_readable() {
  constexpr size_t kPiece = 64 << 10;
  static thread_local std::array<char, kPiece> buffer;
  error_code fault;
  const size_t most = state_ != State::answer ? kPiece : kMaxHeaderBytes - std::min(in_.size(), kMaxHeaderBytes);
  if (most == 0) return;  // finish() reads again
  const size_t bytes = socket_.read_some(asio::buffer(buffer.data(), most), fault);
  if (fault == asio::error::would_block || fault == asio::error::interrupted) return read();
  if (fault) {
    // A client that closes its side while it waits for an answer counts as one that left. A short answer is sent all the same.
    if (fault == asio::error::eof && state_ == State::answer) return leave();
    return close();
  }
  if (state_ == State::linger) {
    discarded_ += bytes;
    if (discarded_ > kMaxDiscardedBytes) return close();
  } else {
    in_.append(buffer.data(), bytes);
    if (state_ != State::answer) parse();
  }
  read();
}

void Connection::parse() {
  try {
    while (state_ < State::answer && !in_.empty()) {
      if (state_ == State::idle) enter(State::head, host_->limits.head);
      const size_t taken = parser_.parse(in_);
      in_.erase(0, taken);
      if (!checked_ && parser_.has_header()) on_header();
      count_body();
      if (parser_.done()) return dispatch();
      if (taken == 0) return;
    }
  } catch (const ApiError& error) {
    refuse(error);
  }
}

void Connection::on_header() {
  checked_ = true;
  ++host_->counters.requests;
  host_->gate(parser_.request());
  enter(State::body, host_->limits.body);
  if (!parser_.wants_continue() || !in_.empty()) return;
  error_code ignored;
  constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  socket_.write_some(asio::buffer(kContinue.data(), kContinue.size()), ignored);
}

void Connection::count_body() {
  const size_t now = parser_.request().body.size();
  if (now <= counted_) return;
  host_->bodies += now - std::exchange(counted_, now);
  if (host_->bodies > kMaxBodies) throw ApiError(503, "the server receives too many large requests at once");
}

void Connection::uncount_body() { host_->bodies -= std::exchange(counted_, 0); }

void Connection::dispatch() {
  const bool keep = parser_.keeps_alive() && !host_->closing;
  HttpRequest request = parser_.take();
  request.peer = peer_;
  enter(State::answer, kNoDeadline);
  answer_ = std::make_shared<Answer>(shared_from_this(), keep, parser_.streams(), request.method == "HEAD");
  if (host_->quick)
    if (std::optional<HttpReply> reply = host_->quick(request)) return answer_->reply(std::move(*reply));
  auto exchange = std::make_shared<Handle<Answer>>(answer_);
  auto body = std::make_shared<BodyCount>(host_, counted_);
  counted_ = 0;
  if (in_.empty()) std::string().swap(in_);
  host_->defer([body = std::move(body), answer = answer_, request = std::make_shared<HttpRequest>(std::move(request)),
                exchange = std::move(exchange)] {
    if (!answer->closed()) run_handler(body->host->handler, std::move(*request), exchange);
  });
}

// Answers with an error before the request has been read to its end, and then closes the connection.
void Connection::refuse(const ApiError& error) {
  enter(State::answer, kNoDeadline);
  const bool head_only = parser_.request().method == "HEAD";
  answer_ = std::make_shared<Answer>(shared_from_this(), /*keep=*/false, parser_.streams(), head_only);
  uncount_body();
  parser_ = HttpParser();
  std::string().swap(in_);
  answer_->reply(reply_of(error));
}

// The client has left. The answer may still end by itself within HttpLimits::linger.
void Connection::leave() {
  if (state_ == State::answer) deadline_ = Clock::now() + host_->limits.linger;
  if (auto call = answer_->left(state_ == State::closed)) host_->defer_leave(std::move(call));
}

void Connection::flush() {
  if (state_ != State::answer) return;
  if (const Answer::Fault fault = answer_->fault(); fault != Answer::Fault::none) {
    if (fault == Answer::Fault::slow) ++host_->counters.slow;
    return close();
  }
  if (writing_) return;
  if (sent_ == out_.size()) {
    const Answer::Ready ready = answer_->take(out_);
    sent_ = 0;
    keep_ = ready.keep;
    if (out_.empty()) {
      if (ready.ended) finish();
      return;
    }
    last_written_ = Clock::now();
  }
  writing_ = true;
  socket_.async_write_some(asio::buffer(out_.data() + sent_, out_.size() - sent_),
                           [self = shared_from_this()](const error_code& fault, size_t bytes) {
                             self->writing_ = false;
                             if (self->state_ == State::closed) return;
                             if (fault) return self->close();
                             self->sent_ += bytes;
                             self->window_bytes_ += bytes;
                             self->last_written_ = Clock::now();
                             self->guarded([&] { self->flush(); });
                           });
}

// Called when the whole answer has been sent.
void Connection::finish() {
  answer_.reset();
  std::string().swap(out_);
  sent_ = 0;
  if (keep_ && !host_->closing) {
    parser_ = HttpParser();
    checked_ = false;
    if (in_.empty()) std::string().swap(in_);
    enter(State::idle, host_->limits.idle);
    parse();
    return read();
  }
  // Closing a socket that has unread bytes resets the connection, and the client would lose the answer.
  error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  std::string().swap(in_);
  enter(State::linger, host_->limits.linger);
  read();
}

// Has the client read nothing, or fewer than kMinReadBytes, for HttpLimits::write?
bool Connection::slow(Clock::time_point now) {
  if (!writing_) window_ = now;
  if (!writing_ || now - window_ >= host_->limits.write) {
    const bool few = writing_ && window_bytes_ < kMinReadBytes;
    window_ = now;
    window_bytes_ = 0;
    if (few) return true;
  }
  return writing_ && now - last_written_ >= host_->limits.write;
}

// Has the client left, although the server reads no more of its pipelined bytes now? A client that sends more of them than the
// server holds counts as one that left, because the server could not see the end of its stream.
bool Connection::left_unread() {
  if (reading_ || in_.size() < kMaxHeaderBytes || answer_->has_left()) return false;
  error_code fault;
  if (socket_.available(fault) > kMaxPipelined || fault) return true;
#ifdef POLLRDHUP
  pollfd look{.fd = socket_.native_handle(), .events = POLLRDHUP, .revents = 0};
  return ::poll(&look, 1, 0) > 0;
#else
  return false;
#endif
}

void Connection::check_deadline(Clock::time_point now) {
  if (state_ == State::answer) {
    const bool late = slow(now) || answer_->fault() == Answer::Fault::slow;
    if (late) ++host_->counters.slow;
    if (late || now >= deadline_ || answer_->fault() != Answer::Fault::none) return close();
    if (left_unread()) leave();
    if (!writing_) flush();  // schedule() may have failed for lack of memory
    return;
  }
  if (now < deadline_) return;
  if (state_ == State::head || state_ == State::body) return refuse(ApiError(408, "the request did not arrive in time"));
  close();
}

void Connection::close_when_answered() {
  if (state_ == State::idle || state_ == State::head || state_ == State::body) close();
}

void Connection::close() {
  if (state_ == State::closed) return;
  const std::shared_ptr<Connection> self = shared_from_this();
  state_ = State::closed;
  error_code ignored;
  socket_.close(ignored);
  uncount_body();
  try {
    if (answer_) leave();
  } catch (const std::exception&) {  // the request ends nevertheless: writes to its answer fail from now on
  }
  answer_.reset();
  host_->connections.erase(self);
  host_->counters.connections = static_cast<int64_t>(host_->connections.size());
  host_->removed();
}

}  // namespace weft::serve

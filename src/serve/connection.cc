// One connection of the HTTP server: see connection.h.
#include "serve/connection.h"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>

#include "serve/http_reply.h"

namespace weft::serve {

namespace asio = boost::asio;
using boost::system::error_code;

// The answer to the request that a connection has now. Its members are for any thread.
class Connection::Answer {
 public:
  Answer(const std::shared_ptr<Connection>& connection, bool keep, bool chunks, bool head_only)
      : connection_(connection), keep_(keep), chunks_(chunks), head_only_(head_only) {}

  void reply(const HttpReply& reply) {
    const std::scoped_lock guard(lock_);
    if (begun_) return;
    begun_ = ended_ = true;
    count(reply.status);
    pending_ = reply_head(reply, HttpEnd::length, reply.body.size(), keep_);
    if (!head_only_) pending_ += reply.body;
    schedule();
  }

  void begin(const HttpReply& head) {
    const std::scoped_lock guard(lock_);
    if (begun_) return;
    begun_ = true;
    count(head.status);
    if (!chunks_) keep_ = false;
    pending_ = reply_head(head, chunks_ ? HttpEnd::chunks : HttpEnd::close, 0, keep_);
    schedule();
  }

  bool write(std::string_view piece) {
    const std::scoped_lock guard(lock_);
    if (left_ || fault_ != Fault::none || !begun_ || ended_) return false;
    if (pending_.size() + sending_ > kMaxUnsentBytes) {
      fail(Fault::slow);
      return false;
    }
    if (!head_only_) pending_ += chunks_ ? chunk(piece) : std::string(piece);
    schedule();
    return true;
  }

  void end() {
    const std::scoped_lock guard(lock_);
    if (ended_ || !begun_) return;
    ended_ = true;
    if (chunks_ && !head_only_) pending_ += kLastChunk;
    schedule();
  }

  // The last holder of the exchange is gone.
  void drop() {
    reply(reply_of(ApiError(500, "the server did not answer this request")));
    const std::scoped_lock guard(lock_);
    if (ended_) return;
    fail(Fault::torn);  // a stream without its end must not look complete
  }

  void on_leave(std::function<void()> leave) {
    {
      const std::scoped_lock guard(lock_);
      if (!left_) {
        leave_ = std::move(leave);
        return;
      }
    }
    leave();
  }

  // The client has closed its side, or the connection is closed. Returns what to call.
  std::function<void()> left() {
    const std::scoped_lock guard(lock_);
    left_ = true;
    return std::exchange(leave_, nullptr);
  }

  // For the thread of the server: takes what there is to send. What it returned before has been sent.
  struct Ready {
    bool ended, keep;
  };
  Ready take(std::string& out) {
    const std::scoped_lock guard(lock_);
    scheduled_ = false;
    out.clear();
    out.swap(pending_);
    sending_ = out.size();
    return {ended_, keep_ && !left_};
  }
  // slow: the client does not read. torn: the answer was dropped before its end.
  enum class Fault { none, slow, torn };
  Fault fault() {
    const std::scoped_lock guard(lock_);
    return fault_;
  }

 private:
  void fail(Fault fault) {
    if (fault_ == Fault::none) fault_ = fault;
    scheduled_ = false;  // what is scheduled may wait for a write that never ends
    schedule();
  }
  void schedule() {
    if (scheduled_) return;
    const std::shared_ptr<Connection> connection = connection_.lock();
    if (!connection) return;
    scheduled_ = true;
    asio::post(connection->socket_.get_executor(), [connection] { connection->flush(); });
  }
  void count(int status) {
    if (const std::shared_ptr<Connection> connection = connection_.lock())
      ++connection->host_->counters.answers[std::clamp(status / 100, 0, 5)];
  }

  std::mutex lock_;
  std::weak_ptr<Connection> connection_;
  bool keep_;
  const bool chunks_, head_only_;
  bool begun_ = false, ended_ = false, left_ = false, scheduled_ = false;
  Fault fault_ = Fault::none;
  std::string pending_;
  size_t sending_ = 0;
  std::function<void()> leave_;
};

namespace {

constexpr std::chrono::hours kNoDeadline{24 * 365};

// What the API holds of an answer.
template <class Answer>
class Handle : public Exchange {
 public:
  explicit Handle(std::shared_ptr<Answer> answer) : answer_(std::move(answer)) {}
  ~Handle() override { answer_->drop(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  void reply(HttpReply reply) override { answer_->reply(reply); }
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

}  // namespace

Connection::Connection(Socket socket, std::shared_ptr<ConnectionHost> host) : socket_(std::move(socket)), host_(std::move(host)) {}

void Connection::start() {
  error_code fault;
  const auto peer = socket_.remote_endpoint(fault);
  if (!fault) peer_ = peer.address().to_string();
  socket_.non_blocking(true, fault);
  socket_.set_option(asio::ip::tcp::no_delay(true), fault);
  socket_.set_option(asio::socket_base::keep_alive(true), fault);
  // A client that does not read holds this much in the kernel, beside kMaxUnsentBytes.
  socket_.set_option(asio::socket_base::send_buffer_size(kMaxUnsentBytes / 2), fault);
  enter(State::idle, host_->limits.idle);
  read();
}

void Connection::enter(State state, std::chrono::milliseconds deadline) {
  state_ = state;
  since_ = Clock::now();
  deadline_ = since_ + deadline;
}

// Waits until there is something to read, and then reads into a buffer of the thread: a connection that waits holds no buffer.
void Connection::read() {
  if (reading_ || state_ == State::closed) return;
  if (state_ == State::answer && in_.size() >= kMaxHeaderBytes) return;
  reading_ = true;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const error_code& fault) {
    self->reading_ = false;
    if (self->state_ == State::closed) return;
    if (fault) return self->close();
    self->on_readable();
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
    // A client that closed its side while it waits for an answer has left; a short answer is sent all the same.
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
  host_->bodies += now - counted_;
  counted_ = now;
  if (host_->bodies > kMaxBodies) throw ApiError(503, "the server receives too many large requests at once");
}

void Connection::dispatch() {
  const bool keep = parser_.keeps_alive() && !host_->closing;
  HttpRequest request = parser_.take();
  request.peer = peer_;
  enter(State::answer, kNoDeadline);
  answer_ = std::make_shared<Answer>(shared_from_this(), keep, parser_.streams(), request.method == "HEAD");
  auto exchange = std::make_shared<Handle<Answer>>(answer_);
  host_->defer([host = host_, request = std::make_shared<HttpRequest>(std::move(request)), exchange = std::move(exchange),
                executor = socket_.get_executor(), bytes = std::exchange(counted_, 0)]() mutable {
    run_handler(host->handler, std::move(*request), exchange);
    exchange.reset();
    asio::post(executor, [host, bytes] { host->bodies -= bytes; });
  });
}

// Answers a request that cannot be read to its end.
void Connection::refuse(const ApiError& error) {
  enter(State::answer, kNoDeadline);
  answer_ = std::make_shared<Answer>(shared_from_this(), /*keep=*/false, parser_.streams(), /*head_only=*/false);
  answer_->reply(reply_of(error));
}

// The answer has until the end of `linger` to end by itself.
void Connection::leave() {
  if (state_ == State::answer) deadline_ = Clock::now() + host_->limits.linger;
  if (auto call = answer_->left()) host_->defer(std::move(call));
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
                             self->last_written_ = Clock::now();
                             self->flush();
                           });
}

// The answer was sent to its end.
void Connection::finish() {
  answer_.reset();
  std::string().swap(out_);
  sent_ = 0;
  if (keep_ && !host_->closing) {
    parser_ = HttpParser();
    checked_ = false;
    if (in_.empty()) in_.shrink_to_fit();
    enter(State::idle, host_->limits.idle);
    parse();
    return read();
  }
  // Closing a socket with unread bytes would take the answer away from the client.
  error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  std::string().swap(in_);
  enter(State::linger, host_->limits.linger);
  read();
}

void Connection::check_deadline(Clock::time_point now) {
  if (state_ == State::answer) {
    const bool slow = writing_ && now - last_written_ >= host_->limits.write;
    if (slow) ++host_->counters.slow;
    if (slow || now >= deadline_) close();
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
  host_->bodies -= std::exchange(counted_, 0);
  if (answer_) leave();
  answer_.reset();
  host_->connections.erase(self);
  host_->counters.connections = static_cast<int64_t>(host_->connections.size());
  host_->removed();
}

}  // namespace weft::serve

// The answer of a connection. Included by connection.cc only.
#pragma once

#include <algorithm>
#include <boost/asio/post.hpp>
#include <mutex>
#include <string>
#include <utility>

#include "serve/connection.h"
#include "serve/http_reply.h"

namespace weft::serve {

// The answer to the present request of a connection. Any thread may call its members.
class Connection::Answer {
 public:
  Answer(const std::shared_ptr<Connection>& connection, bool keep, bool chunks, bool head_only)
      : connection_(connection), host_(connection->host_), keep_(keep), chunks_(chunks), head_only_(head_only) {}

  ~Answer() { host_->answers -= counted_; }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  void reply(HttpReply reply) {
    const std::scoped_lock guard(lock_);
    if (begun_) return;
    if (host_->answers + reply.body.size() > kMaxAnswerBytes)
      reply = reply_of(ApiError(503, "the server has too many long answers to send at once"));
    pending_ = reply_head(reply, HttpEnd::length, reply.body.size(), keep_);
    begun_ = ended_ = true;
    count(reply.status);
    if (!head_only_) {
      body_ = std::move(reply.body);
      host_->answers += counted_ = body_.size();
    }
    schedule();
  }

  void begin(const HttpReply& head) {
    const std::scoped_lock guard(lock_);
    if (begun_) return;
    if (!chunks_) keep_ = false;
    pending_ = reply_head(head, chunks_ ? HttpEnd::chunks : HttpEnd::close, 0, keep_);
    if (!head_only_) pending_ += chunks_ ? chunk(head.body) : head.body;
    beginning_ = pending_.size();
    begun_ = true;
    count(head.status);
    schedule();
  }

  bool write(std::string_view piece) {
    const std::scoped_lock guard(lock_);
    if (left_ || fault_ != Fault::none || !begun_ || ended_) return false;
    if (pending_.size() + sending_ > kMaxUnsentBytes + beginning_) {
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

  // Called when the last holder of the exchange is gone.
  void drop() noexcept {
    try {
      reply(reply_of(ApiError(500, "the server did not answer this request")));
    } catch (const std::exception&) {  // no memory for the answer: the connection closes without it
    }
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

  // Called when the client has closed its side, or when the connection is closed. Returns the function of on_leave(), to be called.
  std::function<void()> left(bool closed) {
    const std::scoped_lock guard(lock_);
    left_ = true;
    closed_ = closed_ || closed;
    return std::exchange(leave_, nullptr);
  }

  bool has_left() {
    const std::scoped_lock guard(lock_);
    return left_;
  }
  bool closed() {
    const std::scoped_lock guard(lock_);
    return closed_;
  }

  // For the thread of the server: swaps the next bytes to send into `out`. The bytes of the previous call have been sent. The
  // answer is complete if `ended` is set and `out` is empty.
  struct Ready {
    bool ended, keep;
  };
  Ready take(std::string& out) {
    const std::scoped_lock guard(lock_);
    scheduled_ = false;
    if (sending_ > 0) beginning_ = 0;
    if (out.capacity() > kMaxUnsentBytes) std::string().swap(out);
    out.clear();
    out.swap(pending_.empty() ? body_ : pending_);
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
    if (fault_ == Fault::none) fault_ = fault;  // check_deadline() sees the fault, too
    scheduled_ = false;                         // the flush that is scheduled may wait for a write that never ends
    try {
      schedule();
    } catch (const std::exception&) {
    }
  }
  void schedule() {
    if (scheduled_) return;
    const std::shared_ptr<Connection> connection = connection_.lock();
    if (!connection) return;
    boost::asio::post(connection->socket_.get_executor(), [connection] { connection->guarded([&] { connection->flush(); }); });
    scheduled_ = true;
  }
  // A client that has left gets no answer. That is no fault of the server, so it counts no 5xx.
  void count(int status) {
    if (!left_ || status < 500) ++host_->counters.answers[std::clamp(status / 100, 0, 5)];
  }

  std::mutex lock_;
  const std::weak_ptr<Connection> connection_;
  const std::shared_ptr<ConnectionHost> host_;
  bool keep_;
  const bool chunks_, head_only_;
  bool begun_ = false, ended_ = false, left_ = false, closed_ = false, scheduled_ = false;
  Fault fault_ = Fault::none;
  std::string pending_, body_;  // the body of a whole answer comes after `pending_`
  size_t sending_ = 0, counted_ = 0;
  size_t beginning_ = 0;  // bytes of a stream's first piece that may be unsent
  std::function<void()> leave_;
};

}  // namespace weft::serve

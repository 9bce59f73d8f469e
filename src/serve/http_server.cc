// The HTTP half of the server: see http_server.h.
#include "serve/http_server.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <csignal>
#include <stdexcept>

#include "serve/connection.h"
#include "serve/http_reply.h"

namespace weft::serve {

namespace asio = boost::asio;
using boost::system::error_code;
using Tcp = asio::ip::tcp;

namespace {

constexpr int kWorkers = 2;
constexpr std::chrono::milliseconds kTick{100};        // between two looks at deadlines
constexpr std::chrono::milliseconds kAcceptPause{50};  // where the process has no descriptor left

std::string in_url(const asio::ip::address& address) {
  return address.is_v6() ? "[" + address.to_string() + "]" : address.to_string();
}

Tcp::endpoint endpoint_of(asio::io_context& io, const std::string& host, uint16_t port) {
  error_code fault;
  const auto address = asio::ip::make_address(host, fault);
  if (!fault) return {address, port};
  Tcp::resolver resolver(io);
  const auto found = resolver.resolve(host, std::to_string(port), Tcp::resolver::passive, fault);
  if (fault || found.empty()) throw std::runtime_error("there is no address " + host + ": " + fault.message());
  return found.begin()->endpoint();
}

}  // namespace

struct HttpServer::Parts : std::enable_shared_from_this<HttpServer::Parts> {
  asio::io_context io{1};
  asio::thread_pool workers{kWorkers}, replies{1};  // for requests; for ends of answers and cancellations, which must not wait
  Tcp::acceptor acceptor{io};
  asio::steady_timer tick{io}, pause{io};
  asio::signal_set signals{io};
  std::shared_ptr<ConnectionHost> host = std::make_shared<ConnectionHost>();
  std::function<void(int)> signalled;
  Tcp::endpoint endpoint;
  bool accepting = false, ticking = false;
  std::atomic<int> holds = 0;
  ConnectionHost::Clock::time_point deadline = ConnectionHost::Clock::time_point::max();  // when close() ends connections

  void listen(const std::string& name, uint16_t port) {
    const Tcp::endpoint wanted = endpoint_of(io, name, port);
    error_code fault;
    acceptor.open(wanted.protocol(), fault);
    if (!fault) acceptor.set_option(Tcp::acceptor::reuse_address(true), fault);
    if (!fault) acceptor.bind(wanted, fault);
    if (!fault) acceptor.listen(asio::socket_base::max_listen_connections, fault);
    if (fault == asio::error::address_in_use)
      throw std::runtime_error("port " + std::to_string(port) + " of " + in_url(wanted.address()) +
                               " is in use by another program; choose another one with --port");
    if (fault)
      throw std::runtime_error("cannot listen on " + in_url(wanted.address()) + ":" + std::to_string(port) + ": " +
                               fault.message());
    endpoint = acceptor.local_endpoint();
  }

  void accept() {
    acceptor.async_accept([this](const error_code& fault, Tcp::socket socket) {
      accepting = false;
      if (host->closing) return;
      if (fault == asio::error::operation_aborted) return;
      if (!fault) try_add(std::move(socket));
      if (fault != asio::error::no_descriptors && fault != asio::error::no_memory) return accept();
      evict();
      pause.expires_after(kAcceptPause);
      pause.async_wait([this](const error_code& ended) {
        accepting = false;
        if (!ended && !host->closing) accept();
      });
      accepting = true;
    });
    accepting = true;
  }

  void try_add(Tcp::socket socket) {
    try {
      add(std::move(socket));
    } catch (const std::exception&) {  // no memory: only this client is not served
    }
  }

  void add(Tcp::socket socket) {
    ++host->counters.accepted;
    const auto full = [&] { return static_cast<int64_t>(host->connections.size()) >= host->limits.connections; };
    if (full()) evict();
    if (full()) {
      const HttpReply reply = reply_of(ApiError(503, "the server has too many connections"));
      const std::string text = reply_head(reply, HttpEnd::length, reply.body.size(), false) + reply.body;
      error_code ignored;
      socket.non_blocking(true, ignored);
      socket.write_some(asio::buffer(text), ignored);
      return;
    }
    const auto connection = std::make_shared<Connection>(std::move(socket), host);
    host->connections.insert(connection);
    host->counters.connections = static_cast<int64_t>(host->connections.size());
    connection->start();
  }

  // Closes the connection that waits longest for a request.
  void evict() {
    std::shared_ptr<Connection> oldest;
    for (const auto& one : host->connections)
      if (one->waits() && (!oldest || one->since() < oldest->since())) oldest = one;
    if (!oldest) return;
    ++host->counters.evicted;
    oldest->close();
  }

  void check_deadlines() {
    tick.expires_after(kTick);
    tick.async_wait([this](const error_code& fault) {
      ticking = false;
      if (fault) return;
      if (!accepting && !host->closing) accept();
      const auto now = ConnectionHost::Clock::now();
      const std::vector<std::shared_ptr<Connection>> all(host->connections.begin(), host->connections.end());
      for (const auto& one : all) try {
          now < deadline ? one->check_deadline(now) : one->close();
        } catch (const std::exception&) {
          one->close();
        }
      check_deadlines();
    });
    ticking = true;
  }

  // Work that throws drops its exchange, so only the answer of that request is lost.
  static void defer(asio::thread_pool& pool, std::function<void()> work) {
    asio::post(pool, [work = std::move(work)] {
      try {
        work();
      } catch (const std::exception&) {
      }
    });
  }

  void wait_for_signal() {
    signals.async_wait([this](const error_code& fault, int signal) {
      if (fault) return;
      if (signalled) signalled(signal);
      wait_for_signal();
    });
  }

  void close(ConnectionHost::Clock::time_point until) {
    deadline = std::min(deadline, until);
    if (host->closing) return;
    host->closing = true;
    error_code ignored;
    acceptor.close(ignored);
    pause.cancel(ignored);
    const std::vector<std::shared_ptr<Connection>> all(host->connections.begin(), host->connections.end());
    for (const auto& one : all) one->close_when_answered();
    stop_if_done();
  }

  void stop_if_done() {
    if (host->closing && holds == 0 && host->connections.empty()) io.stop();
  }
};

HttpServer::HttpServer(const std::string& host, uint16_t port, const HttpLimits& limits, HttpGate gate, HttpHandler handler)
    : parts_(std::make_shared<Parts>()) {
  Parts& parts = *parts_;
  ConnectionHost& shared = *parts.host;
  shared.limits = limits;
  shared.gate = std::move(gate);
  shared.handler = std::move(handler);
  shared.defer = [&parts](std::function<void()> work) { Parts::defer(parts.workers, std::move(work)); };
  shared.defer_leave = [&parts](std::function<void()> work) { Parts::defer(parts.replies, std::move(work)); };
  shared.removed = [&parts] { parts.stop_if_done(); };
  parts.listen(host, port);
  parts.accept();
  parts.check_deadlines();
}

HttpServer::~HttpServer() {
  parts_->workers.join();
  parts_->replies.join();
  // Released here, because objects that the handler refers to need not outlive the server.
  parts_->host->handler = nullptr;
  parts_->host->quick = nullptr;
  const std::vector<std::shared_ptr<Connection>> all(parts_->host->connections.begin(), parts_->host->connections.end());
  parts_->host->defer_leave = [](const std::function<void()>& work) { work(); };
  for (const auto& one : all) one->close();
}

uint16_t HttpServer::port() const { return parts_->endpoint.port(); }
std::string HttpServer::address() const { return in_url(parts_->endpoint.address()); }
bool HttpServer::loopback() const { return parts_->endpoint.address().is_loopback(); }

HttpStats HttpServer::stats() const {
  const ConnectionHost::Counters& now = parts_->host->counters;
  HttpStats stats;
  stats.connections = now.connections;
  stats.accepted = now.accepted;
  stats.evicted = now.evicted;
  stats.requests = now.requests;
  stats.slow = now.slow;
  for (size_t i = 0; i < std::size(stats.answers); ++i) stats.answers[i] = now.answers[i];
  return stats;
}

void HttpServer::answer_at_once(HttpQuick quick) { parts_->host->quick = std::move(quick); }

void HttpServer::on_signal(std::function<void(int)> signalled) {
  parts_->signalled = std::move(signalled);
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) parts_->signals.add(signal);  // ignored signals stay ignored: background jobs, nohup
  }
  parts_->wait_for_signal();
}

// A step that fails for lack of memory throws out of io.run(), which is then called again. The tick restarts accepting connections.
void HttpServer::run() {
  while (!parts_->io.stopped()) try {
      if (!parts_->ticking) parts_->check_deadlines();
      parts_->io.run();
    } catch (const std::exception&) {
    }
}

void HttpServer::close(std::chrono::steady_clock::time_point deadline) {
  asio::post(parts_->io, [parts = parts_, deadline] { parts->close(deadline); });
}
void HttpServer::hold() { ++parts_->holds; }
void HttpServer::release() {
  asio::post(parts_->io, [parts = parts_] {
    --parts->holds;
    parts->stop_if_done();
  });
}
void HttpServer::abort() { parts_->io.stop(); }
void HttpServer::defer(std::function<void()> work) { Parts::defer(parts_->replies, std::move(work)); }

}  // namespace weft::serve

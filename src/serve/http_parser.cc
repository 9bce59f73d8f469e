// The parser of HTTP requests: see http_parser.h.
#include "serve/http_parser.h"

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>

#include "serve/chunk_decoder.h"
#include "serve/limits.h"

namespace weft::serve {
namespace {

namespace http = boost::beast::http;
using boost::beast::error_code;
using boost::beast::iequals;
using boost::beast::string_view;

std::string text_of(string_view view) { return {view.data(), view.size()}; }

// Keeps the fields that the server reads. `fault` holds a violation of this server's own rules, which are stricter than the
// grammar.
class Grammar : public http::basic_parser<true> {
 public:
  Grammar() {
    header_limit(kMaxHeaderBytes);
    body_limit(kMaxBodyBytes);
  }

  HttpRequest request;
  bool expects = false, streams = false;
  size_t head = 0;                     // bytes of the header so far
  std::optional<ChunkDecoder> chunks;  // of a chunked body
  std::optional<ApiError> fault;

 private:
  void refuse(int status, const char* what, error_code& ec) {
    fault.emplace(status, what);
    ec = http::error::bad_field;
  }

  void on_request_impl(http::verb, string_view method, string_view target, int version, error_code& ec) override {
    streams = version >= 11;
    if (target.size() > kMaxTarget) return refuse(414, "the path is too long", ec);
    if (target.empty() || target[0] != '/') return refuse(400, "the target of the request must be a path", ec);
    request.method = text_of(method);
    const size_t query = target.find('?');
    request.path = text_of(target.substr(0, query));
    if (query != string_view::npos) request.query = text_of(target.substr(query + 1));
  }

  void once(std::optional<std::string>& field, string_view value, const char* twice, error_code& ec) {
    if (field) return refuse(400, twice, ec);
    field = text_of(value);
  }

  void on_field_impl(http::field name, string_view, string_view value, error_code& ec) override {
    if (++fields_ > kMaxHeaderFields) return refuse(431, "the request has more than 64 header fields", ec);
    switch (name) {
      case http::field::host: return once(request.access.host, value, "the field Host occurs twice", ec);
      case http::field::origin: return once(request.access.origin, value, "the field Origin occurs twice", ec);
      case http::field::authorization: return once(request.access.authorization, value, "the field Authorization occurs twice", ec);
      case http::field::content_type: request.content_type = text_of(value); return;
      case http::field::expect:
        if (!iequals(value, "100-continue")) return refuse(417, "the only expectation known here is 100-continue", ec);
        expects = true;
        return;
      // Requests about whose end two readers could disagree are refused.
      case http::field::content_length:
        if (++lengths_ > 1 || value.find(',') != string_view::npos) return refuse(400, "the field Content-Length occurs twice", ec);
        if (chunks) refuse(400, "the request has Content-Length and Transfer-Encoding", ec);
        return;
      case http::field::transfer_encoding:
        if (chunks || lengths_ > 0) return refuse(400, "the request has Transfer-Encoding twice, or Content-Length, too", ec);
        if (!streams) return refuse(400, "HTTP/1.0 has no Transfer-Encoding", ec);
        if (!iequals(value, "chunked")) return refuse(501, "the only Transfer-Encoding known here is chunked", ec);
        chunks.emplace();
        return;
      default: return;
    }
  }

  void on_header_impl(error_code&) override {}
  void on_body_init_impl(const boost::optional<std::uint64_t>&, error_code&) override {}
  std::size_t on_body_impl(string_view piece, error_code&) override {
    request.body.append(piece.data(), piece.size());
    return piece.size();
  }
  void on_chunk_header_impl(std::uint64_t, string_view, error_code&) override {}
  std::size_t on_chunk_body_impl(std::uint64_t, string_view piece, error_code&) override { return piece.size(); }
  void on_response_impl(int, string_view, int, error_code&) override {}
  void on_finish_impl(error_code&) override {}

  int fields_ = 0, lengths_ = 0;
};

ApiError fault_of(const error_code& ec) {
  if (ec == http::error::header_limit)
    return {431, "the header of the request has more than " + std::to_string(kMaxHeaderBytes) + " bytes"};
  if (ec == http::error::bad_version) return {505, "this server speaks HTTP/1.1"};
  if (ec == http::error::body_limit)
    return {413, "the body of the request has more than " + std::to_string(kMaxBodyBytes) + " bytes"};
  return {400, "the request is not HTTP: " + ec.message()};
}

}  // namespace

struct HttpParser::Parts {
  Grammar grammar;
};

HttpParser::HttpParser() : parts_(std::make_unique<Parts>()) {}
HttpParser::~HttpParser() = default;
HttpParser::HttpParser(HttpParser&&) noexcept = default;
HttpParser& HttpParser::operator=(HttpParser&&) noexcept = default;

size_t HttpParser::parse(std::string_view bytes) {
  Grammar& grammar = parts_->grammar;
  // Beast's own decoder is not used: Beast 1.74 loses its place in a last chunk that arrives in pieces.
  if (grammar.chunks && has_header()) return grammar.chunks->decode(bytes, grammar.request.body);
  size_t taken = 0;
  const bool had_header = grammar.is_header_done();
  while (!grammar.is_done() && taken < bytes.size()) {
    error_code ec;
    const size_t more = grammar.put(boost::asio::buffer(bytes.data() + taken, bytes.size() - taken), ec);
    taken += more;
    if (grammar.fault) throw ApiError(*grammar.fault);
    if (ec && ec != http::error::need_more) throw fault_of(ec);
    if (!had_header && (grammar.head += more) + (grammar.is_header_done() ? 0 : bytes.size() - taken) > kMaxHeaderBytes)
      throw ApiError(431, "the header of the request has more than " + std::to_string(kMaxHeaderBytes) + " bytes");
    if (ec) break;
    if (!had_header && grammar.is_header_done()) {
      grammar.request.body_bytes = grammar.chunks ? kMaxBodyBytes : grammar.content_length().value_or(0);
      break;
    }
  }
  return taken;
}

bool HttpParser::has_header() const { return parts_->grammar.is_header_done(); }
bool HttpParser::done() const {
  const Grammar& grammar = parts_->grammar;
  return grammar.chunks ? has_header() && grammar.chunks->done() : grammar.is_done();
}
bool HttpParser::keeps_alive() const { return parts_->grammar.keep_alive() && !parts_->grammar.upgrade(); }
bool HttpParser::streams() const { return parts_->grammar.streams; }
bool HttpParser::wants_continue() const { return parts_->grammar.expects && streams() && !done(); }
const HttpRequest& HttpParser::request() const { return parts_->grammar.request; }
HttpRequest HttpParser::take() { return std::move(parts_->grammar.request); }

}  // namespace weft::serve

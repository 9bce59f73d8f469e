// The limits of the server. docs/serve.md lists them for its users.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace weft::serve {

inline constexpr size_t kMaxHeaderBytes = 16 << 10;     // of the request line and all fields; more: 431
inline constexpr int kMaxHeaderFields = 64;             // more: 431
inline constexpr size_t kMaxTarget = 2048;              // bytes of path and query; more: 414
inline constexpr size_t kMaxBodyBytes = 4 << 20;        // of one request; more: 413
inline constexpr size_t kMaxBodies = 64 << 20;          // of all bodies that are being received or parsed; more: 503
inline constexpr size_t kMaxUnsentBytes = 256 << 10;    // of a stream whose client reads slowly; then the request is cancelled
inline constexpr size_t kMaxAnswerBytes = 256 << 20;    // of all whole answers that are being sent; more: 503
inline constexpr size_t kMinReadBytes = 64 << 10;       // that a client reads within HttpLimits::write, while there is more to send
inline constexpr size_t kMaxPipelined = 32 << 10;       // bytes in the socket during an answer, beside kMaxHeaderBytes
inline constexpr size_t kMaxDiscardedBytes = 16 << 20;  // of a refused body, read so that its sender can receive the answer
inline constexpr int64_t kMaxPrompts = 32;              // of one request to /v1/completions
inline constexpr int64_t kMaxMessages = 4096;           // of one request to /v1/chat/completions
inline constexpr int64_t kMaxAnswerTokens = 4 << 20;    // prompts x n x max_tokens
inline constexpr int64_t kMaxLogprobs = 1 << 18;        // prompts x n x max_tokens x (1 + logprobs), where they are wanted
inline constexpr size_t kMaxTokenizeBytes = 1 << 20;    // text of /tokenize and /detokenize
inline constexpr int64_t kMaxStops = 16;                // stop strings of a request
inline constexpr size_t kMaxStopBytes = 1024;           // of one stop string
inline constexpr int64_t kMaxTopLogprobs = 20;          // per token
inline constexpr size_t kMaxName = 64;                  // bytes of `session` and `user`
inline constexpr size_t kMaxKeyBytes = 512;             // of an API key
inline constexpr size_t kMinKeyBytes = 16;

// Times and numbers that the caller of HttpServer may choose; tests choose short ones.
struct HttpLimits {
  int64_t connections = 1024;              // one more closes the connection that waits longest for a request
  std::chrono::milliseconds idle{60000};   // between two requests of a connection
  std::chrono::milliseconds head{10000};   // from the first byte of a request to the end of its header
  std::chrono::milliseconds body{30000};   // from the end of the header to the end of the body
  std::chrono::milliseconds write{30000};  // without any byte accepted by the client, or with fewer than kMinReadBytes
  std::chrono::milliseconds linger{2000};  // for the client to read an answer after which the connection closes
};

}  // namespace weft::serve

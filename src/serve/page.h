// The page at /: one HTML file, embedded at build time.
#pragma once

#include <string_view>

#include "serve/exchange.h"

namespace weft::serve {

// The file as it is, with kNoncePlace where a nonce goes.
std::string_view page_html();
inline constexpr std::string_view kNoncePlace = "WEFT_NONCE";

// The page with a fresh nonce, and a content security policy that allows its own script and style and nothing else.
HttpReply page_reply();

}  // namespace weft::serve

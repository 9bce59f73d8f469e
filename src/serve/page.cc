// The page at /: see page.h.
#include "serve/page.h"

#include "serve/reply_json.h"

namespace weft::serve {

HttpReply page_reply() {
  const std::string nonce = random_name();
  std::string page(page_html());
  for (size_t at = 0; (at = page.find(kNoncePlace, at)) != std::string::npos;) page.replace(at, kNoncePlace.size(), nonce);
  const std::string policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
                             "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
  return {.type = "text/html; charset=utf-8",
          .body = std::move(page),
          .fields = {{"Content-Security-Policy", policy},
                     {"Referrer-Policy", "no-referrer"},
                     {"X-Frame-Options", "DENY"},
                     {"Cross-Origin-Opener-Policy", "same-origin"}}};
}

}  // namespace weft::serve

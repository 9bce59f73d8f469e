// Who may speak to the server: rules about the fields Host, Origin and Authorization.
//
// A page of another site can make a browser send requests to a server on the loopback address. Two rules refuse such requests.
// `Host` must be a name of this server: when a site points its own name at 127.0.0.1 (DNS rebinding), the browser sends that name.
// `Origin` must be absent or equal to `Host`: a browser adds `Origin` to every request across origins that may change something.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/api_error.h"

namespace weft::serve {

struct AccessRules {
  bool loopback = true;                    // the server listens on the loopback address: `Host` must be a name of that address
  std::vector<std::string> allowed_hosts;  // further names, without port
  std::string key;                         // empty: clients need no key
};

// The fields of a request that the rules are about. A field that the client did not send is absent.
struct AccessFields {
  std::optional<std::string> host, origin, authorization;
};

// The name in a Host field, in lower case, without port and brackets. Absent where the field is not one name and an optional port.
std::optional<std::string> host_name(std::string_view field);
bool is_loopback_name(std::string_view name);  // localhost, 127.0.0.0/8, ::1
bool is_address(std::string_view name);        // IPv4 or IPv6

// Throws ApiError with status 400 or 403 for a Host or Origin that is not this server's.
void check_origin(const AccessRules& rules, const AccessFields& fields);
// Throws ApiError with status 401 for a missing or wrong key.
void check_key(const AccessRules& rules, const AccessFields& fields);
// Are the keys equal? The time depends on the length of `given` alone.
bool same_key(std::string_view wanted, std::string_view given);

// The key in a file: its first line, of kMinKeyBytes to kMaxKeyBytes printable characters without blanks. Throws
// std::runtime_error for another content, and for a file that others may read.
std::string read_key_file(const std::string& file);

}  // namespace weft::serve

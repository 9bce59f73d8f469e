// The answer to /metrics, in Prometheus's text format.
#pragma once

#include <string>

#include "serve/engine.h"
#include "serve/http_server.h"

namespace weft::serve {

std::string metrics_text(const Engine& engine, const HttpStats& http);
inline constexpr const char* kMetricsType = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace weft::serve

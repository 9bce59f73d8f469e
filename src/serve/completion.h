// Completions and chat completions: from a request to the batcher, and from there to an answer.
#pragma once

#include <memory>
#include <string>

#include "serve/engine.h"
#include "serve/exchange.h"

namespace weft::serve {

// These queue the request and return. The answer comes from the thread of the batcher, or from a worker. They throw ApiError where
// they refuse the request: 429 if the queue is full, 503 if the server stops, 404 for another model, 400 for everything else.
// `peer`: the address of the client.
void answer_completion(Engine& engine, const CompletionRequest& request, const std::string& peer,
                       std::shared_ptr<Exchange> exchange);
void answer_chat(Engine& engine, const ChatRequest& request, const std::string& peer, std::shared_ptr<Exchange> exchange);

}  // namespace weft::serve

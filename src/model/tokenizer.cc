// The public tokenizer: see weft/tokenizer.h.
#include "weft/tokenizer.h"

#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/unicode.h"

namespace weft {

Tokenizer::Tokenizer(std::unique_ptr<const model::Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  return Tokenizer(std::make_unique<const model::Tokenizer>(model::Tokenizer::load(path)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const { return tokenizer_->encode(text); }
std::optional<std::vector<int32_t>> Tokenizer::encode(std::string_view text, size_t most) const {
  return tokenizer_->encode(text, most);
}
std::string Tokenizer::decode(std::span<const int32_t> tokens) const { return tokenizer_->decode(tokens); }
std::string_view Tokenizer::bytes(int32_t token) const { return tokenizer_->bytes(token); }
std::optional<int32_t> Tokenizer::token(std::string_view bytes) const { return tokenizer_->token_id(bytes); }
bool Tokenizer::is_special(int32_t token) const { return tokenizer_->is_special(token); }
bool Tokenizer::is_added(int32_t token) const { return tokenizer_->is_added(token); }
int32_t Tokenizer::size() const { return tokenizer_->size(); }

std::string to_well_formed_utf8(std::string_view text) { return model::to_well_formed(text); }

}  // namespace weft

// "Did you mean": the known word that is nearest to a mistyped one.
#pragma once

#include <string>
#include <vector>

namespace weft::tools {

// The word that begins with `given` (gen: generate). Otherwise the word with the fewest edits, at most a third of its letters.
// Empty where no word is near.
std::string nearest(const std::string& given, const std::vector<std::string>& known);

// "; did you mean WORD?", or `otherwise` where no word is near.
std::string did_you_mean(const std::string& given, const std::vector<std::string>& known, const std::string& otherwise = "");

}  // namespace weft::tools

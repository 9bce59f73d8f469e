// "Did you mean": see suggest.h.
#include "tools/suggest.h"

#include <algorithm>
#include <cctype>

namespace weft::tools {
namespace {

std::string folded(std::string text) {
  for (char& c : text) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Insertions, deletions, replacements and swaps of neighbours that turn one text into the other.
size_t edits(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> best(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        best[i][j] = i + j;
        continue;
      }
      best[i][j] = std::min({best[i - 1][j] + 1, best[i][j - 1] + 1, best[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) best[i][j] = std::min(best[i][j], best[i - 2][j - 2] + 1);
    }
  return best[a.size()][b.size()];
}

}  // namespace

std::string nearest(const std::string& given, const std::vector<std::string>& known) {
  constexpr size_t kLongest = 64, kShortestPrefix = 2;
  if (given.empty() || given.size() > kLongest) return "";
  const std::string mine = folded(given);
  const size_t dashes = std::min(mine.find_first_not_of('-'), mine.size());
  std::string found;
  size_t fewest = SIZE_MAX;
  for (const std::string& word : known) {
    const std::string theirs = folded(word);
    const bool begins = mine.size() >= dashes + kShortestPrefix && theirs.starts_with(mine);
    const size_t count = begins ? 0 : edits(mine, theirs);
    const size_t letters = std::min(mine.size(), theirs.size()) - std::min(dashes, theirs.size());
    if (count >= fewest || (count > 0 && count > std::max<size_t>(letters / 3, 1)) || (letters < 2 && count > 0)) continue;
    found = word;
    fewest = count;
  }
  return found;
}

std::string did_you_mean(const std::string& given, const std::vector<std::string>& known, const std::string& otherwise) {
  const std::string found = nearest(given, known);
  return found.empty() ? otherwise : "; did you mean " + found + "?";
}

}  // namespace weft::tools

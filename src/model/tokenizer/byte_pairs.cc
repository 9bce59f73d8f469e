// Byte pair encoding of a word: see byte_pairs.h.
#include "model/tokenizer/byte_pairs.h"

#include <algorithm>
#include <queue>

namespace weft::model {

BytePairs::BytePairs(std::vector<Merge> merges, const std::array<int32_t, 256>& bytes, int32_t size)
    : merges_(std::move(merges)), bytes_(bytes), begins_(static_cast<size_t>(size) + 1) {
  std::vector<int32_t> order(merges_.size());
  for (size_t rank = 0; rank < order.size(); ++rank) order[rank] = static_cast<int32_t>(rank);
  const auto merge = [&](int32_t rank) { return merges_[static_cast<size_t>(rank)]; };
  // Of equal pairs the latest comes first, and only that one is kept.
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const Merge x = merge(a), y = merge(b);
    return x.left != y.left ? x.left < y.left : x.right != y.right ? x.right < y.right : a > b;
  });
  const auto same = [&](int32_t a, int32_t b) { return merge(a).left == merge(b).left && merge(a).right == merge(b).right; };
  order.erase(std::unique(order.begin(), order.end(), same), order.end());
  rights_.reserve(order.size());
  for (int32_t rank : order) {
    rights_.push_back({merge(rank).right, rank});
    ++begins_[static_cast<size_t>(merge(rank).left) + 1];
  }
  for (size_t t = 1; t < begins_.size(); ++t) begins_[t] += begins_[t - 1];
}

int32_t BytePairs::rank_of(int32_t left, int32_t right) const {
  const auto begin = rights_.begin() + begins_[static_cast<size_t>(left)],
             end = rights_.begin() + begins_[static_cast<size_t>(left) + 1];
  const auto found = std::lower_bound(begin, end, right, [](const Right& r, int32_t token) { return r.token < token; });
  return found != end && found->token == right ? found->rank : kNone;
}

void BytePairs::encode(std::string_view word, std::vector<int32_t>& ids) const {
  if (word.size() == 1) {
    ids.push_back(bytes_[static_cast<unsigned char>(word[0])]);
    return;
  }
  // A linked list of tokens. A merge removes the right token of a pair from the list. `tail` marks its end.
  struct Node {
    int32_t id;
    size_t before, after;
  };
  const size_t tail = word.size();
  std::vector<Node> nodes(tail);
  for (size_t i = 0; i < tail; ++i) nodes[i] = {bytes_[static_cast<unsigned char>(word[i])], i - 1, i + 1};

  struct Candidate {
    int32_t rank;
    size_t at;
    // The queue's top is its largest: lowest rank, then leftmost.
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  std::vector<Candidate> first;
  const auto candidate_at = [&](size_t at, auto&& add) {
    const int32_t rank = rank_of(nodes[at].id, nodes[nodes[at].after].id);
    if (rank != kNone) add(Candidate{rank, at});
  };
  for (size_t i = 0; i + 1 < tail; ++i) candidate_at(i, [&](Candidate c) { first.push_back(c); });
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(first));

  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const Merge& merge = merges_[static_cast<size_t>(top.rank)];
    Node& left = nodes[top.at];
    if (left.id != merge.left || left.after == tail || nodes[left.after].id != merge.right)
      continue;  // the list has changed since this candidate was queued
    Node& right = nodes[left.after];
    left.id = merge.merged;
    right.id = kNone;
    left.after = right.after;
    if (left.after != tail) {
      nodes[left.after].before = top.at;
      candidate_at(top.at, [&](Candidate c) { queue.push(c); });
    }
    if (top.at != 0) candidate_at(left.before, [&](Candidate c) { queue.push(c); });
  }
  for (size_t i = 0; i < tail; i = nodes[i].after) ids.push_back(nodes[i].id);
}

}  // namespace weft::model

// Drafts by n-gram look-up: the latest occurrence with the longest match, and no proposal without a match.
#include "model/generate/draft.h"

#include <gtest/gtest.h>

namespace {

using weft::model::propose;
using Ids = std::vector<int32_t>;

TEST(Draft, WhatFollowedTheSameTokens) {
  EXPECT_EQ(propose(Ids{1, 2, 3, 9, 1, 2}, 3), (Ids{3, 9, 1}));
  EXPECT_EQ(propose(Ids{1, 2, 3, 9, 1, 2}, 1), (Ids{3}));
  EXPECT_EQ(propose(Ids{1, 2, 7, 1, 2, 8, 1, 2}, 2), (Ids{8, 1})) << "the latest of equals";
  EXPECT_EQ(propose(Ids{5, 1, 2, 7, 1, 2, 8, 5, 1, 2}, 2), (Ids{7, 1})) << "a longer match before a later one";
  EXPECT_EQ(propose(Ids{4, 4, 4, 4}, 3), (Ids{4})) << "no further than the text";
}

TEST(Draft, NothingWhereNothingRepeats) {
  for (const Ids& ids : {Ids{}, Ids{1}, Ids{1, 1}, Ids{1, 2}, Ids{1, 2, 3, 4, 2}}) EXPECT_TRUE(propose(ids, 4).empty());
  EXPECT_TRUE(propose(Ids{1, 2, 1, 2}, 0).empty());
}

}  // namespace

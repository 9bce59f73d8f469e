// How the library's own files reach what Model and HybridState keep private.
#pragma once

#include "weft/model.h"

namespace weft::model {

struct Access {
  static Model::Parts& parts(const Model& model) { return *model.parts_; }
  static HybridState::Pools& pools(const HybridState& state) { return *state.pools_; }
};

inline Model::Parts& parts_of(const Model& model) { return Access::parts(model); }
inline HybridState::Pools& pools_of(const HybridState& state) { return Access::pools(state); }

}  // namespace weft::model

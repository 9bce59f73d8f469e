// Teams of kLanes threads that share a row, and their sums. A team never crosses subgroups, because subgroups have at least eight
// lanes. The sums of a team have one order, whatever the size of the subgroup.
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

const uint kLanes = 8;

// Number of this thread in the workgroup, number of its team, and number of its lane in the team.
uint thread_number() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }
uint team_number() { return thread_number() / kLanes; }
uint lane_number() { return gl_SubgroupInvocationID % kLanes; }

// All lanes of a team must call it together. All get the same bits.
float sum_lanes(float value) {
  precise float x = value;
  x = x + subgroupShuffleXor(x, 1);
  x = x + subgroupShuffleXor(x, 2);
  x = x + subgroupShuffleXor(x, 4);
  return x;
}

float max_lanes(float x) {
  x = max(x, subgroupShuffleXor(x, 1));
  x = max(x, subgroupShuffleXor(x, 2));
  return max(x, subgroupShuffleXor(x, 4));
}

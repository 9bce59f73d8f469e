// Teams of kLanes threads that share a row, and their sums. A team is part of a subgroup on every device, since subgroups have at least
// eight lanes, and its sums have one order whatever the size of the subgroup.
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

const uint kLanes = 8;

// Numbers of this thread within the workgroup, of its team, and of its lane within the team.
uint thread_number() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }
uint team_number() { return thread_number() / kLanes; }
uint lane_number() { return gl_SubgroupInvocationID % kLanes; }

// All lanes of a team must call together, and get the same bits.
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

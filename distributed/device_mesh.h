// DeviceMesh: the ranks of a job as a grid with named dimensions, and this rank's groups along
// them. Names and meanings are those of torch.distributed.device_mesh.
//
//     auto mesh = dist::init_device_mesh({2, 4}, {"replicate", "shard"});   // ranks 0..7, row by row
//     mesh.get_group("shard");                // this rank's row: {0,1,2,3} or {4,5,6,7}
//     mesh.get_local_rank("replicate");       // its place in the column: 0 or 1
//     FullyShardedDataParallel fsdp(model, {.sharding_strategy = ShardingStrategy::kHybridShard,
//                                           .device_mesh = mesh});
//     fully_shard(head, {.mesh = mesh["shard"]});                           // one dimension of it
//
// A mesh is a value: copies share the groups.
#pragma once
#include <string>
#include <vector>

#include "distributed/process_group.h"

namespace sherd::dist {

class DeviceMesh {
 public:
  DeviceMesh() = default;
  // From groups that exist, this rank's along each dimension. Error for as many names as
  // dimensions where there are any, names given twice, a group that this rank is not in, or groups
  // that share other ranks than this one.
  static DeviceMesh from_groups(std::vector<Group> groups, std::vector<std::string> names = {});

  bool defined() const { return !groups_.empty(); }
  int ndim() const { return int(groups_.size()); }
  int size() const;  // of all of it
  int size(int dim) const { return group(dim)->size(); }
  std::vector<int> shape() const;
  const std::vector<std::string>& mesh_dim_names() const { return names_; }  // empty: unnamed
  bool has_name(const std::string& name) const;

  // By name or by index; the only one without. Errors name the dimensions that exist.
  const Group& get_group() const;
  const Group& get_group(const std::string& name) const { return group(index_of(name)); }
  const Group& get_group(int dim) const { return group(dim); }
  int get_local_rank(const std::string& name) const { return get_group(name)->rank(); }
  int get_local_rank(int dim) const { return group(dim)->rank(); }
  DeviceMesh operator[](const std::string& name) const;

 private:
  int index_of(const std::string& name) const;
  const Group& group(int dim) const;

  std::vector<Group> groups_;
  std::vector<std::string> names_;
};

// All ranks of the job, row by row. Every rank of the job makes the same call. Error if the sizes'
// product is not the world size.
DeviceMesh init_device_mesh(const std::vector<int>& shape, std::vector<std::string> names = {});

}  // namespace sherd::dist

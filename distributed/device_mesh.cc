#include "distributed/device_mesh.h"

#include <algorithm>

#include "distributed/distributed.h"

namespace sherd::dist {
namespace {

std::string list(const std::vector<std::string>& names) {
  std::string s;
  for (auto& n : names) s += (s.empty() ? "" : ", ") + n;
  return s.empty() ? "no names" : s;
}

std::string text(const std::vector<int>& shape) {
  std::string s;
  for (int n : shape) s += concat(s.empty() ? "" : " x ", n);
  return s;
}

void check_names(const std::vector<std::string>& names, size_t dims) {
  if (!names.empty() && names.size() != dims)
    fail("[device_mesh] got ", names.size(), " names (", list(names), ") for ", dims,
         " dimensions, should be one each");
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i].empty() || std::count(names.begin(), names.end(), names[i]) > 1)
      fail("[device_mesh] the name '", names[i], "' is empty or was given twice");
}

}  // namespace

DeviceMesh DeviceMesh::from_groups(std::vector<Group> groups, std::vector<std::string> names) {
  check_names(names, groups.size());
  if (groups.empty()) fail("[device_mesh] got no groups, should be one a dimension");
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i] || groups[i]->rank() < 0)
      fail("[device_mesh] this rank is not in the group of dimension ", i);
    for (size_t k = 0; k < i; ++k)
      for (int r : groups[i]->ranks())
        if (r != groups[i]->ranks()[groups[i]->rank()] &&
            std::count(groups[k]->ranks().begin(), groups[k]->ranks().end(), r))
          fail("[device_mesh] the groups of dimensions ", k, " and ", i, " share rank ", r,
               ": should have no rank in common but this one");
  }
  DeviceMesh mesh;
  mesh.groups_ = std::move(groups);
  mesh.names_ = std::move(names);
  return mesh;
}

int DeviceMesh::size() const {
  int n = 1;
  for (auto& g : groups_) n *= g->size();
  return n;
}

std::vector<int> DeviceMesh::shape() const {
  std::vector<int> s;
  for (auto& g : groups_) s.push_back(g->size());
  return s;
}

bool DeviceMesh::has_name(const std::string& name) const {
  return std::count(names_.begin(), names_.end(), name) > 0;
}

int DeviceMesh::index_of(const std::string& name) const {
  const auto it = std::find(names_.begin(), names_.end(), name);
  if (it == names_.end())
    fail("[device_mesh] there is no dimension '", name, "': this mesh has ", list(names_));
  return int(it - names_.begin());
}

const Group& DeviceMesh::group(int dim) const {
  if (dim < 0 || dim >= ndim())
    fail("[device_mesh] there is no dimension ", dim, ": this mesh has ", ndim());
  return groups_[dim];
}

const Group& DeviceMesh::get_group() const {
  if (ndim() != 1)
    fail("[device_mesh] this mesh has ", ndim(), " dimensions (", list(names_),
         "): say which one's group");
  return groups_[0];
}

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  DeviceMesh mesh;
  mesh.groups_ = {group(index_of(name))};
  mesh.names_ = {name};
  return mesh;
}

DeviceMesh init_device_mesh(const std::vector<int>& shape, std::vector<std::string> names) {
  check_names(names, shape.size());
  int64_t product = 1;
  for (int n : shape) {
    if (n < 1) fail("[init_device_mesh] a size is ", n, ", should be 1 or more");
    product *= n;
  }
  if (shape.empty() || product != world_size())
    fail("[init_device_mesh] the shape ", text(shape), " has ", product, " places, the job ",
         world_size(), " ranks");
  std::vector<Group> groups;
  int stride = int(product);
  for (int n : shape) {
    stride /= n;
    Group mine;
    for (int first = 0; first < product; ++first) {
      if (first / stride % n != 0) continue;  // not the first rank of a line along this dimension
      std::vector<int> ranks;
      for (int i = 0; i < n; ++i) ranks.push_back(first + i * stride);
      const Group g = n == product ? default_group() : new_group(ranks);
      if (g->rank() >= 0) mine = g;
    }
    groups.push_back(mine);
  }
  return DeviceMesh::from_groups(std::move(groups), std::move(names));
}

}  // namespace sherd::dist

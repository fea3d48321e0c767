#include "distributed/shm/shm_group.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "distributed/deadline.h"
#include "distributed/exchange_texts.h"

namespace sherd::dist {
namespace {

std::string bytes_of(const Place& place) {
  return std::string(reinterpret_cast<const char*>(&place), sizeof place);
}

}  // namespace

ShmGroup::ShmGroup(std::shared_ptr<Node> node, int rank, std::vector<int> ranks, Store& store,
                   Milliseconds timeout)
    : node_(std::move(node)),
      rank_(rank),
      ranks_(std::move(ranks)),
      blocks_(ranks_.size()),
      places_(ranks_.size()) {
  block_bytes_ = lanes_at() + int64_t(sizeof(Lane)) * size();
  // Straight from the arena: such pages are zeros, and lie where no tensor will.
  blocks_[rank_] = take(block_bytes_);
  try {
    const std::vector<std::string> places =
        exchange_texts(store, "control", bytes_of(find(blocks_[rank_], block_bytes_)),
                       {.op = "shm", .ranks = ranks_, .rank = rank_, .timeout = timeout});
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      Place place;
      if (places[r].size() != sizeof place) fail("[shm] the store's control/", r, " is damaged");
      std::memcpy(&place, places[r].data(), sizeof place);
      blocks_[r] = node_->at(ranks_[r], place, block_bytes_, /*stays=*/true);
      places_[r] = place;
    }
  } catch (...) {
    give_back(blocks_[rank_], block_bytes_);
    forget_controls();
    throw;
  }
  node_->add(this);
  // One may have been lost before it was listened for.
  for (int p = 0; p < size(); ++p)
    if (is_lost(p)) alarm(rank_);
}

ShmGroup::~ShmGroup() {
  node_->remove(this);
  if (forgotten_) give_back(blocks_[rank_], block_bytes_);
  forget_controls();
}

void ShmGroup::forget_controls() {
  for (int r = 0; r < size(); ++r)
    if (places_[r].block >= 0) forget(r, places_[r]);
}

char* ShmGroup::take(int64_t bytes) {
  char* data = node_->arena().take(bytes);
  if (!data)
    fail("[shm] the system has no ", bytes,
         " bytes more for a group's collectives: ", std::strerror(errno));
  return data;
}

int64_t ShmGroup::lanes_at() const {
  return aligned(sizeof(Control) + int64_t(sizeof(Visit)) * size());
}

Ref<Storage> ShmGroup::room(int64_t bytes) {
  auto room = make_ref<Storage>(std::max(bytes, BlockSource::kLeast), kCPU);
  if (find(room->data(), bytes).block >= 0) return room;
  // The allocator has pages that were detached.
  char* const data = take(bytes);
  const std::shared_ptr<void> owner(
      data, [node = node_](void* p) { node->arena().give_back(static_cast<char*>(p), 0); });
  return make_ref<Storage>(data, bytes, kCPU, owner);
}

Patience ShmGroup::patience() const {
  return Patience(node_->ranks().size() > std::thread::hardware_concurrency());
}

ShmGroup::Visit& ShmGroup::visit(int owner, int visitor) {
  return reinterpret_cast<Visit*>(blocks_[owner] + sizeof(Control))[visitor];
}

// Both sides store before they look, sequentially consistently: either the writer sees that the
// owner gave up, or the owner sees that it is written to.
ShmGroup::Writing::Writing(ShmGroup& group, int owner)
    : is_writing_(group.visit(owner, group.rank_).is_writing) {
  is_writing_.store(1);
  if (!group.gave_up(owner)) return;
  is_writing_.store(0);
  throw ConnectionLost("a peer gave up before it was written to");
}

bool ShmGroup::await_writers(Milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    while (visit(rank_, p).is_writing.load() != 0 && !node_->is_lost(ranks_[p])) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

ShmGroup::Lane& ShmGroup::lane(int from, int to) {
  return reinterpret_cast<Lane*>(blocks_[from] + lanes_at())[to];
}

bool ShmGroup::is_lost(int peer) {
  return peer != rank_ && (control(peer).closed.load() != 0 || node_->is_lost(ranks_[peer]));
}

bool ShmGroup::is_broken() {
  if (control(rank_).alarms.load() == 0) return false;
  for (int p = 0; p < size(); ++p)
    if (is_lost(p) && !has_left(p)) return true;
  return false;
}

bool ShmGroup::has_left(int peer) {
  for (const Post& post : control(peer).posts)
    if (post.turn.load() > 0 && post.tag.kind == CollectiveKind::kLeave) return true;
  return false;
}

void ShmGroup::alarm(int peer) {
  control(peer).alarms.fetch_add(1);
  for (Bell& bell : control(peer).bells) ring_all(bell);
}

void ShmGroup::close() {
  control(rank_).closed.store(1);  // first: who comes second may rely on it
  if (closed_.exchange(true)) return;
  for (int p = 0; p < size(); ++p) alarm(p);
}

void ShmGroup::on_lost(int rank) {
  for (int r : ranks_)
    if (r == rank) alarm(rank_);
}

void ShmGroup::throw_lost(int peer) {
  throw ConnectionLost(peer < 0 ? std::string("the group was closed")
                                : concat("rank ", ranks_[peer], " is gone"));
}

void ShmGroup::throw_late() {
  close();
  throw DeadlinePassed("the deadline has passed");
}

}  // namespace sherd::dist

#include "distributed/hosts_exchange.h"

#include <algorithm>
#include <bit>

namespace sherd::dist {
namespace {

// Up to here a rank sends all of a tensor to the other hosts itself, which takes fewer phases.
constexpr int64_t kWhole = MeshExchange::kEagerBytes;

// The ranks of a mesh whose numbers are first, first + step, first + 2 step, ...: another channel.
class Column : public Mesh {
 public:
  Column(Mesh& all, int first, int step) : all_(all), first_(first), step_(step) {}

  std::unique_ptr<Buffer> buffer(void* data, int64_t bytes) override {
    return std::make_unique<View>(*this, all_.buffer(data, bytes));
  }
  std::vector<int> lost_peers() override {
    std::vector<int> lost;
    for (int p : all_.lost_peers())
      if (p % step_ == first_) lost.push_back(p / step_);
    return lost;
  }
  void close() override { all_.close(); }

 private:
  static constexpr uint64_t kChannels = 16;  // from here on: nobody else has 17 and 18

  class View : public Buffer {
   public:
    View(const Column& column, std::unique_ptr<Buffer> buffer)
        : column_(column), buffer_(std::move(buffer)) {}
    void send(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
      buffer_->send(column_.of(peer), kChannels + channel, offset, bytes);
    }
    void recv(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
      buffer_->recv(column_.of(peer), kChannels + channel, offset, bytes);
    }
    void recv_any(uint64_t, int64_t, int64_t) override {
      fail("[hosts] a column receives from one rank at a time");
    }
    void wait_send(TimePoint deadline) override { buffer_->wait_send(deadline); }
    int wait_recv(TimePoint deadline) override {
      const int peer = buffer_->wait_recv(deadline);
      return peer < 0 ? peer : peer / column_.step_;
    }
    void wake() override { buffer_->wake(); }

   private:
    const Column& column_;
    std::unique_ptr<Buffer> buffer_;
  };

  int of(int peer) const { return first_ + peer * step_; }

  Mesh& all_;
  int first_, step_;
};

// What a group of several hosts knows as its mesh: messages between all; closed with what is
// within.
class HostsMesh : public Mesh {
 public:
  HostsMesh(std::unique_ptr<Mesh> all, std::unique_ptr<Mesh> within, int first)
      : all_(std::move(all)), within_(std::move(within)), first_(first) {}

  std::unique_ptr<Buffer> buffer(void* data, int64_t bytes) override {
    return all_->buffer(data, bytes);
  }
  std::vector<int> lost_peers() override {
    std::vector<int> lost = all_->lost_peers();
    for (int p : within_->lost_peers()) lost.push_back(first_ + p);
    std::sort(lost.begin(), lost.end());
    lost.erase(std::unique(lost.begin(), lost.end()), lost.end());
    return lost;
  }
  void close() override {
    all_->close();
    within_->close();
  }

 private:
  std::unique_ptr<Mesh> all_, within_;
  int first_;
};

class HostsExchange : public Exchange {
 public:
  HostsExchange(Mesh& mesh, std::unique_ptr<Exchange> within, int rank, int size, int per_host)
      : mesh_(mesh),
        rank_(rank),
        size_(size),
        width_(per_host),
        hosts_(size / per_host),
        host_(rank / per_host),
        number_(rank % per_host),
        column_(mesh, number_, width_),
        within_(std::move(within)),
        across_(&column_, host_, hosts_, size),
        flat_(&mesh, rank, size) {}

  void open() override {
    within_->open();
    across_.open();
    flat_.open();
  }

  void begin(const CollectiveTag& tag, std::vector<int> partners, TimePoint deadline) override {
    tag_ = tag;
    partners_ = std::move(partners);
    deadline_ = deadline;
    is_flat_ = false;
    within_->begin(tag, others(width_, number_), deadline);
    across_.begin(tag, others(hosts_, host_), deadline);
  }

  void transfer(const PartsOfRanks& out, const PartsOfRanks& in) override {
    if (tag_.kind == CollectiveKind::kAllGather) return gather(out, in);
    go_flat();  // a barrier is nothing more
    if (tag_.kind != CollectiveKind::kBarrier) flat([&] { flat_.transfer(out, in); });
  }
  void reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op) override {
    if (tag_.kind == CollectiveKind::kReduceScatter) return scatter_sums(out, mine, to, op);
    go_flat();
    flat([&] { flat_.reduce(out, mine, to, op); });
  }
  void broadcast(const Part& part, int root) override;
  void all_reduce(const Parts& parts, ReduceOp op) override;

  void end() override {
    within([&] { within_->end(); });
    across([&] { across_.end(); });
    if (is_flat_ && tag_.kind != CollectiveKind::kBarrier) flat([&] { flat_.end(); });
    Exchange::drop();
  }
  void say_goodbye(uint64_t sequence, TimePoint deadline) override {
    within_->say_goodbye(sequence, deadline);
    across_.say_goodbye(sequence, deadline);  // where ranks in a collective look for tags
    flat_.say_goodbye(sequence, deadline);
  }
  // Not before all is said: a wait that ends late closes the mesh.
  void await_goodbyes() override {
    within_->await_goodbyes();
    across_.await_goodbyes();
    flat_.await_goodbyes();
  }
  std::optional<CollectiveTag> goodbye_of(int peer) override { return flat_.goodbye_of(peer); }
  void drop() override {
    within_->drop();
    across_.drop();
    flat_.drop();
    Exchange::drop();
  }

 private:
  static std::vector<int> others(int size, int me) {
    std::vector<int> all;
    for (int i = 1; i < size; ++i) all.push_back((me + i) % size);
    return all;
  }
  int rank_of(int host, int number) const { return host * width_ + number; }

  // Runs a phase. A late one closes all, as any mesh does, and ranks are those of the whole group.
  template <class F, class Rank>
  void phase(const F& f, const Rank& rank) {
    try {
      f();
    } catch (TagMismatch& e) {
      e.peer = rank(e.peer);
      throw;
    } catch (const DeadlinePassed&) {
      mesh_.close();
      throw;
    }
  }
  template <class F>
  void within(const F& f) {
    phase(f, [&](int number) { return rank_of(host_, number); });
  }
  template <class F>
  void across(const F& f) {
    phase(f, [&](int host) { return rank_of(host, number_); });
  }
  template <class F>
  void flat(const F& f) {
    phase(f, [](int rank) { return rank; });
  }

  void go_flat() {
    if (std::exchange(is_flat_, true)) return;
    within([&] { within_->transfer({}, {}); });
    across([&] { across_.transfer({}, {}); });
    if (tag_.kind != CollectiveKind::kBarrier) flat_.begin(tag_, partners_, deadline_);
  }
  void gather(const PartsOfRanks& out, const PartsOfRanks& in);
  void scatter_sums(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op);
  // AVG is a SUM within the host, and divided across.
  static ReduceOp partial(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }

  Mesh& mesh_;
  const int rank_, size_, width_, hosts_, host_, number_;  // number: among the host's ranks
  Column column_;
  std::unique_ptr<Exchange> within_;
  MeshExchange across_, flat_;
  CollectiveTag tag_;
  std::vector<int> partners_;
  TimePoint deadline_;
  bool is_flat_ = false;  // this collective has no way by hosts
};

void append(Exchange::Parts& list, const Exchange::Parts& more) {
  list.insert(list.end(), more.begin(), more.end());
}

// Every rank's own parts to all ranks: to those of the host, to the column, and then what came in
// the column to those of the host.
void HostsExchange::gather(const PartsOfRanks& out, const PartsOfRanks& in) {
  const Parts& mine = out[rank_ == 0 ? 1 : 0];
  PartsOfRanks to(width_), from(width_);
  for (int i = 0; i < width_; ++i) to[i] = mine, from[i] = in[rank_of(host_, i)];
  within([&] { within_->transfer(to, from); });
  PartsOfRanks to_hosts(hosts_, mine), from_hosts(hosts_);
  for (int k = 0; k < hosts_; ++k) from_hosts[k] = in[rank_of(k, number_)];
  across([&] { across_.transfer(to_hosts, from_hosts); });
  for (int i = 0; i < width_; ++i) {
    to[i].clear(), from[i].clear();
    for (int k = 0; k < hosts_; ++k) {
      if (k == host_) continue;
      append(to[i], in[rank_of(k, number_)]);
      append(from[i], in[rank_of(k, i)]);
    }
  }
  within([&] { within_->transfer(to, from); });
}

// Each rank's parts summed over all ranks: the column's over the ranks of the host, and its own
// over the column.
void HostsExchange::scatter_sums(const PartsOfRanks& out, const Parts& mine, const Parts& to,
                                 ReduceOp op) {
  const auto parts_for = [&](int rank) -> const Parts& { return rank == rank_ ? mine : out[rank]; };
  // The other hosts' sums go where this rank has what it puts into them, if these parts are room to
  // work in: no other rank reads them.
  const bool in_place =
      tag_.same_shape && std::equal(to.begin(), to.end(), mine.begin(), mine.end(),
                                    [](auto& a, auto& b) { return a.data == b.data; });
  const auto rounded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  int64_t bytes = 0;
  for (int k = 0; k < hosts_; ++k)
    for (const Part& p : parts_for(rank_of(k, number_)))
      bytes += in_place || k == host_ ? 0 : rounded(p.bytes());
  const auto room = make_ref<Storage>(bytes, kCPU);
  hold(room);

  PartsOfRanks to_numbers(width_), to_hosts(hosts_);
  for (int i = 0; i < width_; ++i)
    for (int k = 0; k < hosts_; ++k) append(to_numbers[i], parts_for(rank_of(k, i)));
  Parts sums;
  char* at = room->data();
  for (int k = 0; k < hosts_; ++k) {
    if (k == host_) {
      append(sums, to);
      continue;
    }
    for (const Part& p : parts_for(rank_of(k, number_))) {
      to_hosts[k].push_back(in_place ? p : Part{at, p.numel, p.dtype});
      if (!in_place) at += rounded(p.bytes());
    }
    append(sums, to_hosts[k]);
  }
  within([&] { within_->reduce(to_numbers, to_numbers[number_], sums, partial(op)); });
  across([&] { across_.reduce(to_hosts, to, to, op); });
}

void HostsExchange::all_reduce(const Parts& parts, ReduceOp op) {
  if (total_bytes(parts) <= kWhole) {
    within([&] { within_->all_reduce(parts, partial(op)); });
    across([&] { across_.all_reduce(parts, op); });
    return;
  }
  PartsOfRanks out(width_), in(width_);
  for (int i = 0; i < width_; ++i) out[i] = cut(parts, i, width_);
  const Parts mine = out[number_];
  within([&] { within_->reduce(out, mine, mine, partial(op)); });
  across([&] { across_.all_reduce(mine, op); });
  for (int i = 0; i < width_; ++i) in[i] = std::exchange(out[i], mine);
  within([&] { within_->transfer(out, in); });
}

// To the ranks of the root's host; from there each number a piece to its column; and the pieces to
// those of each other host.
void HostsExchange::broadcast(const Part& part, int root) {
  const int from = root / width_;
  const bool in_pieces = part.bytes() > kWhole;
  const auto piece = [&](int number) { return in_pieces ? part.cut(number, width_) : part; };
  within(
      [&] { host_ == from ? within_->broadcast(part, root % width_) : within_->transfer({}, {}); });
  PartsOfRanks out(hosts_), in(hosts_);
  if (host_ == from) {
    for (int k = 0; k < hosts_; ++k) out[k] = {piece(number_)};
  } else {
    in[from] = {piece(number_)};
  }
  across([&] { across_.transfer(out, in); });
  if (!in_pieces || host_ == from) return;
  PartsOfRanks to(width_, {piece(number_)}), others(width_);
  for (int i = 0; i < width_; ++i) others[i] = {piece(i)};
  within([&] { within_->transfer(to, others); });
}

}  // namespace

HostsTransport connect_hosts(std::unique_ptr<Mesh> all, HostsTransport within, int rank, int size,
                             int per_host) {
  if (size % per_host != 0 || !std::has_single_bit(unsigned(per_host)))
    fail("[hosts] ", per_host, " ranks a host of ", size,
         ": should be a power of two that divides them");
  auto mesh = std::make_unique<HostsMesh>(std::move(all), std::move(within.mesh),
                                          rank / per_host * per_host);
  auto exchange =
      std::make_unique<HostsExchange>(*mesh, std::move(within.exchange), rank, size, per_host);
  return {std::move(mesh), std::move(exchange)};
}

}  // namespace sherd::dist

#include "data/packed_dataset.h"

#include <algorithm>
#include <set>

#include "core/atomic_file.h"
#include "core/error.h"

namespace sherd::data {

PackedDataset::PackedDataset(std::vector<std::vector<uint16_t>> documents,
                             const PackedOptions& options)
    : documents_(std::move(documents)), options_(options) {
  const int64_t T = options_.sequence_length;
  if (T < 1) fail("[PackedDataset] sequence_length must be at least 1, got ", T);
  if (options_.pad_id < 0 || options_.pad_id >= options_.vocab_size)
    fail("[PackedDataset] pad_id ", options_.pad_id, " is not in the vocabulary of ",
         options_.vocab_size);
  std::vector<Part> parts;
  for (int64_t d = 0; d < int64_t(documents_.size()); ++d) {
    const auto& tokens = documents_[size_t(d)];
    for (size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i] >= options_.vocab_size)
        fail("[PackedDataset] document ", d, " holds token ", tokens[i], " at position ",
             int64_t(i), ", but the vocabulary has ", options_.vocab_size);
    const int64_t places = int64_t(tokens.size()) - 1;
    for (int64_t begin = 0; begin < places; begin += T)
      parts.push_back({d, begin, std::min(T, places - begin)});
  }
  if (parts.empty())
    fail("[PackedDataset] none of the ", documents_.size(), " documents has two tokens");
  std::ranges::stable_sort(parts, std::greater{}, &Part::length);
  std::set<std::pair<int64_t, size_t>> room;  // left in a row, and which
  for (const Part& part : parts) {
    auto best = room.lower_bound({part.length, 0});
    size_t row = rows_.size();
    int64_t left = T;
    if (best == room.end()) {
      rows_.emplace_back();
    } else {
      std::tie(left, row) = *best;
      room.erase(best);
    }
    rows_[row].push_back(part);
    if (left > part.length) room.insert({left - part.length, row});
  }
}

PackedDataset PackedDataset::from_tokens(std::span<const uint16_t> tokens, uint16_t end_id,
                                         const PackedOptions& options) {
  std::vector<std::vector<uint16_t>> documents;
  for (auto begin = tokens.begin(); begin != tokens.end();) {
    auto end = std::find(begin, tokens.end(), end_id);
    if (end != tokens.end()) ++end;
    documents.emplace_back(begin, end);
    begin = end;
  }
  return PackedDataset(std::move(documents), options);
}

uint64_t PackedDataset::fingerprint() const {
  std::vector<uint64_t> sums = {uint64_t(options_.sequence_length)};
  for (const auto& tokens : documents_)
    sums.push_back(checksum_of(tokens.data(), int64_t(tokens.size() * sizeof tokens[0])));
  return checksum_of(sums.data(), int64_t(sums.size() * sizeof sums[0]));
}

Sample PackedDataset::get(int64_t index) const {
  if (index < 0 || index >= size())
    fail("[PackedDataset] sample ", index, " was asked for; there are ", size());
  const int64_t T = options_.sequence_length;
  const Tensor input_ids = full({T}, double(options_.pad_id), kInt64),
               labels = full({T}, -100, kInt64), document_ids = full({T}, -1, kInt64),
               position_ids = zeros({T}, kInt64);
  int64_t at = 0, number = 0;
  for (const Part& part : rows_[size_t(index)]) {
    const uint16_t* tokens = documents_[size_t(part.document)].data() + part.begin;
    for (int64_t i = 0; i < part.length; ++i, ++at) {
      input_ids.data<int64_t>()[at] = tokens[i];
      labels.data<int64_t>()[at] = tokens[i + 1];
      document_ids.data<int64_t>()[at] = number;
      position_ids.data<int64_t>()[at] = i;
    }
    ++number;
  }
  return {{"input_ids", input_ids},
          {"labels", labels},
          {"document_ids", document_ids},
          {"position_ids", position_ids}};
}

double PackedDataset::fill() const {
  int64_t used = 0;
  for (auto& row : rows_)
    for (const Part& part : row) used += part.length;
  return double(used) / (double(size()) * double(options_.sequence_length));
}

namespace {

// Bool [B, copies, T, T]: `same` where the second place belongs to what the first one sees.
Tensor document_mask(const char* op, const Tensor& document_ids, int64_t copies, bool causal,
                     bool same) {
  const int dims = document_ids.dim();
  if (document_ids.dtype() != kInt64 || dims < 1 || dims > 2 || !document_ids.device().is_cpu())
    fail("[", op, "] document_ids must be int64 [B, T] on the cpu, got ", document_ids.dtype(), " ",
         document_ids.sizes());
  const Tensor ids = contiguous_raw(document_ids);
  const int64_t T = document_ids.size(dims - 1), B = dims == 2 ? document_ids.size(0) : 1;
  const Tensor mask = empty({B, copies, T, T}, kBool);
  bool* out = mask.data<bool>();
  for (int64_t b = 0; b < B; ++b)
    for (int64_t c = 0; c < copies; ++c) {
      const int64_t* id = ids.data<int64_t>() + b * T;
      for (int64_t t = 0; t < T; ++t)
        for (int64_t s = 0; s < T; ++s) {
          const bool visible = s == t || (id[s] == id[t] && id[t] >= 0 && (!causal || s < t));
          *out++ = visible == same;
        }
    }
  return mask;
}

}  // namespace

Tensor visible_documents(const Tensor& document_ids, bool causal) {
  return document_mask("visible_documents", document_ids, 1, causal, true);
}

Tensor hidden_documents(const Tensor& document_ids, int64_t heads, bool causal) {
  if (heads < 1) fail("[hidden_documents] heads must be at least 1, got ", heads);
  const Tensor mask = document_mask("hidden_documents", document_ids, heads, causal, false);
  const Dims& s = mask.sizes();
  return mask.as_strided_raw({s[0] * s[1], s[2], s[3]}, {s[2] * s[3], s[3], 1}, 0);
}

}  // namespace sherd::data

// Files of named tensors in the safetensors format, interchangeable with PyTorch's.
//
//     save_safetensors("model.safetensors", tensors, {{"format", "pt"}});
//     std::map<std::string, Tensor> tensors = load_safetensors("model.safetensors");
//
//     SafetensorsReader file("model.safetensors");            // reads the header alone
//     Tensor w = file.read("layers.0.ffn.0.weight");
//     file.read_range("embedding.weight", lo, hi, piece);     // elements [lo, hi), into memory
//
//     SafetensorsWriter writer("model.safetensors", entries); // names, dtypes and shapes first,
//     for (...) writer.append(tensor);                        // then the tensors, one at a time
//     writer.finish();
//
// The format: the header's length (8 bytes, little-endian), a JSON object of {name: {dtype, shape,
// data_offsets}} padded with spaces to a multiple of 8 bytes, then the tensors' bytes side by side,
// row-major and little-endian; offsets count from the end of the header. A reader accepts a file
// only if the header is well formed and the tensors cover the rest of the file, each byte once.
// Errors name the file, the tensor and the sizes. A file is written beside its name and renamed
// when it is whole.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/atomic_file.h"
#include "core/tensor.h"

namespace sherd {

// "F32" and so on; none: a name that is not known.
const char* safetensors_name(DType dtype);
std::optional<DType> safetensors_dtype(const std::string& name);

using SafetensorsMetadata = std::map<std::string, std::string>;

class SafetensorsReader {
 public:
  struct Info {
    std::string name;
    DType dtype;
    Dims shape;
    int64_t offset;  // of its first byte, from the end of the header
    int64_t bytes;
  };

  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return path_; }
  int64_t data_begin() const { return data_begin_; }             // bytes before the first tensor
  const std::vector<Info>& tensors() const { return tensors_; }  // in the order of their bytes
  const SafetensorsMetadata& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return index_.contains(name); }
  const Info& info(const std::string& name) const;  // Error if there is none of that name

  // On the CPU. Reading is safe from several threads.
  Tensor read(const std::string& name) const;
  // Elements [begin, end) of the flattened tensor, in its own dtype; 0 <= begin <= end <= numel.
  void read_range(const std::string& name, int64_t begin, int64_t end, void* to) const;

 private:
  void parse(const std::string& header);
  void check_cover(int64_t data_bytes);
  void read_bytes(int64_t offset, int64_t bytes, void* to, const std::string& what) const;

  std::string path_;
  int descriptor_ = -1;
  int64_t data_begin_ = 0;
  std::vector<Info> tensors_;
  std::map<std::string, size_t> index_;
  SafetensorsMetadata metadata_;
};

class SafetensorsWriter {
 public:
  struct Entry {
    std::string name;
    DType dtype;
    Dims shape;
  };

  // In the order in which the tensors will come; names are unique. Memory: the header.
  SafetensorsWriter(const std::string& path, std::vector<Entry> entries,
                    const SafetensorsMetadata& metadata = {});

  // The next tensor whole, on the CPU, any strides. Error if dtype or shape is not what was said.
  void append(const Tensor& tensor);
  // The next bytes of the current tensor, which may come in parts; a tensor of no bytes needs one
  // call of none.
  void append_bytes(const void* data, int64_t bytes);
  // Publishes the file. Error if tensors are missing; then, and if it is never called, nothing is
  // left of the file.
  FileSummary finish();
  // Bytes before the first tensor; the tensors follow side by side.
  int64_t data_begin() const { return data_begin_; }
  // After finish(): see AtomicFile.
  const std::vector<uint64_t>& block_checksums() const { return file_.block_checksums(); }

 private:
  const Entry& current() const;  // Error if all have come

  AtomicFile file_;
  std::vector<Entry> entries_;
  int64_t data_begin_ = 0;
  size_t at_ = 0;
  int64_t done_ = 0;  // bytes of the current tensor that have come
};

// In the order of the original library: wider elements first, then as given (by name); so that
// every tensor is aligned to its elements.
std::vector<SafetensorsWriter::Entry> in_file_order(std::vector<SafetensorsWriter::Entry> entries);

std::map<std::string, Tensor> load_safetensors(const std::string& path);
// In the order of the original library: the file has the same bytes as the one that Python writes.
FileSummary save_safetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                             const SafetensorsMetadata& metadata = {});

}  // namespace sherd
